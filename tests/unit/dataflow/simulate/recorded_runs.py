# SPDX-License-Identifier: Apache-2.0
"""Small recorded runs under chosen rules: the real service over a real ledger, with a node and a
trainer of few lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.local_run import LocalNode, LocalTrainer, run_config, write_tasks

from penstock.config import RunConfig
from penstock.dataflow.core.leasing import Grant, LiveVersion
from penstock.dataflow.service.build import build
from penstock.dataflow.sources import derive_seed
from penstock.types import PolicyName, Task

POLICY = PolicyName("policy")
NUM_TASKS = 12

Rules = tuple[Mapping[str, Any], ...]
VANILLA: Rules = ()
PICKY: Rules = (
    {"curate": "greso", "floor_easy": 0.2},
    {"admit": "reward-spread"},
    {"replay": "uniform", "ratio": 0.5, "max_uses": 3, "max_staleness": 4},
)


def config(folder: Path, rules: Rules, *, steps: int = 12) -> RunConfig:
    payloads = ({"task": number} for number in range(NUM_TASKS))
    return run_config(
        seed=7,
        rules=rules,
        tasks=write_tasks(folder / "tasks.jsonl", payloads),
        group_size=2,
        groups_per_batch=3,
        max_staleness=1,
        steps=steps,
    )


def reward(task: Task, grant: Grant, live: Sequence[LiveVersion]) -> float:
    """A third of the tasks is always solved, a third never, a third at random."""
    number = int(task.payload["task"])
    if number % 3 < 2:
        return float(number % 3)
    return float(derive_seed(grant.group_id, grant.slot) % 2)


async def record(folder: Path, rules: Rules, *, steps: int = 12) -> None:
    """A complete run of `steps` steps; its ledger is in `ledger`."""
    service = build(config(folder, rules, steps=steps), folder / "ledger")
    try:
        trainer, node = LocalTrainer(service, POLICY), LocalNode(service, reward)
        await trainer.take_over()
        await node.join()
        while trainer.number < steps:
            if await trainer.batch() is None:
                await node.work(max_slots=5)
            else:
                await node.work(max_slots=3)
                await trainer.commit()
    finally:
        service.close()
