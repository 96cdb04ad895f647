# SPDX-License-Identifier: Apache-2.0
"""A workload through the real core of the dataflow in virtual time: issue, leases, pacing, sealing
and commits are the service's own, nodes and the trainer only take their time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.overlap_workload import BusyInterval, Window, Workload, bound_s
from benchmarks.staleness import POLICY, rules
from benchmarks.virtual_run import TOKEN_S, Answer, VirtualRun
from penstock.dataflow.core.consumers import Consumer, PolicySpec
from penstock.dataflow.core.coordinator import IssueSpec
from penstock.dataflow.core.groups import ClosingKind, ClosingPolicy, LeaseSpec
from penstock.dataflow.core.leasing import Grant
from penstock.dataflow.ledger.assemble import CoreSpec
from penstock.dataflow.sources import Source
from penstock.types import GroupId


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapResult:
    """One run, from the first lease to the last commit."""

    workload: Workload
    seconds: float
    commits_at: Sequence[float]
    busy_intervals: Sequence[BusyInterval]
    """Of every answer that was trained."""
    generated_s: float
    """Slots at work, for what was trained or not."""
    wait_s: float
    """Of the trainer for a batch, the first included."""

    @property
    def trained_s(self) -> float:
        return sum(spell.seconds for spell in self.busy_intervals)

    @property
    def lost(self) -> float:
        """Share of generation that was never trained."""
        return 1 - self.trained_s / self.generated_s

    @property
    def idle(self) -> float:
        """Share of slot time without work."""
        return 1 - self.generated_s / (self.workload.num_slots * self.seconds)

    @property
    def whole_fraction(self) -> float:
        """Of the bound of the whole run, with its filling and its draining."""
        workload = self.workload
        bound = bound_s(
            [spell.seconds for spell in self.busy_intervals],
            num_batches=workload.steps,
            num_slots=workload.num_slots,
            train_s=workload.train_s,
        )
        return bound / self.seconds

    @property
    def fraction(self) -> float:
        """Of the bound in the steady state: without as many batches at either end as may be under
        way at once."""
        workload = self.workload
        edge = workload.max_staleness + 1
        first, last = self.commits_at[edge - 1], self.commits_at[-1 - edge]
        window = Window(begin=first, end=last, num_batches=workload.steps - 2 * edge)
        return window.fraction(
            self.busy_intervals, num_slots=workload.num_slots, train_s=workload.train_s
        )


class Trainer(Protocol):
    """Asks for batches and trains them."""

    consumer: Consumer
    wait_s: float
    commits_at: list[float]

    def poll(self) -> None: ...


class _Trainer:
    """Asks for a batch as soon as it is free, and trains it for a fixed time."""

    def __init__(self, run: VirtualRun, train_s: float) -> None:
        self.consumer = run.coordinator.consumers[POLICY]
        self.wait_s = 0.0
        self.commits_at: list[float] = []
        self._run = run
        self._train_s = train_s
        self._free_since: float | None = run.now

    def poll(self) -> None:
        run = self._run
        if self._free_since is None:
            return
        if run.sealing.seal(self.consumer, self.consumer.last_sealed + 1, run.now) is None:
            return
        run.router.run(run.now)
        self.wait_s += run.now - self._free_since
        self._free_since = None
        run.at(run.now + self._train_s + run.call_s, self._trained)

    def _trained(self) -> None:
        self._run.commit(self.consumer)
        self._run.publish(POLICY)
        self._free_since = self._run.now
        self.commits_at.append(self._run.now)


class _Answers:
    """Answers of the workload, and when each began."""

    def __init__(self, workload: Workload) -> None:
        self.began: list[tuple[GroupId, float, float]] = []
        """Group, time and seconds of every rollout."""
        self._workload = workload
        self.run: VirtualRun | None = None

    def __call__(self, grant: Grant) -> Answer:
        assert self.run is not None
        tokens = self._workload.tokens(int(grant.group_id.partition("-")[2]), grant.slot)
        self.began.append((grant.group_id, self.run.now, tokens * TOKEN_S))
        return Answer(tokens=tokens, reward=float(grant.slot))


def flow(
    workload: Workload,
    *,
    call_s: float = 0.0,
    make_trainer: Callable[[VirtualRun, float], Trainer] = _Trainer,
) -> OverlapResult:
    """Each rollout and each batch costs `call_s` more than its work. `make_trainer` gets the run
    and the seconds that a batch trains."""
    source = Source(name="train", weight=1.0, make=lambda n, seed: {"n": n}, limit=None)
    answers = _Answers(workload)
    run = answers.run = VirtualRun(
        core_spec(workload, steps=workload.steps), [source], answers, call_s=call_s
    )
    trainer = make_trainer(run, workload.train_s)
    started_at = run.now
    run.take_over(POLICY)
    for index in range(workload.num_nodes):
        run.join(f"node-{index}", len(range(index, workload.num_slots, workload.num_nodes)))
    run.after_settle.append(trainer.poll)
    run.run(lambda: trainer.consumer.lineage.number >= workload.steps)
    trained = {group for (_, group), fate in run.tally.fates.items() if fate.state == "sealed"}
    return OverlapResult(
        workload=workload,
        seconds=run.now - started_at,
        commits_at=trainer.commits_at,
        busy_intervals=[
            BusyInterval(began_at=at, seconds=s)
            for group, at, s in answers.began
            if group in trained
        ],
        generated_s=run.generated * TOKEN_S,
        wait_s=trainer.wait_s,
    )


def core_spec(workload: Workload, *, steps: int, max_attempts: int = 3, seed: int = 0) -> CoreSpec:
    return CoreSpec(
        policies=(
            PolicySpec(
                policy=POLICY,
                groups_per_batch=workload.groups_per_batch,
                max_staleness=workload.max_staleness,
                steps=steps,
            ),
        ),
        rules=tuple(rules("edf")),
        issue=IssueSpec(num_slots=workload.group_size),
        closing=ClosingPolicy(kind=ClosingKind.COMPLETE),
        lease=LeaseSpec(ttl_s=60.0, start_to_close_s=1e9, max_attempts=max_attempts),
        workflow="single_turn",
        seed=seed,
    )
