# SPDX-License-Identifier: Apache-2.0
"""The simulation: the service's coordinator, rules, pacing and sealing, driven by a recorded run.

A task issued at its recorded position and time ends as recorded. Issued at another time, it takes
as long as recorded and is as many versions old when it ends. With the recorded rules, every
decision is the same as in the record. Decisions of partitions (failed slots, groups dropped as
stale) are kept. The number of nodes is unlimited: queueing is part of the recorded times."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from penstock.dataflow.core.consumers import Consumer
from penstock.dataflow.core.coordinator import Coordinator
from penstock.dataflow.core.manifests import ManifestCache
from penstock.dataflow.core.messages import DropGroup, GroupEnded, IssueGroup, ToPartition
from penstock.dataflow.core.retention import Retention
from penstock.dataflow.core.rule_runner import RuleRunner
from penstock.dataflow.core.sealing import Sealing
from penstock.dataflow.ledger.assemble import CoreSpec
from penstock.dataflow.ledger.recorded import RecordedRun
from penstock.dataflow.ledger.tables import Tables, open_memory_tables
from penstock.dataflow.records import CommandJournal, GroupRecord
from penstock.dataflow.simulate.recorded_tasks import (
    RecordedGroup,
    RecordedSource,
    RecordedSupply,
    RecordedTasks,
    read_recorded_tasks,
)
from penstock.dataflow.simulate.timeline import ActionKind, Timeline, TrainerAction, read_timeline
from penstock.errors import Conflict
from penstock.types import DropReason, GroupId, PolicyName, RowSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class _SimulatedGroup:
    """A group that was issued in the simulation."""

    record: GroupRecord
    ended: RecordedGroup
    delay_s: float
    """How much later than in the record it was issued; 0 if it matches the record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """Result of a simulation."""

    tables: Tables
    """All records of the simulated run, in memory."""
    rows: Mapping[GroupId, int]
    """Rows of each group."""
    unknown: frozenset[GroupId]
    """Groups issued here whose task was never rolled out in the record."""
    num_unfilled_batches: int
    """Recorded batches that never filled here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSource:
    """A source from the config; its tasks come from the record."""

    name: str
    weight: float
    limit: int | None


def simulate(
    recorded: RecordedRun, terms: CoreSpec, sources: Sequence[SimulatedSource]
) -> SimulationResult:
    """Replay the recorded run with these settings."""
    policies = [policy.policy for policy in terms.policies]
    simulation = _Simulation(
        replace(
            terms,
            policies=tuple(replace(one, train_columns=frozenset()) for one in terms.policies),
        ),
        sources,
        read_recorded_tasks(recorded, policies),
        read_timeline(recorded.coordinator, policies),
        _partitions(recorded.coordinator),
    )
    return simulation.run()


def _partitions(tables: Tables) -> list[int]:
    return [int(index) for (index,) in tables.rows("SELECT DISTINCT partition FROM groups")] or [0]


def _never_called(ordinal: int, seed: int) -> dict[str, object]:
    raise AssertionError("a simulation replays recorded tasks and cannot create new ones")


def _no_stored_rows(policy: PolicyName, group_ids: Sequence[GroupId]) -> Mapping[GroupId, bytes]:
    """A simulation never restarts, so all rows are in memory."""
    return {}


class _Simulation:
    def __init__(
        self,
        terms: CoreSpec,
        sources: Sequence[SimulatedSource],
        tasks: RecordedTasks,
        timeline: Timeline,
        partitions: Sequence[int],
    ) -> None:
        self._tasks = tasks
        self._timeline = timeline
        self._outbox = CommandJournal()
        rules = RuleRunner(terms.rules, self._outbox, seed=terms.seed)
        supply = RecordedSupply(
            [
                RecordedSource(
                    name=source.name,
                    weight=source.weight,
                    make=_never_called,
                    limit=tasks.num_issued.get(source.name, 0),
                    tasks=tasks.tasks,
                )
                for source in sources
            ],
            rules,
            self._outbox,
            workflow=terms.workflow,
            seed=terms.seed,
        )
        supply.limit_to({source.name: source.limit for source in sources})
        retention = Retention([p.policy for p in terms.policies], retain_batches=1 << 30)
        self._coordinator = Coordinator(
            terms.policies, supply, rules, retention, terms.issue, self._outbox, self._send
        )
        for index in partitions:
            self._coordinator.add_partition(index)
        self._sealing = Sealing(self._coordinator, self._outbox, _no_stored_rows, ManifestCache())
        self._now = 0.0
        self._reports: deque[GroupEnded] = deque()
        self._running: dict[GroupId, _SimulatedGroup] = {}
        self._ends: list[tuple[float, int, GroupId]] = []
        ends = (one.ended_at for one in tasks.groups.values() if one.ended_at is not None)
        self._event_times = sorted({*ends, *timeline.times})
        """Times of recorded events that may have caused groups to be issued."""
        self._fresh: dict[PolicyName, dict[int, int]] = {p.policy: {} for p in terms.policies}
        self._blocked: dict[PolicyName, TrainerAction] = {}
        self._rows: dict[GroupId, int] = {}
        self._unknown: set[GroupId] = set()

    def run(self) -> SimulationResult:
        while (now := self._next_at()) is not None:
            self._now = now
            while self._ends and self._ends[0][0] <= now:
                self._end(heapq.heappop(self._ends)[2])
            self._settle()
            for action in self._timeline.pop_due(now):
                self._do(action)
                self._settle()
            for action in [*self._blocked.values()]:
                self._seal(action)
                self._settle()
        tables = open_memory_tables()
        tables.commit(self._outbox.take())
        return SimulationResult(
            tables=tables,
            rows=self._rows,
            unknown=frozenset(self._unknown),
            num_unfilled_batches=sum(
                action.kind is ActionKind.SEAL for action in self._timeline.left
            ),
        )

    def _next_at(self) -> float | None:
        times = [self._timeline.next_at, self._ends[0][0] if self._ends else None]
        return min((at for at in times if at is not None), default=None)

    def _settle(self) -> None:
        """Apply reports and issue groups, as the service does after each command."""
        while True:
            while self._reports:
                self._coordinator.apply(self._reports.popleft(), self._now)
            if self._coordinator.is_finished:
                self._coordinator.drop_open_groups()
            else:
                self._coordinator.issue(self._now)
            if not self._reports:
                return

    # --- simulated nodes ----------------------------------------------------------------------

    def _send(self, index: int, message: ToPartition) -> None:
        match message:
            case IssueGroup(record=record):
                self._issue(record)
            case DropGroup(group_id=group_id, reason=reason):
                self._drop(group_id, reason)
            case _:
                pass  # not relevant to simulated nodes

    def _issue(self, record: GroupRecord) -> None:
        ended = self._tasks.groups.get((record.source, record.ordinal))
        if ended is None:
            self._unknown.add(record.group_id)
            self._report(record.group_id, (), DropReason.REMAINDER)
            return
        delay_s = 0.0 if self._matches_record(ended) else self._now - ended.issued_at
        running = _SimulatedGroup(record=record, ended=ended, delay_s=delay_s)
        self._running[record.group_id] = running
        if ended.ended_at is not None:
            at = max(self._now, ended.ended_at + delay_s)
            heapq.heappush(self._ends, (at, ended.arrival, record.group_id))

    def _matches_record(self, ended: RecordedGroup) -> bool:
        """Whether it is issued after the same event as in the record."""
        recorded = bisect_right(self._event_times, ended.issued_at)
        return recorded == bisect_right(self._event_times, self._now)

    def _end(self, group_id: GroupId) -> None:
        running = self._running.pop(group_id, None)
        if running is not None:
            rows = tuple(self._with_shifted_versions(row, running) for row in running.ended.rows)
            self._report(group_id, rows, running.ended.dropped)

    def _drop(self, group_id: GroupId, reason: DropReason) -> None:
        running = self._running.pop(group_id, None)
        if running is None:
            return
        ended = running.ended
        rows = tuple(
            self._with_shifted_versions(row, running)
            for row, at in zip(ended.rows, ended.delivered_at, strict=True)
            if at + running.delay_s <= self._now
        )
        self._report(group_id, rows, reason)

    def _report(
        self, group_id: GroupId, rows: tuple[RowSummary, ...], dropped: DropReason | None
    ) -> None:
        self._rows[group_id] = len(rows)
        report = GroupEnded(group_id=group_id, policies=(), rows=rows, dropped=dropped)
        self._reports.append(report)

    def _with_shifted_versions(self, row: RowSummary, running: _SimulatedGroup) -> RowSummary:
        """The row with versions of the simulated run, so that it has the recorded age when its
        group ends."""
        if not running.delay_s:
            return row
        versions: dict[PolicyName, tuple[tuple[int, int], ...]] = {}
        for policy, pairs in row.versions.items():
            consumer = self._coordinator.consumers.get(policy)
            if consumer is None:
                versions[policy] = pairs
                continue
            lineage = consumer.lineage
            recorded = self._tasks.number_at(policy, self._now - running.delay_s)
            shifted = {max(0, lineage.number - max(0, recorded - number)) for _, number in pairs}
            versions[policy] = tuple((lineage.incarnation, number) for number in sorted(shifted))
        return structs.replace(row, versions=versions)

    # --- simulated trainers -------------------------------------------------------------------

    def _do(self, action: TrainerAction) -> None:
        consumer = self._coordinator.consumers[action.policy]
        match action.kind:
            case ActionKind.SEAL:
                self._seal(action)
                return
            case ActionKind.INCARNATE:
                self._incarnate(action, consumer)
            case ActionKind.COMMIT:
                self._commit(action, consumer)
            case ActionKind.PUBLISH:
                self._publish(action, consumer)
        self._timeline.complete(action, self._now)

    def _seal(self, action: TrainerAction) -> None:
        consumer = self._coordinator.consumers[action.policy]
        if self._coordinator.has_ended(consumer):
            self._blocked[action.policy] = action
            return
        record = self._sealing.seal(consumer, consumer.last_sealed + 1, self._now)
        if record is None:
            self._blocked[action.policy] = action
            return
        self._blocked.pop(action.policy, None)
        self._fresh[action.policy][record.seq] = record.num_groups - record.num_replayed
        self._timeline.complete(action, self._now)

    def _incarnate(self, action: TrainerAction, consumer: Consumer) -> None:
        lineage = consumer.lineage
        numbers, seqs = (action.number, lineage.number), (action.seq, lineage.seq)
        for number, seq in zip(numbers, seqs, strict=True):
            try:
                record = lineage.incarnate(
                    expected=lineage.incarnation,
                    number=number,
                    seq=seq,
                    request_id=f"incarnation {action.incarnation}",
                    now=self._now,
                )
                break
            except Conflict:  # the simulated run did not get that far; resume at its own end
                continue
        else:
            raise AssertionError("an incarnation may always start at the end of the lineage")
        self._outbox(record)
        lineage.apply_incarnation(record)
        self._timeline.cancel_older(action.policy, action.incarnation, self._now)
        self._coordinator.cursor_moved(consumer, self._fresh[action.policy], self._now)

    def _commit(self, action: TrainerAction, consumer: Consumer) -> None:
        lineage = consumer.lineage
        if lineage.seq >= consumer.last_sealed:
            return
        record = lineage.commit(
            seq=lineage.seq + 1,
            incarnation=lineage.incarnation,
            number=lineage.number + (not action.skipped),
            skipped=action.skipped,
            stats="{}",
            now=self._now,
        )
        self._outbox(record)
        lineage.apply_commit(record)
        self._coordinator.cursor_moved(consumer, consumer.sealed, self._now)

    def _publish(self, action: TrainerAction, consumer: Consumer) -> None:
        lineage = consumer.lineage
        if lineage.has(lineage.incarnation, lineage.number):
            return
        record = lineage.publish(
            incarnation=lineage.incarnation,
            number=lineage.number,
            manifest_digest=action.manifest_digest,
            weights_digest=action.weights_digest,
            now=self._now,
        )
        self._outbox(record)
        lineage.apply_version(record)
