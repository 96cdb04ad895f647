# SPDX-License-Identifier: Apache-2.0
"""Four pipelines on the same resources in virtual time, and how much of their time is idle.

Issue, leases, pacing, sealing and commits are the dataflow's own, the change between rollout and
training is decided by the core's `Multiplexer` and the fleet's planner; resources only take their
time. A resource that changes over, and a lane without an answer, are idle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.overlap_virtual import core_spec
from benchmarks.overlap_workload import Workload, barrier_s
from benchmarks.staleness import POLICY
from benchmarks.virtual_run import TOKEN_S, Answer, VirtualRun
from penstock.dataflow.core.leasing import Grant
from penstock.dataflow.core.multiplexing import (
    Multiplexer,
    Phase,
    SwitchTrigger,
    VisitSpec,
    batches_per_visit,
)
from penstock.dataflow.records import BatchRecord
from penstock.dataflow.sources import Source
from penstock.fleet.idle_forecast import Load, Pipeline, Tagging
from penstock.fleet.inventory import ROLLOUT, TRAIN, Resource
from penstock.fleet.tag_plan import ServiceNeed, plan_tags, split_by_rates
from penstock.types import Manifest
from penstock.wire.codec import decode

SLOTS = 8
"""Lanes of a resource that generates."""
MICRO_BATCHES = 8
SWITCH_SHARE = 0.02
"""Of a step, for each change between rollout and training."""
TRAINER, NODES = "trainer", "nodes"
WORKLOAD = Workload(
    steps=60, groups_per_batch=32, group_size=8, max_staleness=4, sigma=1.0, max_tokens=2000
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A pipeline on resources with these tags; the dedicated ones divide them by planned rates."""

    pipeline: Pipeline
    ratio: float
    """Rollout to train: work of a batch in seconds of one resource."""
    num_resources: int = 8
    rollout_only: int = 0
    """Of a multiplexed pipeline: resources without the tag `train`."""
    switch_share: float = SWITCH_SHARE
    batch_dispatch: bool = False
    workload: Workload = WORKLOAD

    @property
    def load(self) -> Load:
        """Work of one batch, and what it loses at the end of a batch on its own resources."""
        work = self.workload
        rollout_s = work.rows_per_batch * work.expected_tokens * TOKEN_S / SLOTS
        train_s = rollout_s / self.ratio
        step_s = (rollout_s + train_s) / self.num_resources
        return Load(
            rollout_s=rollout_s,
            train_s=train_s,
            switch_s=self.switch_share * step_s,
            micro_batches=MICRO_BATCHES,
        )

    @property
    def step_s(self) -> float:
        """With nobody ever idle."""
        return (self.load.rollout_s + self.load.train_s) / self.num_resources

    @property
    def max_staleness(self) -> int:
        is_on_policy = self.pipeline in (Pipeline.NAIVE, Pipeline.MICRO_BATCH)
        return 0 if is_on_policy else self.workload.max_staleness

    @property
    def batches_per_visit(self) -> int:
        return batches_per_visit(
            switch_s=self.load.switch_s,
            step_s=self.step_s,
            max_staleness=self.max_staleness,
            switching=1 - self.rollout_only / self.num_resources,
        )

    def resources(self) -> list[Resource]:
        """With the rates that were measured; equal machines."""
        load, work = self.load, self.workload
        tokens = work.rows_per_batch * work.expected_tokens
        return [
            Resource(
                name=f"node-{index}",
                tags=frozenset({ROLLOUT} if index < self.rollout_only else {ROLLOUT, TRAIN}),
                service=NODES,
                rollout_tokens_per_s=tokens / load.rollout_s,
                train_tokens_per_s=tokens / load.train_s,
            )
            for index in range(self.num_resources)
        ]

    def tagged(self) -> list[Resource]:
        """As the pipeline wants them: dedicated ones keep one tag each."""
        resources = self.resources()
        if self.pipeline is Pipeline.MULTIPLEXED:
            return resources
        tokens = self.workload.rows_per_batch * self.workload.expected_tokens
        training = split_by_rates(resources, rollout_tokens=tokens, train_tokens=tokens)
        return [
            replace(one, tags=frozenset({TRAIN if one.name in training else ROLLOUT}))
            for one in resources
        ]

    @property
    def tagging(self) -> Tagging:
        tags = [one.tags for one in self.tagged()]
        return Tagging(
            rollout=tags.count(frozenset({ROLLOUT})),
            train=tags.count(frozenset({TRAIN})),
            both=tags.count(frozenset({ROLLOUT, TRAIN})),
        )

    def forecast_load(self) -> Load:
        """With the tail that a barrier adds to a batch, as measured on the first ones."""
        slots = self.tagging.rollout * SLOTS
        if not slots:
            return self.load
        batches = list(replace(self.workload, steps=8).batches())
        tails = [barrier_s(batch, slots) - sum(batch) / slots for batch in batches]
        return replace(self.load, tail_s=sum(tails) / len(tails))


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeAccount:
    """Resource seconds of the steady state."""

    rollout_s: float
    train_s: float
    switch_s: float
    total_s: float
    lane_idle: float
    """Share of lane time without an answer, of resources that were to generate."""
    wasted: float
    """Share of generated tokens that were never trained."""
    triggers: Sequence[SwitchTrigger]

    @property
    def idle(self) -> float:
        """Neither generating nor training; a change over is idle."""
        return 1 - (self.rollout_s + self.train_s) / self.total_s


