# SPDX-License-Identifier: Apache-2.0
"""Data algorithms at work: rollouts that a learner needs to reach a target accuracy.

The real service over a real ledger serves one prompt stream of mixed difficulty; only the rules
differ. Replay is measured on top of dynamic sampling, and so is GRESO. What learns is a few
numbers, or with `--learner lm` a small language model. Beside it, in virtual time: which answers
expire under EDF and under FIFO, when lengths are log-normal."""

from __future__ import annotations

import argparse
import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Protocol

import numpy as np

from benchmarks.bandit import Learner, TaskSet
from benchmarks.harness import log_line, result, scratch
from benchmarks.local_run import LocalNode, LocalTrainer, quiet, run_config, write_tasks
from benchmarks.plot import Bar, bars
from benchmarks.reverse_tasks import make_tasks
from benchmarks.staleness import POLICY, Workload, observe
from penstock.dataflow.core.leasing import Grant, LiveVersion
from penstock.dataflow.service.build import build
from penstock.dataflow.service.coordinator import DataflowService
from penstock.dataflow.sources import derive_seed
from penstock.types import JsonObject, Manifest, Task

T_95 = {3: 4.303, 5: 2.776, 6: 2.571, 8: 2.365, 10: 2.262}
"""Student's t, two-sided 95 %, by number of seeds."""

Rules = tuple[Mapping[str, Any], ...]
"""As a run file has them under `dataflow.rules`."""

SPREAD: Rules = ({"admit": "reward-spread"},)
GRESO: Rules = (*SPREAD, {"curate": "greso"})


def replay(ratio: float) -> Rules:
    return ({"replay": "newest", "ratio": ratio, "max_uses": 4, "max_staleness": 8},)


VARIANTS: Mapping[str, Rules] = {
    "vanilla": (),
    "dynamic sampling": SPREAD,
    "replay 0.3": SPREAD + replay(0.3),
    "replay 0.5": SPREAD + replay(0.5),
    "replay 0.7": SPREAD + replay(0.7),
    "greso": GRESO,
    "greso, replay 0.5": GRESO + replay(0.5),
}
"""`dynamic sampling` is replay ratio 0."""
LM_VARIANTS = ("vanilla", "dynamic sampling", "replay 0.5", "greso", "greso, replay 0.5")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    num_tasks: int = 192
    groups_per_batch: int = 16
    group_size: int = 8
    max_staleness: int = 1
    target: float = 0.8
    max_steps: int = 400
    is_lm: bool = False
    """A small language model learns, instead of a few numbers."""


