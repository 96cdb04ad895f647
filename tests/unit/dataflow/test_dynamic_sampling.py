# SPDX-License-Identifier: Apache-2.0
"""DAPO's dynamic sampling is online: a prompt that is solved in mid-run leaves the batches, comes
up again on later passes, and is trained again once its answers differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.local_run import LocalNode, LocalTrainer, run_config, write_tasks

from penstock.config import RunConfig
from penstock.dataflow.core.leasing import Grant, LiveVersion
from penstock.dataflow.ledger.recorded import open_recorded_run
from penstock.dataflow.records import BatchRecord, FateRecord, GroupRecord
from penstock.dataflow.service.build import build
from penstock.types import DropReason, GroupId, Manifest, PolicyName, Task
from penstock.wire.codec import decode

POLICY = PolicyName("policy")
NUM_TASKS, GROUP_SIZE, GROUPS_PER_BATCH, STEPS = 4, 4, 3, 24
SOLVED = range(6, 14)
"""Versions that answer task 0 without a fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """One group of task 0."""

    number: int
    """Version that sampled it."""
    end: str
    """`trained`, or why it was dropped."""
    rule: str


def config(folder: Path, algorithm: str, rules: Sequence[Mapping[str, Any]] = ()) -> RunConfig:
    """A run file that names its algorithm and leaves the rest to the preset."""
    tasks = write_tasks(folder / "tasks.jsonl", ({"task": n} for n in range(NUM_TASKS)))
    made = run_config(
        rules=rules,
        tasks=tasks,
        group_size=GROUP_SIZE,
        groups_per_batch=GROUPS_PER_BATCH,
        max_staleness=0,
        steps=STEPS,
    )
    values = made.model_dump(mode="json")
    values["algorithm"] = {"name": algorithm, "num_generations": GROUP_SIZE}
    return RunConfig.model_validate(values)


async def tries(folder: Path, config: RunConfig) -> list[Try]:
    """What became of task 0, in the order of issue, in a run of the real service."""
    sampled_by: dict[GroupId, int] = {}

    def reward(task: Task, grant: Grant, live: Sequence[LiveVersion]) -> float:
        if task.payload["task"] != 0:
            return float(grant.slot % 2)
        sampled_by[grant.group_id] = live[0].number
        return 1.0 if live[0].number in SOLVED else float(grant.slot % 2)

    service = build(config, folder / "ledger")
    try:
        trainer, node = LocalTrainer(service, POLICY), LocalNode(service, reward)
        await trainer.take_over()
        await node.join()
        while trainer.number < STEPS:
            if await trainer.batch() is None:
                assert await node.work(), "a batch that is not full needs more work"
            else:
                await trainer.commit()
    finally:
        service.close()
    return read_tries(folder, sampled_by)


def read_tries(folder: Path, sampled_by: Mapping[GroupId, int]) -> list[Try]:
    recorded = open_recorded_run(folder / "ledger")
    try:
        issued = {one.group_id: one.issue for one in recorded.coordinator.read(GroupRecord)}
        fates = {one.group_id: one for one in recorded.coordinator.read(FateRecord)}
        batches = recorded.coordinator.read(BatchRecord)
    finally:
        recorded.close()
    assert [batch.num_groups for batch in batches] == [GROUPS_PER_BATCH] * STEPS, "always full"
    trained = {group.group_id for b in batches for group in decode(b.manifest, Manifest).groups}
    known = sorted((g for g in sampled_by if g in fates), key=lambda g: issued[g])
    return [
        Try(
            number=sampled_by[group],
            end="trained" if group in trained else fates[group].reason,
            rule=fates[group].rule,
        )
        for group in known
        if fates[group].reason != DropReason.REMAINDER
    ]


async def test_a_prompt_solved_in_mid_run_is_dropped_and_later_revisited(tmp_path: Path) -> None:
    found = await tries(tmp_path, config(tmp_path, "dapo"))
    before = [one for one in found if one.number < SOLVED.start]
    solved = [one for one in found if one.number in SOLVED]
    after = [one for one in found if one.number >= SOLVED.stop]
    assert len(before) >= 2 and {one.end for one in before} == {"trained"}
    assert len(solved) >= 2, "it is looked at again while it is solved"
    assert {(one.end, one.rule) for one in solved} == {("uniform_reward", "reward-spread")}
    assert len(after) >= 2 and {one.end for one in after} == {"trained"}


async def test_without_the_preset_solved_prompts_fill_the_batches(tmp_path: Path) -> None:
    found = await tries(tmp_path, config(tmp_path, "grpo"))
    assert any(one.number in SOLVED for one in found)
    assert {one.end for one in found} == {"trained"}


async def test_with_a_filter_a_solved_prompt_is_rolled_out_seldom_and_comes_back(
    tmp_path: Path,
) -> None:
    rules = [{"curate": "solved-filter", "decay": 0.0, "revisit": 0.3}]
    plain = await tries(tmp_path / "plain", config(tmp_path, "dapo"))
    found = await tries(tmp_path / "filtered", config(tmp_path, "dapo", rules))
    num_solved = sum(one.number in SOLVED for one in found)
    assert 1 <= num_solved < sum(one.number in SOLVED for one in plain)
    assert found[-1].number >= SOLVED.stop and found[-1].end == "trained"