@dataclass(frozen=True, slots=True)
class _Spell:
    """A resource at work, or changing over."""

    what: str
    begin: float
    end: float
    num_resources: int


class _Trainer:
    """Trains on the resources that the planner gives it; of a multiplexed pipeline, when the
    multiplexer says so."""

    def __init__(self, point: Point, run: VirtualRun) -> None:
        self.consumer = run.coordinator.consumers[POLICY]
        self.commits_at: list[float] = []
        self.cycles_at: list[float] = []
        """When everybody could generate again."""
        self.spells: list[_Spell] = []
        self.triggers: list[SwitchTrigger] = []
        self.resources = {one.name: one for one in point.tagged()}
        self._run, self._point = run, point
        able = sum(TRAIN in one.tags for one in self.resources.values())
        self._train_need = ServiceNeed(service=TRAINER, tag=TRAIN, count=able)
        self._rollout_need = ServiceNeed(service=NODES, tag=ROLLOUT)
        self._streams = point.pipeline is Pipeline.MICRO_BATCH
        spec = VisitSpec(batches=point.batches_per_visit, timeout_s=20 * point.step_s)
        self._multiplexer = (
            Multiplexer(spec, run.now) if point.pipeline is Pipeline.MULTIPLEXED else None
        )
        self._is_busy = False
        """Training, or waiting for resources that change over."""
        if self._multiplexer is None:
            self._apply_plan(wants_train=True)

    @property
    def _gang(self) -> int:
        return sum(one.service == TRAINER for one in self.resources.values())

    def rolling_out(self) -> list[str]:
        return [name for name, one in self.resources.items() if one.service == NODES]

    # --- changes over -------------------------------------------------------------------------

    def _apply_plan(self, *, wants_train: bool) -> list[str]:
        """The resources that change over."""
        needs = [*([self._train_need] if wants_train else []), self._rollout_need]
        planned = plan_tags([*self.resources.values()], needs)
        for change in planned.changes:
            one = self.resources[change.resource]
            self.resources[change.resource] = replace(one, service=change.after)
        return [change.resource for change in planned.changes]

    def _change_over(self, phase: Phase) -> None:
        changing = self._apply_plan(wants_train=phase is Phase.TRAIN)
        run, until = self._run, self._run.now + self._point.load.switch_s
        self.spells.append(_Spell("switch", run.now, until, len(changing)))
        if phase is Phase.TRAIN:
            for name in changing:
                run.pause(name)
        self._is_busy = True
        run.at(until, partial(self._changed_over, phase, changing))

    def _changed_over(self, phase: Phase, changing: Sequence[str]) -> None:
        self._is_busy = False
        if phase is Phase.ROLLOUT:
            self.cycles_at.append(self._run.now)
            for name in changing:
                self._run.resume(name)

    # --- training -----------------------------------------------------------------------------

    def poll(self) -> None:
        if self._is_busy:
            return
        if self._multiplexer is not None:
            per_batch = self.consumer.terms.groups_per_batch
            switch = self._multiplexer.decide(
                ready_batches=self.consumer.num_admitted // per_batch,
                batches_left=self.consumer.terms.steps - self.consumer.lineage.number,
                is_training=False,
                now=self._run.now,
            )
            if switch is not None:
                self.triggers.append(switch.trigger)
                self._change_over(switch.phase)
                return
            if self._multiplexer.phase is Phase.ROLLOUT:
                return
        self._train_next()

    def _train_next(self) -> None:
        run, consumer = self._run, self.consumer
        seal = run.sealing.seal_instalment if self._streams else run.sealing.seal
        record = seal(consumer, consumer.last_sealed + 1, run.now)
        if record is None:
            return
        run.router.run(run.now)
        rows = sum(1 for _ in decode(record.manifest, Manifest).rows)
        seconds = self._point.load.train_s * rows / self._point.workload.rows_per_batch / self._gang
        self._is_busy = True
        self.spells.append(_Spell(TRAIN, run.now, run.now + seconds, self._gang))
        is_last = isinstance(record, BatchRecord) or record.is_last
        run.at(run.now + seconds, partial(self._trained, is_last))

    def _trained(self, is_last: bool) -> None:
        self._is_busy = False
        if is_last:
            self._run.commit(self.consumer)
            self._run.publish(POLICY)
            self.commits_at.append(self._run.now)
            if self._multiplexer is None:
                self.cycles_at.append(self._run.now)


