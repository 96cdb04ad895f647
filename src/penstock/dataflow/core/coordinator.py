# SPDX-License-Identifier: Apache-2.0
"""The coordinator: the global state of a run. Decides what to issue to which partition, which
groups are open and when a policy has finished. A pure state machine.

It holds about 100 bytes per row and no tokens. It sends messages to partitions and writes records
to its journal. Each policy's groups belong to its Consumer; `sealing.py` seals batches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum

import msgspec

from penstock.dataflow.core.consumers import Consumer, ConsumerDeps, PolicySpec, Waste
from penstock.dataflow.core.evaluations import Evaluations, EvaluationSpec
from penstock.dataflow.core.failure_limit import FailureLimit
from penstock.dataflow.core.ids import is_evaluation, issue_number, partition_of
from penstock.dataflow.core.messages import (
    Committed,
    DropGroup,
    GroupEnded,
    GroupsFreed,
    HorizonMoved,
    IssueGroup,
    SendToPartition,
    ToCoordinator,
    ToPartition,
    TrainingEnded,
)
from penstock.dataflow.core.retention import Retention
from penstock.dataflow.core.rule_runner import RuleRunner
from penstock.dataflow.core.spot_checks import SpotChecks
from penstock.dataflow.core.task_supply import TaskSupply
from penstock.dataflow.core.versions import Lineage
from penstock.dataflow.records import (
    CommitRecord,
    FreedRecord,
    GroupRecord,
    GroupState,
    Journal,
)
from penstock.errors import NotFound
from penstock.types import (
    DropReason,
    GroupId,
    PolicyName,
    RowId,
)

LAST_VERSION_S = 30.0
"""How long nodes of a finished run wait for its last version to be published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IssueSpec:
    """Settings shared by every group."""

    num_slots: int
    pace: str = "any"
    """`any`, `all`, or the name of the policy whose room decides."""
    session_source: str = ""
    """Groups from this source have one slot, for one session of an external agent."""
    policies: Mapping[str, frozenset[PolicyName]] = field(
        default_factory=dict[str, frozenset[PolicyName]]
    )
    """Policies that a group calls, by source; a source that is not listed calls all of the run."""
    frozen: tuple[PolicyName, ...] = ()
    """Policies without a trainer: groups may call them, and no policy is trained on their turns."""


class PartitionState(StrEnum):
    """A partition's state, as the coordinator sees it."""

    SERVING = "serving"
    DRAINING = "draining"
    """Gets no new groups."""
    GONE = "gone"
    """Drained and empty."""
    LOST = "lost"
    """Declared lost by an operator; permanently fenced."""