LM = Setting(groups_per_batch=64, max_steps=150, target=0.5, is_lm=True)
QUICK_LM = Setting(groups_per_batch=64, max_steps=40, target=0.3, is_lm=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """One run, until the target or the last step."""

    rollouts: int
    steps: int
    accuracy: float
    skipped: int
    """Tasks that were never rolled out."""
    wasted: float
    """Share of rollouts in groups that rules refused."""


def open_service(setting: Setting, rules: Rules, seed: int, folder: Path) -> DataflowService:
    """The service over one prompt stream, the same for every variant of a seed."""
    order = np.random.default_rng([seed, 1]).permutation(setting.num_tasks)
    tasks: list[JsonObject] = [{"task": n} for n in range(setting.num_tasks)]
    if setting.is_lm:
        tasks = make_tasks(seed)
    config = run_config(
        seed=seed,
        rules=rules,
        tasks=write_tasks(folder / "tasks.jsonl", (tasks[int(place)] for place in order)),
        group_size=setting.group_size,
        groups_per_batch=setting.groups_per_batch,
        max_staleness=setting.max_staleness,
        steps=setting.max_steps,
    )
    return build(config, folder / "ledger")


class Player(Protocol):
    """What learns: it answers tasks and trains on batches."""

    @property
    def accuracy(self) -> float: ...
    def prepare(self, leased: Sequence[tuple[Task, Grant]]) -> None: ...
    def reward(self, task: Task, grant: Grant, live: Sequence[LiveVersion]) -> float: ...
    def train(self, batch: Manifest) -> None: ...


@dataclass(slots=True)
class BanditPlayer:
    learner: Learner
    seed: int
    task_of: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def accuracy(self) -> float:
        return self.learner.accuracy

    def prepare(self, leased: Sequence[tuple[Task, Grant]]) -> None:
        for task, _ in leased:
            self.task_of[task.key] = int(task.payload["task"])

    def reward(self, task: Task, grant: Grant, live: Sequence[LiveVersion]) -> float:
        luck = derive_seed(self.seed, grant.group_id, grant.slot) / (1 << 63)
        return float(luck < self.learner.chance(self.task_of[task.key], live[0].number))

    def train(self, batch: Manifest) -> None:
        self.learner.train(batch, [self.task_of[group.task_key] for group in batch.groups])


def new_player(setting: Setting, seed: int, folder: Path) -> Player:
    if setting.is_lm:
        from benchmarks.small_lm import SmallLm

        return SmallLm(folder, seed)
    tasks = TaskSet.draw(np.random.default_rng(seed), setting.num_tasks)
    return BanditPlayer(Learner(tasks), seed)


async def train(setting: Setting, rules: Rules, seed: int, folder: Path) -> Reached:
    player = new_player(setting, seed, folder)
    service = open_service(setting, rules, seed, folder)
    try:
        trainer = LocalTrainer(service, POLICY)
        node = LocalNode(service, player.reward, prepare=player.prepare)
        await trainer.take_over()
        await node.join()
        while player.accuracy < setting.target and trainer.number < setting.max_steps:
            batch = await trainer.batch()
            if batch is None:
                await node.work(max_slots=setting.groups_per_batch * setting.group_size)
                continue
            player.train(batch)
            await trainer.commit()
        wasted = sum(service.coordinator.waste.tokens.values())
        return Reached(
            rollouts=node.num_rollouts,
            steps=trainer.number,
            accuracy=player.accuracy,
            skipped=service.coordinator.supply.num_skipped,
            wasted=wasted / node.num_rollouts,
        )
    finally:
        service.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    mean: float
    half_width: float
    """Of the 95 % confidence interval of the mean, over seeds."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        n = len(values)
        t = T_95.get(n, T_95[3])
        return cls(mean=fmean(values), half_width=t * stdev(values) / math.sqrt(n))


def compare(
    setting: Setting, variants: Mapping[str, Rules], seeds: Sequence[int], parent: Path | None
) -> dict[str, list[Reached]]:
    found: dict[str, list[Reached]] = {name: [] for name in variants}
    for seed in seeds:  # interleaved: whatever slows this machine slows all of them
        for name, rules in variants.items():
            with scratch(parent) as folder:
                found[name].append(asyncio.run(train(setting, rules, seed, folder)))
            one = found[name][-1]
            log_line(f"seed {seed}, {name}: {one.rollouts:,} rollouts, {one.steps} steps")
        last = ", ".join(f"{name} {runs[-1].rollouts:,}" for name, runs in found.items())
        log_line(f"seed {seed}: rollouts to accuracy {setting.target}: {last}")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Expiry:
    expired_share: float
    """Of finished answers."""
    mean_expired: float
    mean_consumed: float


def expiry(select: str, seeds: Sequence[int], steps: int) -> Expiry:
    """Nodes a fifth faster than the trainer, so that finished groups queue."""
    workload = Workload(select=select, steps=steps, rollout_to_train=1.2)
    runs = [observe(workload, seed, paced=True) for seed in seeds]
    expired = [tokens for run in runs for tokens in run.expired]
    consumed = [tokens for run in runs for tokens in run.consumed]
    return Expiry(
        expired_share=len(expired) / (len(expired) + len(consumed)),
        mean_expired=fmean(expired) if expired else 0.0,
        mean_consumed=fmean(consumed),
    )


def key(name: str) -> str:
    return name.replace(", ", "_").replace(" ", "_").replace(".", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a lower target, fewer seeds")
    parser.add_argument("--learner", choices=("bandit", "lm"), default="bandit")
    parser.add_argument("--folder", type=Path, help="where the ledgers are written")
    parser.add_argument("--plot", type=Path, help="write the figure there, as SVG")
    options = parser.parse_args()
    quiet()
    if options.learner == "lm":
        setting = QUICK_LM if options.quick else LM
    else:
        setting = Setting(target=0.55) if options.quick else Setting()
    seeds = range(3 if options.quick else 5 if setting.is_lm else 6)
    variants = {name: VARIANTS[name] for name in (LM_VARIANTS if setting.is_lm else VARIANTS)}
    found = compare(setting, variants, seeds, options.folder)
    rollouts = {name: Summary.of([run.rollouts for run in runs]) for name, runs in found.items()}
    for name, runs in found.items():
        missed = sum(run.accuracy < setting.target for run in runs)
        log_line(
            f"{name:>18}: {rollouts[name].mean:8,.0f} ± {rollouts[name].half_width:5,.0f} "
            f"rollouts, {fmean(run.steps for run in runs):5.0f} steps, "
            f"{fmean(run.wasted for run in runs):4.0%} refused, "
            f"{fmean(run.skipped for run in runs):5.0f} tasks skipped"
            + (f", {missed} missed the target" if missed else "")
        )
    orders = {
        name: expiry(name, range(2 if options.quick else 5), 40 if options.quick else 120)
        for name in ("edf", "fifo")
    }
    for name, order in orders.items():
        log_line(
            f"{name}: {order.expired_share:.2%} of answers expired, {order.mean_expired:,.0f} "
            f"tokens long on average, {order.mean_consumed:,.0f} those trained"
        )
    if options.plot is not None:
        options.plot.write_text(_figure(setting, rollouts))
    figures = {f"rollouts_{key(name)}": one.mean for name, one in rollouts.items()}
    widths = {f"ci_{key(name)}": one.half_width for name, one in rollouts.items()}
    result(
        **figures,
        **widths,
        **{f"expired_share_{name}": order.expired_share for name, order in orders.items()},
        **{f"mean_expired_{name}": order.mean_expired for name, order in orders.items()},
        **{f"mean_consumed_{name}": order.mean_consumed for name, order in orders.items()},
        missed=sum(run.accuracy < setting.target for runs in found.values() for run in runs),
        seeds=len(seeds),
    )


def _figure(setting: Setting, rollouts: Mapping[str, Summary]) -> str:
    return bars(
        f"Rollouts to accuracy {setting.target:g}",
        [
            Bar(label=name, value=one.mean, half_width=one.half_width)
            for name, one in rollouts.items()
        ],
        unit="rollouts, mean and 95 % confidence interval",
    )


if __name__ == "__main__":
    main()
