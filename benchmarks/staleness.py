# SPDX-License-Identifier: Apache-2.0
"""Staleness: work that is not started against work that is thrown away, over one workload.

Answers have log-normal lengths (sigma = 1), groups have 8, at most 4 versions may pass, and nodes
generate exactly as fast as the trainer trains. `pacing` is the service's own core. `drop` starts
work whenever a lane is free and drops what is too old when a batch is sealed. Both run in virtual
time over the same answers; every lane of a node serves `answers_per_step` of them per training
step. Answers longer than four training steps are lost in every mode: `floor` is their share."""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from benchmarks.harness import log_line, result
from benchmarks.virtual_run import TOKEN_S, Answer, VirtualRun
from penstock.dataflow.core.consumers import Consumer, PolicySpec
from penstock.dataflow.core.coordinator import IssueSpec
from penstock.dataflow.core.groups import ClosingKind, ClosingPolicy, LeaseSpec
from penstock.dataflow.core.leasing import Grant
from penstock.dataflow.core.rule_runner import RuleSpec
from penstock.dataflow.ledger.assemble import CoreSpec
from penstock.dataflow.sources import Source
from penstock.types import DropReason, PolicyName

POLICY = PolicyName("policy")
UNPACED = 100
"""Versions of budget in mode `drop`: so much that no lane ever waits for work."""
WARM_UP = 10
"""Training steps before anything is counted of the trainer's wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is generated and how fast it is trained."""

    steps: int = 150
    groups_per_batch: int = 16
    group_size: int = 8
    max_staleness: int = 4
    sigma: float = 1.0
    mean_tokens: int = 400
    answers_per_step: float = 4.0
    """Mean answers that one lane finishes while the trainer trains one batch."""
    rollout_to_train: float = 1.0
    """Rate of generation in batches per training step."""
    num_nodes: int = 8
    select: str = "edf"

    @property
    def train_s(self) -> float:
        return self.answers_per_step * self.mean_tokens * TOKEN_S

    @property
    def num_lanes(self) -> int:
        rows = self.groups_per_batch * self.group_size
        return round(self.rollout_to_train * rows / self.answers_per_step)

    @property
    def floor(self) -> float:
        """Share of tokens in answers that take longer than the bound lasts."""
        longest = self.max_staleness * self.answers_per_step
        z = (math.log(longest) + self.sigma**2 / 2) / self.sigma
        return NormalDist().cdf(self.sigma - z)

    def answer(self, seed: int) -> Callable[[Grant], Answer]:
        mu = math.log(self.mean_tokens) - self.sigma**2 / 2

        def draw(grant: Grant) -> Answer:
            """Depends on the task alone, so both modes see the same answers."""
            issue = grant.group_id.partition("-")[2]
            rng = random.Random(f"{seed}/{issue}/{grant.slot}")
            tokens = max(1, round(rng.lognormvariate(mu, self.sigma)))
            return Answer(tokens=tokens, reward=rng.random())

        return draw


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One run of one mode."""

    generated: int
    stale: int
    """Tokens lost to staleness, of finished answers and of stopped ones."""
    wait_s: float
    """Of the trainer for a batch, after the warm-up."""
    expired: Sequence[int]
    """Lengths of answers in groups that expired."""
    consumed: Sequence[int]
    """Lengths of answers that were trained."""
    idle: float
    """Share of lane time without work."""


def terms(workload: Workload, max_staleness: int) -> CoreSpec:
    return CoreSpec(
        policies=(
            PolicySpec(
                policy=POLICY,
                groups_per_batch=workload.groups_per_batch,
                max_staleness=max_staleness,
                steps=1_000_000,
            ),
        ),
        rules=tuple(rules(workload.select)),
        issue=IssueSpec(num_slots=workload.group_size),
        closing=ClosingPolicy(kind=ClosingKind.COMPLETE),
        lease=LeaseSpec(ttl_s=60.0, start_to_close_s=1e9, max_attempts=3),
        workflow="single_turn",
        seed=0,
    )


def rules(select: str) -> Iterator[RuleSpec]:
    for policy, hook, name in (
        (None, "mix", "weights"),
        (None, "curate", "all"),
        (POLICY, "admit", "all"),
        (POLICY, "select", select),
    ):
        yield RuleSpec(hook=hook, name=name, options={}, policy=policy, position=0)


class Trainer:
    """Asks for a batch as soon as it is free, and trains it for a fixed time."""

    def __init__(self, run: VirtualRun, workload: Workload, *, drops: bool) -> None:
        self.wait_s = 0.0
        self._run = run
        self._workload = workload
        self._drops = drops
        self._free_since = run.now
        self._is_busy = False

    @property
    def consumer(self) -> Consumer:
        return self._run.coordinator.consumers[POLICY]

    def poll(self) -> None:
        if self._is_busy:
            return
        run, consumer = self._run, self.consumer
        if self._drops:
            self._drop_stale()
        if run.sealing.seal(consumer, consumer.last_sealed + 1, run.now) is None:
            return
        run.router.run(run.now)
        self._is_busy = True
        if consumer.lineage.number >= WARM_UP:
            self.wait_s += run.now - self._free_since
        run.at(run.now + self._workload.train_s, self._trained)

    def _trained(self) -> None:
        self._run.commit(self.consumer)
        self._run.publish(POLICY)
        self._is_busy, self._free_since = False, self._run.now

    def _drop_stale(self) -> None:
        ready = self.consumer.ready
        for group in [*ready.values()]:
            if self.consumer.staleness(group) > self._workload.max_staleness:
                self.consumer.drop(group, DropReason.STALE, "at consume", self._run.now)


def observe(workload: Workload, seed: int, *, paced: bool) -> Observed:
    bound = workload.max_staleness if paced else UNPACED
    source = Source(name="train", weight=1.0, make=lambda n, seed: {"n": n}, limit=None)
    run = VirtualRun(terms(workload, bound), [source], workload.answer(seed))
    trainer = Trainer(run, workload, drops=not paced)
    began_at = run.now
    run.take_over(POLICY)
    for index in range(workload.num_nodes):
        lanes = len(range(index, workload.num_lanes, workload.num_nodes))
        if lanes:
            run.join(f"node-{index}", lanes)
    run.after_settle.append(trainer.poll)
    run.run(lambda: trainer.consumer.lineage.number >= workload.steps)
    lane_s = workload.num_lanes * (run.now - began_at)
    return Observed(
        generated=run.generated,
        stale=run.wasted(DropReason.STALE),
        wait_s=trainer.wait_s,
        expired=lengths(run, "dropped"),
        consumed=lengths(run, "sealed"),
        idle=1 - run.busy_s / lane_s,
    )


def lengths(run: VirtualRun, state: str) -> list[int]:
    return [
        tokens
        for (_, group_id), fate in run.tally.fates.items()
        if fate.state == state
        for tokens in run.tally.tokens_of.get(group_id, [])
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    waste_pacing: float
    waste_drop: float
    wait_pacing: float
    """In training steps per training step."""
    wait_drop: float

    @property
    def wait_ratio(self) -> float:
        """A trainer that waits for less than a thousandth of its time waits for nothing."""
        return max(self.wait_pacing, 1e-3) / max(self.wait_drop, 1e-3)


def compare(workload: Workload, seeds: Sequence[int]) -> Compared:
    pairs = [
        (observe(workload, seed, paced=True), observe(workload, seed, paced=False))
        for seed in seeds
    ]
    trained_s = len(seeds) * (workload.steps - WARM_UP) * workload.train_s
    paced, dropped = zip(*pairs, strict=True)
    return Compared(
        waste_pacing=_waste(paced),
        waste_drop=_waste(dropped),
        wait_pacing=sum(one.wait_s for one in paced) / trained_s,
        wait_drop=sum(one.wait_s for one in dropped) / trained_s,
    )


def _waste(observed: Sequence[Observed]) -> float:
    return sum(one.stale for one in observed) / sum(one.generated for one in observed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer seeds and steps")
    parser.add_argument("--sweep", action="store_true", help="also for longer answers")
    options = parser.parse_args()
    workload = Workload(steps=60 if options.quick else 150)
    seeds = range(3 if options.quick else 10)
    others = (8.0, 2.0, 1.0) if options.sweep else ()
    for answers_per_step in others:
        _log_comparison(replace(workload, answers_per_step=answers_per_step), seeds)
    found = _log_comparison(workload, seeds)
    result(
        waste_pacing=found.waste_pacing,
        waste_drop=found.waste_drop,
        wait_ratio=found.wait_ratio,
        wait_pacing=found.wait_pacing,
        wait_drop=found.wait_drop,
        floor=workload.floor,
        seeds=len(seeds),
        steps=workload.steps,
    )


def _log_comparison(workload: Workload, seeds: Sequence[int]) -> Compared:
    found = compare(workload, seeds)
    log_line(
        f"{workload.answers_per_step:g} answers per lane and step: lost to staleness "
        f"{found.waste_pacing:.2%} with pacing, {found.waste_drop:.2%} dropped at consume "
        f"(floor {workload.floor:.2%}); trainer waits {found.wait_pacing:.2%} and "
        f"{found.wait_drop:.2%} of its training time"
    )
    return found


if __name__ == "__main__":
    main()