class Coordinator:
    def __init__(
        self,
        policies: Sequence[PolicySpec],
        supply: TaskSupply,
        rules: RuleRunner,
        retention: Retention,
        issue_spec: IssueSpec,
        journal: Journal,
        send: SendToPartition,
        evaluation: EvaluationSpec | None = None,
    ) -> None:
        self.waste = Waste(journal)
        self.failure_limit = FailureLimit(journal)
        deps = ConsumerDeps(
            rules=rules,
            retention=retention,
            waste=self.waste,
            journal=journal,
            send=send,
            free=self.free,
            lineage_of=self._lineage_of,
        )
        self.consumers = {p.policy: Consumer(p, deps) for p in policies}
        self.frozen = {policy: Lineage(policy) for policy in issue_spec.frozen}
        """Lineages of the policies without a trainer: each has one version, number 0."""
        self.lineages = {p: found.lineage for p, found in self.consumers.items()} | self.frozen
        """Of every policy, in training or frozen."""
        self.evaluations: Evaluations | None = None
        if evaluation is not None:
            evaluated = self.consumers[evaluation.policy]
            self.evaluations = Evaluations(
                evaluation, self.lineages, lambda: self._has_trained(evaluated), journal, send
            )
        self._sent_ended: dict[int, bool] = {}
        """What each partition knows about the end of the training."""
        self.supply = supply
        self.rules = rules
        self.retention = retention
        self.partition_states: dict[int, PartitionState] = {}
        self.open: dict[GroupId, GroupRecord] = {}
        """Groups that at least one consumer has not judged yet."""
        self.open_by_partition: dict[int, set[GroupId]] = {}
        """Open groups by partition."""
        self._num_open: dict[str, int] = {}
        """Number of open groups by source."""
        self.gone: set[RowId] = set()
        """Rows that no reader may receive anymore."""
        self.quarantined: set[str] = set()
        """Node boots (node, boot_id) that get no work; sent to each partition that joins."""
        self.spot_checks = SpotChecks(journal)
        self._undecided_by: dict[GroupId, set[PolicyName]] = {}
        """Consumers that have not judged an open group yet; only listed if some consumer has."""
        self._issue_spec = issue_spec
        self._journal = journal
        self._send = send
        self._num_issued = 0
        self._sent_horizon: dict[PolicyName, int] = {}
        self._finished_at: float | None = None
        """When the run was first found finished, in this process."""
        self._sent_drops: set[GroupId] = set()
        """Open groups whose partition was sent a drop because the run is over."""

    def consumer(self, policy: str) -> Consumer:
        try:
            return self.consumers[PolicyName(policy)]
        except KeyError:
            known = ", ".join(self.consumers)
            if policy in self.frozen:
                text = f"policy {policy!r} is frozen: it has no batches and no trainer"
                raise NotFound(f"{text}; this run trains {known}") from None
            raise NotFound(f"no policy {policy!r} in this run; it trains {known}") from None

    def _calls(self, source: str) -> Collection[PolicyName]:
        """Policies that a group of this source calls."""
        return self._issue_spec.policies.get(source) or self.lineages

    def takes_part(self, policy: PolicyName, source: str) -> bool:
        """Is this policy trained on groups of this source?"""
        return policy in self.consumers and policy in self._calls(source)

    def _lineage_of(self, policy: PolicyName) -> Lineage | None:
        """None for a frozen one: its tokens do not age."""
        consumer = self.consumers.get(policy)
        return None if consumer is None else consumer.lineage

    # --- partitions ---------------------------------------------------------------------------

    def add_partition(self, index: int, shard: PartitionState = PartitionState.SERVING) -> None:
        self.partition_states[index] = shard
        self.open_by_partition.setdefault(index, set())

    def send_to(self, index: int, message: ToPartition) -> None:
        if self.partition_states[index] not in (PartitionState.GONE, PartitionState.LOST):
            self._send(index, message)

    def broadcast(self, message: ToPartition) -> None:
        for index in self.partition_states:
            self.send_to(index, message)

    def committed(self, record: CommitRecord) -> None:
        """Tell all partitions; the figures of the step stay here."""
        self.broadcast(Committed(record=replace(record, stats="{}")))

    def declare_lost(self, index: int, now: float) -> None:
        """The partition is lost: end its open groups and ignore its messages from now on."""
        self.partition_states[index] = PartitionState.LOST
        for group_id in sorted(self.open_by_partition[index]):
            self._group_ended(
                GroupEnded(
                    group_id=group_id, policies=(), rows=(), dropped=DropReason.PARTITION_LOST
                ),
                now,
            )
        for consumer in self.consumers.values():
            consumer.drop_lost(index, now)
        if self.evaluations is not None:
            self.free(self.evaluations.partition_lost(index, now), now)

    def is_empty(self, index: int) -> bool:
        if self.evaluations is not None and not self.evaluations.is_empty(index):
            return False
        return not self.open_by_partition[index]

    # --- pacing -------------------------------------------------------------------------------

    def _sources_without_room(self) -> set[str]:
        """Sources whose groups may not start now, by pacing: each is paced by the policies that are
        trained on it. A policy that has trained all its steps does not hold back the others. One
        that could not use what its published version samples starts nothing: its trainer may be
        gone, and for another policy the lease gate lets such groups pass."""
        is_alone = len(self.consumers) == 1
        rooms = {
            policy: consumer.room() > 0
            and (consumer.lineage.newest is not None if is_alone else consumer.has_recent_version)
            for policy, consumer in self.consumers.items()
            if not consumer.has_trained_all
        }
        return {name for name in self.supply.sources if not self._has_room(name, rooms)}

    def _has_room(self, source: str, all_rooms: Mapping[PolicyName, bool]) -> bool:
        """Does pacing allow a group of this source? Never before a first version exists."""
        called = self._calls(source)
        if any(lineage.newest is None for p, lineage in self.frozen.items() if p in called):
            return False
        rooms = {policy: room for policy, room in all_rooms.items() if policy in called}
        pace = self._issue_spec.pace
        if pace == "all":
            return bool(rooms) and all(rooms.values())
        if pace in rooms:
            return rooms[PolicyName(pace)]
        return any(rooms.values())

    def issue(self, now: float) -> None:
        """Issue complete groups while there is room, each to the partition with the fewest open
        groups. None after too many failures in a row. Questions of evaluations are issued beside
        them."""
        self._issue_training(now)
        if self.evaluations is None:
            return
        self.evaluations.advance(self._serving, now)
        has_ended = self.is_trained
        for index in self._serving:
            if self._sent_ended.get(index, False) != has_ended:
                self._sent_ended[index] = has_ended
                self._send(index, TrainingEnded(has_ended=has_ended))

    @property
    def _serving(self) -> list[int]:
        states = self.partition_states.items()
        return [index for index, state in states if state is PartitionState.SERVING]

    def _issue_training(self, now: float) -> None:
        while not self.failure_limit.cause(now):
            full = self._sources_without_room()
            if full == self.supply.sources:
                return
            serving = self._serving
            if not serving:
                return
            partition = min(serving, key=lambda index: (len(self.open_by_partition[index]), index))
            record = self._next_group(partition, full, now)
            if record is None:
                return
            self._send(partition, IssueGroup(record=record))

    def _next_group(self, partition: int, full: Set[str], now: float) -> GroupRecord | None:
        chosen = self.supply.next_task(now, full | {self._source_at_share()})
        if chosen is None:
            return None
        task, why = chosen
        num_slots = self._issue_spec.num_slots
        due = {
            policy: consumer.due_number(self._num_issued)
            for policy, consumer in self.consumers.items()
            if self.takes_part(policy, task.source)
        }
        self._num_issued += 1
        record = GroupRecord(
            group_id=GroupId(f"p{partition}-{self._num_issued}"),
            partition=partition,
            issue=self._num_issued,
            source=task.source,
            ordinal=task.ordinal,
            task_key=task.key,
            task=msgspec.json.encode(task).decode(),
            num_slots=1 if task.source == self._issue_spec.session_source else num_slots,
            due=msgspec.json.encode(due).decode(),
            why=msgspec.json.encode(why).decode(),
            state=GroupState.OPEN,
            reason="",
            issued_at=now,
            ended_at=0.0,
        )
        self._open(record)
        return record

    def has_decided_batch(self, consumer: Consumer, seq: int) -> bool:
        """In lockstep: have all groups of this batch been issued, and have they ended?"""
        last = seq * consumer.terms.groups_per_batch
        first = last - consumer.terms.groups_per_batch + 1
        is_issued = self._num_issued >= last or self.supply.is_exhausted
        return is_issued and not any(
            first <= issue_number(open_id) <= last for open_id in self.open
        )

    def first_undecided(self, consumer: Consumer) -> int | None:
        """In lockstep: the first group, in order of issue, that runs or lacks columns; None if
        there is none."""
        waiting = (*self.open, *consumer.incomplete)
        return min(map(issue_number, waiting), default=None)

    def _source_at_share(self) -> str:
        """The session source if it already has its share of the open groups: groups that wait for
        an external agent must leave room for the others."""
        name = self._issue_spec.session_source
        weights = {share.name: share.weight for share in self.supply.shares()} if name else {}
        if name not in weights or len(weights) == 1:
            return ""
        share = weights[name] / sum(weights.values())
        num_open = self._num_open.get(name, 0)
        return name if num_open + 1 > max(1.0, share * (len(self.open) + 1)) else ""

    def _opened(self, record: GroupRecord) -> None:
        self.open[record.group_id] = record
        self.open_by_partition.setdefault(record.partition, set()).add(record.group_id)
        self._num_open[record.source] = self._num_open.get(record.source, 0) + 1

    def _open(self, record: GroupRecord) -> None:
        self._journal(record)
        self._opened(record)
        undecided = self._taking_part(record)
        self.retention.issued(record.group_id, len(undecided))
        for policy in undecided:
            self.consumers[policy].num_undecided += 1

    def _taking_part(self, record: GroupRecord) -> set[PolicyName]:
        """Consumers that judge this group: those that its record has a due number for."""
        return self.consumers.keys() & msgspec.json.decode(record.due, type=dict[PolicyName, int])

    @property
    def session_source(self) -> str:
        return self._issue_spec.session_source

    def is_exhausted(self, consumer: Consumer) -> bool:
        """No tasks left for this policy, and no groups running."""
        policy = consumer.terms.policy
        return not consumer.num_undecided and all(
            self.supply.has_ended(source)
            for source in self.supply.sources
            if self.takes_part(policy, source)
        )

    # --- admission ----------------------------------------------------------------------------

    def apply(self, message: ToCoordinator, now: float) -> None:
        """Apply a message from a partition; idempotent."""
        if isinstance(message, GroupEnded):
            if not is_evaluation(message.group_id):
                self._group_ended(message, now)
            elif self.evaluations is not None:
                self.free(self.evaluations.group_ended(message, now), now)
        else:
            self.consumers[message.policy].complete(message, now)

    def _group_ended(self, report: GroupEnded, now: float) -> None:
        """Judge an ended group for every consumer; one consumer's verdict delays no other."""
        issued = self.open.get(report.group_id)
        if issued is None:
            return
        undecided = self.undecided(issued)
        if report.group_id not in self._undecided_by:  # its first report
            self._count_failure(issued, report, now)
        for policy in report.policies or tuple(self.consumers):
            if policy not in undecided:
                continue
            undecided = undecided - {policy}
            consumer = self.consumers[policy]
            consumer.num_undecided -= 1
            consumer.expire(now)
            consumer.judge(issued, report, self.gone, now)
        if undecided:
            self._undecided_by[report.group_id] = undecided
            return
        self._undecided_by.pop(report.group_id, None)
        del self.open[report.group_id]
        self._num_open[issued.source] -= 1
        self.open_by_partition[issued.partition].discard(report.group_id)

    def _count_failure(self, issued: GroupRecord, report: GroupEnded, now: float) -> None:
        if issued.source == self._issue_spec.session_source:
            return  # the run cannot fix external agents
        if report.is_excused:
            return  # no stranger ends a run by failing its work
        if report.dropped is DropReason.FAILED_SLOTS:
            num_results = len(report.rows)
            self.failure_limit.group_failed(report.num_failed, num_results, report.cause, now)
        elif report.rows:
            self.failure_limit.group_succeeded()

    def free(self, group_ids: Sequence[GroupId], now: float) -> None:
        """No consumer needs these groups anymore: their partitions may delete the payload."""
        by_partition: dict[int, list[GroupId]] = {}
        for group_id in group_ids:
            self._journal(FreedRecord(group_id=group_id, at=now))
            by_partition.setdefault(partition_of(group_id), []).append(group_id)
        for index, freed in by_partition.items():
            if self.partition_states.get(index) in (
                PartitionState.SERVING,
                PartitionState.DRAINING,
            ):
                self._send(index, GroupsFreed(group_ids=tuple(freed)))

    # --- end of the run, and cursor moves -----------------------------------------------------

    def has_ended(self, consumer: Consumer) -> bool:
        """No more batches will be sealed for this consumer."""
        if consumer.next_number >= consumer.terms.steps:
            return True
        is_empty = not (consumer.ready or consumer.incomplete or consumer.instalments)
        return self.is_exhausted(consumer) and is_empty

    def _has_trained(self, consumer: Consumer) -> bool:
        """The policy has trained everything it will ever get."""
        is_over = self.has_ended(consumer) and not consumer.sealed
        return consumer.has_trained_all or is_over

    @property
    def is_trained(self) -> bool:
        """Every policy has trained everything it will ever get."""
        return all(map(self._has_trained, self.consumers.values()))

    @property
    def is_finished(self) -> bool:
        """Every policy is trained, and every evaluation is done."""
        return self.is_trained and (self.evaluations is None or self.evaluations.is_done)

    def may_nodes_leave(self, now: float) -> bool:
        """The run is finished, and the last version of every policy is published: a trainer commits
        first and publishes later, and a gateway goes on to serve that version."""
        if not self.is_finished:
            self._finished_at = None
            return False
        if self._finished_at is None:
            self._finished_at = now
        lineages = [consumer.lineage for consumer in self.consumers.values()]
        if all(lineage.published >= lineage.number for lineage in lineages):
            return True
        return now - self._finished_at >= LAST_VERSION_S

    def drop_open_groups(self) -> None:
        """The run is finished: drop all open groups."""
        for group_id in sorted(self.open.keys() - self._sent_drops):
            self._sent_drops.add(group_id)
            dropped = DropGroup(group_id=group_id, reason=DropReason.REMAINDER)
            self._send(partition_of(group_id), dropped)

    def cursor_moved(self, consumer: Consumer, num_groups: Mapping[int, int], now: float) -> None:
        """The committed cursor moved: forward by a commit, or back by a fork."""
        consumer.cursor_moved(num_groups, now)
        self.broadcast_horizon(consumer)

    def broadcast_horizon(self, consumer: Consumer) -> None:
        policy, number = consumer.terms.policy, consumer.next_number
        if self._sent_horizon.get(policy) != number:
            self._sent_horizon[policy] = number
            self.broadcast(HorizonMoved(policy=policy, number=number))

    # --- restart ------------------------------------------------------------------------------

    def undecided(self, record: GroupRecord) -> set[PolicyName]:
        """Consumers that have not judged this open group."""
        return self._undecided_by.get(record.group_id) or self._taking_part(record)

    def restore(
        self,
        *,
        num_issued: int,
        open_groups: Iterable[tuple[GroupRecord, set[PolicyName]]],
    ) -> None:
        self._num_issued = num_issued
        for record, undecided in open_groups:
            self._opened(record)
            if undecided != self._taking_part(record):
                self._undecided_by[record.group_id] = undecided
            for policy in undecided:
                self.consumers[policy].num_undecided += 1