def simulate(point: Point) -> TimeAccount:
    """Run all steps, and account for the steady state."""
    workload = replace(point.workload, max_staleness=point.max_staleness)
    source = Source(name="train", weight=1.0, make=lambda n, seed: {"n": n}, limit=None)

    def answer(grant: Grant) -> Answer:
        issue = int(grant.group_id.partition("-")[2])
        return Answer(tokens=workload.tokens(issue, grant.slot), reward=float(grant.slot))

    run = VirtualRun(
        core_spec(workload, steps=workload.steps),
        [source],
        answer,
        batch_dispatch=point.batch_dispatch,
    )
    trainer = _Trainer(point, run)
    run.take_over(POLICY)
    for name in trainer.rolling_out():
        run.join(name, SLOTS)
    run.after_settle.append(trainer.poll)
    run.run(lambda: trainer.consumer.lineage.number >= workload.steps)
    return _account(point, trainer, run)


def _account(point: Point, trainer: _Trainer, run: VirtualRun) -> TimeAccount:
    """From the end of one cycle to that of another, without the filling and the draining of the
    run: a cut elsewhere would count more of one kind of work."""
    edge = point.max_staleness + 1
    first, last = trainer.commits_at[edge - 1], trainer.commits_at[-edge]
    cycles = [at for at in trainer.cycles_at if first <= at <= last]
    begin, end = (cycles[0], cycles[-1]) if len(cycles) > 2 else (first, last)

    def within(since: float, until: float) -> float:
        return max(0.0, min(until, end) - max(since, begin))

    def booked(what: str) -> float:
        found = (one for one in trainer.spells if one.what == what)
        return sum(one.num_resources * within(one.begin, one.end) for one in found)

    rollout_s = sum(within(since, until) for _, since, until in run.spells) / SLOTS
    total_s = point.num_resources * (end - begin)
    train_s, switch_s = booked(TRAIN), booked("switch")
    tagging = point.tagging
    generating_s = (
        total_s - train_s - switch_s
        if point.pipeline is Pipeline.MULTIPLEXED
        else tagging.rollout * (end - begin)
    )
    trained = sum(fate.tokens for fate in run.tally.fates.values() if fate.state == "sealed")
    return TimeAccount(
        rollout_s=rollout_s,
        train_s=train_s,
        switch_s=switch_s,
        total_s=total_s,
        lane_idle=1 - rollout_s / generating_s,
        wasted=1 - trained / run.generated,
        triggers=tuple(trainer.triggers),
    )
