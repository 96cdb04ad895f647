# SPDX-License-Identifier: Apache-2.0
"""Home: everything global of a run. What to issue where, what to admit, who trains. A pure state
machine.

Home holds about 100 bytes per row and never a token. It talks to partitions in messages, and to
the world through records in its journal. Batches are sealed in `sealing.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import msgspec

from penstock.dataflow.core import pacing
from penstock.dataflow.core.consumers import (
    Consumer,
    PolicySpec,
    ReadyGroup,
    issue_number,
    ready_group,
)
from penstock.dataflow.core.messages import (
    Admitted,
    ColumnsCompleted,
    DropGroup,
    GroupEnded,
    GroupsFreed,
    HorizonMoved,
    IssueGroup,
    SendToPartition,
    ToCoordinator,
    ToPartition,
)
from penstock.dataflow.core.retention import Retention
from penstock.dataflow.core.rulebook import RuleRunner
from penstock.dataflow.core.supply import TaskSupply
from penstock.dataflow.core.versions import Lineage
from penstock.dataflow.records import (
    FATE_TRANSITIONS,
    FateRecord,
    FateState,
    FreedRecord,
    GroupRecord,
    GroupState,
    IssuedRecord,
    Journal,
    MetaRecord,
    WasteRecord,
)
from penstock.errors import NotFound
from penstock.types import (
    DropReason,
    GroupId,
    JudgedGroup,
    NodeId,
    PolicyName,
    RowId,
    RowSummary,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class IssueSpec:
    """What every group is made of."""

    num_slots: int
    pace: str = "any"
    """`any`, `all`, or the name of the policy whose room decides."""
    session_source: str = ""
    """Groups of this source have one slot, for one session of an agent from outside."""


class PartitionState(StrEnum):
    """What home thinks of a partition."""

    SERVING = "serving"
    DRAINING = "draining"
    """Gets no new group."""
    GONE = "gone"
    """Drained and empty."""
    LOST = "lost"
    """Declared so by a person; fenced for ever."""


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
    ) -> None:
        self.consumers = {p.policy: Consumer(p, Lineage(p.policy)) for p in policies}
        for consumer in self.consumers.values():
            consumer.has_pool = rules.replay(consumer.terms.policy) is not None
            consumer.lineage.is_deterministic = consumer.terms.is_lockstep
        self.supply = supply
        self.rules = rules
        self.retention = retention
        self.partition_states: dict[int, PartitionState] = {}
        self.open: dict[GroupId, IssuedRecord] = {}
        """Groups that some consumer has not judged yet."""
        self.open_by_partition: dict[int, set[GroupId]] = {}
        """The same by partition."""
        self._num_open: dict[str, int] = {}
        """The same by source."""
        self.gone: set[RowId] = set()
        """Rows that nobody may be served any more."""
        self.quarantined: set[tuple[NodeId, str]] = set()
        """Lives of nodes that get no work; a partition that joins is told."""
        self.wasted_tokens: dict[str, int] = {}
        self._undecided_by: dict[GroupId, set[PolicyName]] = {}
        """Who has not judged an open group; only where that is not everybody."""
        self._issue_spec = issue_spec
        self._journal = journal
        self._send = send
        self._num_issued = 0
        self._sent_horizon: dict[PolicyName, int] = {}
        self._sent_drops: set[GroupId] = set()
        """Open groups whose partition was told that the run is over."""

    def consumer(self, policy: str) -> Consumer:
        try:
            return self.consumers[PolicyName(policy)]
        except KeyError:
            known = ", ".join(self.consumers)
            raise NotFound(f"no policy {policy!r} in this run; it trains {known}") from None

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

    def declare_lost(self, index: int, now: float) -> None:
        """Declared lost: what was open there ends, and home does not listen to it any more."""
        self.partition_states[index] = PartitionState.LOST
        for group_id in sorted(self.open_by_partition[index]):
            self._report(
                GroupEnded(
                    group_id=group_id, policies=(), rows=(), dropped=DropReason.PARTITION_LOST
                ),
                now,
            )
        for consumer in self.consumers.values():
            self._drop_lost_rows(consumer, index, now)

    def _drop_lost_rows(self, consumer: Consumer, index: int, now: float) -> None:
        """Groups there that no batch has yet have no rows any more, and those of the replay pool
        cannot be served again."""
        for groups in (consumer.ready, consumer.incomplete):
            for group in [g for g in groups.values() if partition_of(g.group_id) == index]:
                del groups[group.group_id]
                self.drop(consumer, group, DropReason.PARTITION_LOST, "partition", now)
        for group in [g for g in consumer.pool.values() if partition_of(g.group_id) == index]:
            self.remove_from_pool(consumer, group, now)
        self.update_num_replayable(consumer)

    def remove_from_pool(self, consumer: Consumer, group: ReadyGroup, now: float) -> None:
        del consumer.pool[group.group_id]
        self.fate(consumer, group, FateState.SEALED, now, rule="replay", keep_rows=False)
        self.free(self.retention.unpooled(group.group_id, consumer.terms.policy), now)

    def is_empty(self, index: int) -> bool:
        return not self.open_by_partition[index]

    # --- pacing -------------------------------------------------------------------------------

    def room(self, consumer: Consumer) -> float:
        terms = consumer.terms
        if consumer.missing_stages:
            return 0.0
        levels = consumer.levels()
        return min(
            pacing.room(
                levels,
                fresh=consumer.num_fresh_needed,
                max_staleness=terms.max_staleness,
                expected_yield=consumer.expected_yield,
            ),
            pacing.room_to_end(
                levels,
                groups_per_batch=terms.groups_per_batch,
                batches_left=terms.steps - consumer.lineage.number,
                expected_yield=consumer.expected_yield,
            ),
        )

    def update_num_replayable(self, consumer: Consumer) -> None:
        """Groups of the next batch that would be served again: the ratio, or what is eligible."""
        replay = self.rules.replay(consumer.terms.policy)
        if replay is not None:
            share = int(replay.ratio * consumer.terms.groups_per_batch)
            consumer.num_replayable = min(share, len(consumer.eligible(replay)))

    def _has_room(self) -> bool:
        """Does the pace let another group start? Nothing does before a first version exists, and
        a policy that has trained all its steps holds no other back."""
        rooms = {
            policy: consumer.lineage.newest is not None and self.room(consumer) > 0
            for policy, consumer in self.consumers.items()
            if not consumer.has_trained_all
        }
        pace = self._issue_spec.pace
        if pace == "all":
            return bool(rooms) and all(rooms.values())
        if pace in rooms:
            return rooms[PolicyName(pace)]
        return any(rooms.values())

    def issue(self, now: float) -> None:
        """Whole groups while there is room, each to the partition that has fewest."""
        while self._has_room():
            serving = [
                i for i, shard in self.partition_states.items() if shard is PartitionState.SERVING
            ]
            if not serving:
                return
            partition = min(serving, key=lambda index: (len(self.open_by_partition[index]), index))
            record = self._next_group(partition, now)
            if record is None:
                return
            self._send(partition, IssueGroup(record=record))

    def _next_group(self, partition: int, now: float) -> GroupRecord | None:
        chosen = self.supply.next_task(now, self._source_at_share())
        if chosen is None:
            return None
        task, why = chosen
        num_slots = self._issue_spec.num_slots
        due = {policy: self._due(consumer) for policy, consumer in self.consumers.items()}
        self._num_issued += 1
        group_id = GroupId(f"p{partition}-{self._num_issued}")
        self._open(
            IssuedRecord(
                group_id=group_id,
                issue=self._num_issued,
                partition=partition,
                source=task.source,
                ordinal=task.ordinal,
                task_key=task.key,
                why=msgspec.json.encode(why).decode(),
                judged=False,
                at=now,
            )
        )
        return GroupRecord(
            group_id=group_id,
            partition=partition,
            issue=self._num_issued,
            source=task.source,
            ordinal=task.ordinal,
            task_key=task.key,
            task=msgspec.json.encode(task).decode(),
            num_slots=1 if task.source == self._issue_spec.session_source else num_slots,
            due=msgspec.json.encode(due).decode(),
            state=GroupState.OPEN,
            reason="",
            issued_at=now,
            ended_at=0.0,
        )

    def _due(self, consumer: Consumer) -> int:
        """What the next group to be issued waits for: batches before its own in lockstep, else the
        number that its batch is expected to train from."""
        if consumer.terms.is_lockstep:
            return self._num_issued // consumer.terms.groups_per_batch
        return pacing.due_number(
            consumer.levels(),
            committed=consumer.lineage.number,
            groups_per_batch=consumer.terms.groups_per_batch,
        )

    def has_decided_batch(self, consumer: Consumer, seq: int) -> bool:
        """In lockstep: every group of this batch was issued, and has ended."""
        last = seq * consumer.terms.groups_per_batch
        first = last - consumer.terms.groups_per_batch + 1
        is_issued = self._num_issued >= last or self.supply.is_exhausted
        return is_issued and not any(
            first <= issue_number(open_id) <= last for open_id in self.open
        )

    def _source_at_share(self) -> str:
        """The source of sessions when it has its share of what is open: groups that wait for an
        agent must leave room for the others."""
        name = self._issue_spec.session_source
        weights = {share.name: share.weight for share in self.supply.shares()} if name else {}
        if name not in weights or len(weights) == 1:
            return ""
        share = weights[name] / sum(weights.values())
        num_open = self._num_open.get(name, 0)
        return name if num_open + 1 > max(1.0, share * (len(self.open) + 1)) else ""

    def _opened(self, record: IssuedRecord) -> None:
        self.open[record.group_id] = record
        self.open_by_partition.setdefault(record.partition, set()).add(record.group_id)
        self._num_open[record.source] = self._num_open.get(record.source, 0) + 1

    def _open(self, record: IssuedRecord) -> None:
        self._journal(record)
        self._opened(record)
        self.retention.issued(record.group_id, len(self.consumers))
        for consumer in self.consumers.values():
            consumer.num_undecided += 1

    @property
    def session_source(self) -> str:
        return self._issue_spec.session_source

    @property
    def is_exhausted(self) -> bool:
        """No task left and no group running."""
        return not self.open and self.supply.is_exhausted

    # --- admission ----------------------------------------------------------------------------

    def apply(self, message: ToCoordinator, now: float) -> None:
        """A partition says something; saying it again changes nothing."""
        if isinstance(message, GroupEnded):
            self._report(message, now)
        else:
            self._completed(message, now)

    def _report(self, report: GroupEnded, now: float) -> None:
        """Judge an ended group for every consumer; one consumer's verdict delays no other."""
        issued = self.open.get(report.group_id)
        if issued is None:
            return
        undecided = self.undecided(report.group_id)
        for policy in report.policies or tuple(self.consumers):
            if policy not in undecided:
                continue
            undecided = undecided - {policy}
            consumer = self.consumers[policy]
            consumer.num_undecided -= 1
            self.expire(consumer, now)
            self._judge(consumer, issued, report, now)
        if undecided:
            self._undecided_by[report.group_id] = undecided
            return
        self._undecided_by.pop(report.group_id, None)
        del self.open[report.group_id]
        self._num_open[issued.source] -= 1
        self.open_by_partition[issued.partition].discard(report.group_id)
        self._journal(replace(issued, judged=True))

    def _judge(
        self, consumer: Consumer, issued: IssuedRecord, report: GroupEnded, now: float
    ) -> None:
        policy = consumer.terms.policy
        visible_roles = self.rules.seen(policy, report.rows, now)
        rows = tuple(row for row in report.rows if row.tokens_for(policy, visible_roles) > 0)
        consumer.num_arrived += 1
        group = ready_group(
            issued.group_id,
            issued.task_key,
            issued.source,
            rows,
            policy,
            consumer.num_arrived,
            visible_roles,
        )
        if report.dropped is not None or not rows:
            reason = report.dropped or DropReason.ABSENT
            if reason in (DropReason.FAILED_SLOTS, DropReason.ABSENT):
                self._update_yield(consumer, passed=False)
            self.drop(consumer, group, reason, "closing", now)
        elif self.gone and any(row.row_id in self.gone for row in rows):
            self.drop(consumer, group, DropReason.FORGOTTEN, "forget", now)
        elif consumer.has_trained_all:
            self.drop(consumer, group, DropReason.REMAINDER, "end", now)
        elif consumer.is_stale(group):
            self.drop(consumer, group, DropReason.STALE, "staleness", now)
        elif not consumer.terms.is_lockstep and pacing.is_outpaced(
            consumer.levels(),
            groups_per_batch=consumer.terms.groups_per_batch,
            max_staleness=consumer.terms.max_staleness,
        ):
            self.drop(consumer, group, DropReason.OUTPACED, "pacing", now)
        else:
            self._apply_rules(consumer, group, rows, now)

    def _apply_rules(
        self, consumer: Consumer, group: ReadyGroup, rows: tuple[RowSummary, ...], now: float
    ) -> None:
        judged = JudgedGroup(
            group_id=group.group_id,
            task_key=group.task_key,
            source=group.source,
            policy=consumer.terms.policy,
            number=consumer.lineage.number,
            rows=rows,
        )
        rule, reason = self.rules.judge(judged, now)
        self.rules.learn(judged, reason, now)
        self.rules.save_state()
        self._update_yield(consumer, passed=reason is None)
        if reason is not None:
            self.drop(consumer, group, reason, rule, now)
            return
        waits = bool(consumer.terms.train_columns)
        (consumer.incomplete if waits else consumer.ready)[group.group_id] = group
        self.fate(consumer, group, FateState.ADMITTED, now, rule=rule)
        if waits:
            admitted = Admitted(group_id=group.group_id, policy=consumer.terms.policy)
            self._send(partition_of(group.group_id), admitted)

    def _update_yield(self, consumer: Consumer, *, passed: bool) -> None:
        """Kept over restarts: a service that forgot it would start too little for many groups."""
        before = consumer.expected_yield
        consumer.expected_yield = pacing.next_yield(before, passed=passed)
        if consumer.expected_yield != before:
            key = yield_key(consumer.terms.policy)
            self._journal(MetaRecord(key=key, value=repr(consumer.expected_yield)))

    def _completed(self, message: ColumnsCompleted, now: float) -> None:
        """The columns that the trainer needs are there, or will never be."""
        consumer = self.consumers[message.policy]
        group = consumer.incomplete.pop(message.group_id, None)
        if group is None:
            return
        policy = consumer.terms.policy
        visible_roles = self.rules.seen(policy, message.rows, now)
        rows = tuple(row for row in message.rows if row.tokens_for(policy, visible_roles) > 0)
        if message.dropped is not None or not rows:
            reason = message.dropped or DropReason.COLUMN_FAILED
            self.drop(consumer, group, reason, "columns", now)
            return
        full = ready_group(
            group.group_id, group.task_key, group.source, rows, policy, group.arrival, visible_roles
        )
        consumer.ready[group.group_id] = full
        self.fate(consumer, full, FateState.ADMITTED, now, rule="columns")

    def expire(self, consumer: Consumer, now: float) -> None:
        """Drop what no batch can use any more: at every report, commit and fork."""
        moment = (consumer.next_number, consumer.lineage.incarnation)
        if consumer.last_expiry_check == moment:
            return  # nothing moved since, and what was not stale then is not stale now
        consumer.last_expiry_check = moment
        for groups in (consumer.ready, consumer.incomplete):
            for group in [g for g in groups.values() if consumer.is_stale(g)]:
                del groups[group.group_id]
                self.drop(consumer, group, DropReason.STALE, "staleness", now)

    def drop_remainder(self, consumer: Consumer, now: float) -> None:
        """The policy has trained all its steps; what is left over is named and counted."""
        for groups in (consumer.ready, consumer.incomplete):
            for group in groups.values():
                self.drop(consumer, group, DropReason.REMAINDER, "end", now)
            groups.clear()

    def drop(
        self, consumer: Consumer, group: ReadyGroup, reason: DropReason, rule: str, now: float
    ) -> None:
        if group.tokens:
            wasted = self.wasted_tokens.get(reason, 0) + group.tokens
            self.wasted_tokens[reason] = wasted
            self._journal(WasteRecord(reason=reason, tokens=wasted))
        consumer.starvation.add(group, reason)
        self.fate(consumer, group, FateState.DROPPED, now, rule=rule, reason=reason)
        self.free(self.retention.dropped(group.group_id), now)

    def fate(
        self,
        consumer: Consumer,
        group: ReadyGroup,
        state: FateState,
        now: float,
        *,
        rule: str,
        reason: str = "",
        keep_rows: bool = True,
    ) -> None:
        assert state in FATE_TRANSITIONS[FateState.ADMITTED] | {FateState.ADMITTED}
        is_over = state is FateState.DROPPED or not keep_rows
        self._journal(
            FateRecord(
                consumer=consumer.terms.policy,
                group_id=group.group_id,
                state=state,
                reason=reason,
                rule=rule,
                seq=group.last_seq,
                tokens=group.tokens,
                at=now,
                arrival=group.arrival,
                uses=group.uses,
                is_complete=group.group_id not in consumer.incomplete,
                rows=b"" if is_over else group.rows,
                task_key=group.task_key,
                source=group.source,
                rewards=group.rewards.tobytes(),
                versions=msgspec.json.encode(group.versions).decode(),
            )
        )

    def free(self, group_ids: Sequence[GroupId], now: float) -> None:
        """Nobody needs these any more: their partitions may delete the payload."""
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

    # --- the end, and moves of the cursor -----------------------------------------------------

    def has_ended(self, consumer: Consumer) -> bool:
        """No further batch will be sealed for this consumer."""
        if consumer.next_number >= consumer.terms.steps:
            return True
        return self.is_exhausted and not consumer.ready and not consumer.incomplete

    @property
    def is_finished(self) -> bool:
        """Every policy has trained all it will ever get."""
        return all(
            consumer.has_trained_all or (self.has_ended(consumer) and not consumer.sealed)
            for consumer in self.consumers.values()
        )

    def drop_open_groups(self) -> None:
        """The run is over: what still runs is of use to nobody."""
        for group_id in sorted(self.open.keys() - self._sent_drops):
            self._sent_drops.add(group_id)
            dropped = DropGroup(group_id=group_id, reason=DropReason.REMAINDER)
            self._send(partition_of(group_id), dropped)

    def cursor_moved(self, consumer: Consumer, num_groups: Mapping[int, int], now: float) -> None:
        """The committed cursor changed, forwards by a commit or backwards by a fork."""
        lineage = consumer.lineage
        consumer.sealed = {seq: n for seq, n in num_groups.items() if seq > lineage.seq}
        self.expire(consumer, now)
        self.free(self.retention.committed(consumer.terms.policy, lineage.seq), now)
        if consumer.has_trained_all:
            self.drop_remainder(consumer, now)
        self.update_num_replayable(consumer)
        self.broadcast_horizon(consumer)

    def broadcast_horizon(self, consumer: Consumer) -> None:
        policy, number = consumer.terms.policy, consumer.next_number
        if self._sent_horizon.get(policy) != number:
            self._sent_horizon[policy] = number
            self.broadcast(HorizonMoved(policy=policy, number=number))

    # --- restart ------------------------------------------------------------------------------

    def undecided(self, group_id: GroupId) -> set[PolicyName]:
        """Who has not judged this open group."""
        return self._undecided_by.get(group_id, set(self.consumers))

    def restore(
        self,
        *,
        num_issued: int,
        open_groups: Iterable[tuple[IssuedRecord, set[PolicyName]]],
    ) -> None:
        self._num_issued = num_issued
        for record, undecided in open_groups:
            self._opened(record)
            if len(undecided) < len(self.consumers):
                self._undecided_by[record.group_id] = undecided
            for policy in undecided:
                self.consumers[policy].num_undecided += 1


def yield_key(policy: PolicyName) -> str:
    """Under which the ledger keeps what a policy's rules let through."""
    return f"yield/{policy}"


def partition_of(group_id: GroupId) -> int:
    """Its partition is part of a group's name for ever."""
    return int(group_id[1:].partition("-")[0])
