# SPDX-License-Identifier: Apache-2.0
"""One data partition: slots, leases, deliveries and the closing of groups. A pure state machine.

Time comes in as `now`, facts go out through the journal, and ended groups go to the coordinator as
GroupEnded messages. No I/O, no clock. A lease ends exactly once: delivered, failed, rejected,
released, expired, truncated or cancelled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

import msgspec

from penstock.dataflow.core.groups import (
    ClosingKind,
    ClosingPolicy,
    HeldLeases,
    LeaseSpec,
    Node,
    OpenGroup,
    Slot,
    SlotState,
)
from penstock.dataflow.core.leasing import (
    DeliveryStatus,
    Grant,
    LiveVersion,
    NodeState,
    RegisterRequest,
)
from penstock.dataflow.core.messages import GroupEnded, SendGroupEnded
from penstock.dataflow.core.node_registry import NodeRegistry
from penstock.dataflow.core.timers import SCHEDULE_TO_CLOSE, SCHEDULE_TO_START, Timer, Timers
from penstock.dataflow.core.version_gate import VersionGate
from penstock.dataflow.core.waiting_slots import WaitingSlots
from penstock.dataflow.records import (
    GROUP_TRANSITIONS,
    DeadSlotRecord,
    GrantRecord,
    GroupRecord,
    GroupState,
    Journal,
    LeaseEnd,
    LeaseRecord,
    NodeRecord,
    RowRecord,
)
from penstock.dataflow.records import row_id as name_of
from penstock.dataflow.sources import slot_seeds
from penstock.errors import BadRequest
from penstock.types import (
    DropReason,
    GroupId,
    NodeId,
    Outcome,
    OutcomeKind,
    PolicyName,
    PublishedVersion,
    RowId,
)

_pins = msgspec.json.Decoder(dict[str, dict[PolicyName, tuple[int, int]]])
ENDS_COSTING_ATTEMPT = (LeaseEnd.FAILED, LeaseEnd.REJECTED, LeaseEnd.EXPIRED)
"""Lease ends that cost the slot an attempt."""


EVALUATION_CLOSING = ClosingPolicy(kind=ClosingKind.SURVIVORS)
MAX_REASON_CHARS = 300
"""Maximum length of the reason recorded for a failed attempt."""


class Partition:
    def __init__(
        self,
        index: int,
        *,
        closing: ClosingPolicy,
        terms: LeaseSpec,
        gate: VersionGate,
        journal: Journal,
        send: SendGroupEnded,
    ) -> None:
        self.index = index
        self.groups: dict[GroupId, OpenGroup] = {}
        """Open groups only; the ledger has the others."""
        self.waiting = WaitingSlots(self.groups, terms, gate.lineages)
        self.node_registry = NodeRegistry(journal)
        self.gate = gate
        self._closing = closing
        self._terms = terms
        self._journal = journal
        self._send = send
        self._timers = Timers(terms)
        self._evaluations: dict[GroupId, OpenGroup] = {}
        """Open groups that belong to an evaluation."""
        self._pins: tuple[str, tuple[PublishedVersion, ...]] = ("", ())
        """The last pins of a group, decoded."""

    @property
    def target_versions(self) -> tuple[PublishedVersion, ...]:
        """The versions nodes should load."""
        groups = self.groups.values() if self.gate.is_lockstep else ()
        dues = (group.due for group in groups if not group.is_evaluation)
        return self.gate.target_versions(next(dues, None))

    @property
    def pinned_versions(self) -> tuple[PublishedVersion, ...]:
        """The versions of the evaluation in progress; nodes load them beside the target versions.
        Empty if none is in progress here."""
        group = next(iter(self._evaluations.values()), None)
        return () if group is None else self._pinned_by(group)

    def _pinned_by(self, group: OpenGroup) -> tuple[PublishedVersion, ...]:
        if self._pins[0] != group.record.why:  # the same for all questions, so decoded once
            self._pins = (group.record.why, self.gate.published(decode_pins(group.record.why)))
        return self._pins[1]

    @property
    def nodes(self) -> dict[NodeId, Node]:
        return self.node_registry.nodes

    # --- groups -------------------------------------------------------------------------------

    def issue(self, record: GroupRecord, now: float) -> None:
        if record.group_id in self.groups:
            return
        self._journal(record)
        group = self._open(record, now)
        self.waiting.add(group)

    def _open(self, record: GroupRecord, now: float) -> OpenGroup:
        group = OpenGroup(record=record, waiting_since=now)
        self.groups[record.group_id] = group
        if group.is_evaluation:  # it waits for its share of the nodes, however long that takes
            self._evaluations[record.group_id] = group
            return group
        self._timers.start_wait_timer(record.group_id, now)
        self._timers.start_close_timer(record.group_id, now)
        return group

    def drop(self, group_id: GroupId, reason: DropReason, now: float) -> None:
        """Drop an open group, whatever the state of its members."""
        group = self.groups.get(group_id)
        if group is not None:
            self._truncate(group, LeaseEnd.CANCELLED, now)
            self._end_group(group, GroupState.DROPPED, reason, now)

    def forget(self, row_id: RowId, now: float) -> None:
        """Drop the group that contains this row or running attempt; earlier failed attempts are
        ignored."""
        group_id = GroupId(row_id.partition(".")[0])
        group = self.groups.get(group_id)
        for index, slot in group.known_slots.items() if group is not None else ():
            is_meant = row_id == name_of(group_id, index, slot.epoch)
            if is_meant and slot.state in (SlotState.LEASED, SlotState.DONE):
                self.drop(group_id, DropReason.FORGOTTEN, now)
                return

    def _truncate(self, group: OpenGroup, end: LeaseEnd, now: float) -> None:
        """Stop all running and waiting slots; they will get no result."""
        for index in self.waiting.take_all(group):
            group.slot(index).move(SlotState.TRUNCATED)
        for index, slot in group.running():
            self._end_lease(group, index, slot, end, now)
            slot.move(SlotState.TRUNCATED)

    def policies_advanced(self, now: float) -> None:
        """A policy advanced: drop groups that no policy can use anymore, and close groups on their
        last admissible version if that saves their rows."""
        for group in [group for group in self.groups.values() if group.known_slots]:
            rows = group.rows
            if not rows or group.is_evaluation:
                continue
            policies = self._terms.policies.get(group.record.source, ())
            batches_left = self.gate.batches_left(rows, policies)
            if batches_left < 0:
                self.drop(group.record.group_id, DropReason.STALE, now)
            elif batches_left == 0 and self._closing.kind is ClosingKind.SURVIVORS:
                lost = group.record.num_slots - len(rows)
                if self._closing.accepts(len(rows), lost):
                    self._close_now(group, DropReason.STALE, now)

    def _close_now(self, group: OpenGroup, reason: DropReason, now: float) -> None:
        self._truncate(group, LeaseEnd.TRUNCATED, now)
        self._close(group, reason, now)

    # --- nodes --------------------------------------------------------------------------------

    def register(self, body: RegisterRequest, now: float) -> None:
        """Register a node. A known node with a new boot_id is a new process: the leases of its old
        process become available again."""
        unknown = [policy for policy in body.policies if policy not in self.gate.lineages]
        if unknown:
            known = ", ".join(self.gate.lineages)
            raise BadRequest(f"this run has no policy {unknown[0][:128]!r}; it has {known}")
        node_to_replace = self.node_registry.node_to_replace(body)
        if node_to_replace is not None:
            self._end_all(node_to_replace, LeaseEnd.EXPIRED, "its node restarted", now)
        self.node_registry.register(body, now)

    def heartbeat(
        self,
        node_id: NodeId,
        boot_id: str,
        now: float,
        *,
        state: NodeState,
        live: tuple[LiveVersion, ...],
        pinned: tuple[LiveVersion, ...] = (),
    ) -> bool:
        """Record a heartbeat; True if the node's state or versions changed."""
        return self.node_registry.record_heartbeat(
            node_id,
            boot_id,
            now,
            state=state,
            live=self.gate.known(live),
            pinned=self.gate.known(pinned),
        )

    def leave(self, node_id: NodeId, boot_id: str, now: float) -> None:
        node = self.node_registry.get(node_id, boot_id)
        self._end_all(node, LeaseEnd.RELEASED, "", now)
        self.node_registry.remove(node, now)

    def forget_silent(self, subject: str, now: float) -> NodeId | None:
        """Forget the node of this subject that is silent for longest, if one is; it may register
        again."""
        nodes = [self.nodes[node_id] for node_id in self.node_registry.nodes_of(subject)]
        silent = [node for node in nodes if node.is_expired]  # its leases have ended
        if not silent:
            return None
        oldest = min(silent, key=attrgetter("last_seen"))
        self.node_registry.remove(oldest, now)
        return oldest.record.node_id

    def quarantine(self, subject: str, now: float) -> None:
        """Give no more work to any node of this subject. Their leases go to other nodes without
        costing an attempt, and their late results are fenced."""
        for node in self.node_registry.quarantine(subject):
            held = [one for granted in node.granted.values() for one in self._running(granted)]
            node.revoked += [name_of(g.group_id, index, g.epoch) for _, index, g in held]
            self._end_all(node, LeaseEnd.RELEASED, "", now)

    def extend_deadlines(self, gap_s: float) -> None:
        """The service stalled for gap_s: extend all deadlines by that much, since heartbeats could
        not arrive."""
        self.node_registry.extend_deadlines(gap_s)
        self._timers.extend_deadlines(gap_s)

    # --- leases -------------------------------------------------------------------------------

    def ask(self, node_id: NodeId, boot_id: str, request_id: str, now: float) -> None:
        self.node_registry.ask(node_id, boot_id, request_id, now)

    def lease(
        self,
        node_id: NodeId,
        boot_id: str,
        request_id: str,
        max_slots: int,
        live: Sequence[LiveVersion],
        now: float,
        pinned: Sequence[LiveVersion] = (),
    ) -> list[Grant]:
        node = self.node_registry.get(node_id, boot_id)
        if request_id in node.granted:
            return self._granted_before(node, request_id)
        if request_id != node.current_request or node.state is not NodeState.LIVE:
            return []
        live = self.gate.known(live)
        free = min(max_slots, self.node_registry.max_leases(node) - node.num_leases)
        grants = self._lease_evaluations(node, request_id, free, pinned, now)
        num_groups = len({grant.group_id for grant in grants})
        due: dict[frozenset[PolicyName], str] = {}
        blocked: set[frozenset[PolicyName]] = set()
        while len(grants) < free:
            heads = [
                head
                for head in self.waiting.first_groups(node)
                if head[1] not in blocked and not head[0].is_evaluation
            ]
            if not heads:
                break
            group, policies = min(heads, key=lambda head: head[0].record.issue)
            if not self.node_registry.may_take(node, group.record.group_id, len(self.groups)):
                break  # trusted nodes get the groups after it, too
            if due.get(policies) != group.record.due:
                if not self.gate.can_lease(group.due, live, policies):
                    blocked.add(policies)  # later ones need a version at least as recent
                    continue
                due[policies] = group.record.due
            while group.num_waiting and len(grants) < free:
                record = self._grant(node, group, request_id, free - len(grants), now)
                grants += self._describe(group, record, record.slots, num_groups)
            num_groups += 1
        if grants:
            node.granted[request_id].live = live
        return grants

    def live_at_lease(self, node_id: NodeId, group_id: GroupId, slot: int) -> Sequence[LiveVersion]:
        """What the holder of this slot served when it got it; nothing for an evaluation, which has
        its own versions, and after a restart."""
        group = self.groups[group_id]
        grant = group.slot(slot).grant
        held = None if grant is None else self.nodes[node_id].granted.get(grant.request_id)
        return () if held is None or group.is_evaluation else held.live

    def _lease_evaluations(
        self,
        node: Node,
        request_id: str,
        free: int,
        pinned: Sequence[LiveVersion],
        now: float,
    ) -> list[Grant]:
        """Slots of evaluations for a node that has loaded their versions, up to its share. They
        come before training: otherwise a busy run would never be evaluated."""
        held = {(version.policy, version.incarnation, version.number) for version in pinned}
        grants: list[Grant] = []
        num_groups = 0
        free = min(free, self.waiting.evaluation_room(node))
        while len(grants) < free:
            heads = (group for group, _ in self.waiting.first_groups(node) if group.is_evaluation)
            group = next(heads, None)
            if group is None or not held.issuperset(
                (version.policy, version.incarnation, version.number)
                for version in self._pinned_by(group)
            ):
                break
            record = self._grant(node, group, request_id, free - len(grants), now)
            grants += self._describe(group, record, record.slots, num_groups)
            num_groups += not group.num_waiting
        return grants

    def _grant(
        self, node: Node, group: OpenGroup, request_id: str, most: int, now: float
    ) -> GrantRecord:
        slots = self.waiting.take(group, most)
        first = group.known_slots.get(slots.start)
        record = GrantRecord(
            group_id=group.record.group_id,
            slot=slots.start,
            epoch=first.epoch + 1 if first else 1,
            num_slots=len(slots),
            attempt=first.attempt + 1 if first else 1,
            node_id=node.record.node_id,
            boot_id=node.record.boot_id,
            request_id=request_id,
            granted_at=now,
        )
        self._journal(record)
        group.lease(record)
        self.node_registry.add_leases(node, record, len(slots))
        self._timers.start_slot_timers(record, now, is_session=self.waiting.is_session(group))
        return record

    def _describe(
        self, group: OpenGroup, record: GrantRecord, slots: range, task: int
    ) -> list[Grant]:
        return [
            Grant(
                group_id=record.group_id,
                slot=index,
                epoch=record.epoch,
                attempt=record.attempt,
                task=task,
                seed=seed,
            )
            for index, seed in zip(slots, slot_seeds(group.task.seed, slots), strict=True)
        ]

    def _granted_before(self, node: Node, request_id: str) -> list[Grant]:
        grants: list[Grant] = []
        tasks: dict[GroupId, int] = {}
        for group, index, record in self._running(node.granted[request_id]):
            task = tasks.setdefault(record.group_id, len(tasks))
            grants += self._describe(group, record, range(index, index + 1), task)
        return grants

    def _running(self, held: HeldLeases) -> Iterator[tuple[OpenGroup, int, GrantRecord]]:
        """Its running leases, yielded lazily: the caller may end them."""
        for record in sorted(held.grants, key=attrgetter("group_id", "slot")):
            for index in record.slots:
                group = self.groups.get(record.group_id)
                if group is not None and group.slot(index).grant is record:
                    yield group, index, record

    def release(
        self, node_id: NodeId, group_id: GroupId, index: int, epoch: int, now: float
    ) -> bool:
        """Hand a slot back without costing an attempt; False if the lease had already ended."""
        slot = self._leased(node_id, group_id, index, epoch)
        if slot is None:
            return False
        group = self.groups[group_id]
        self._end_lease(group, index, slot, LeaseEnd.RELEASED, now)
        self._requeue(group, index, slot, now)
        return True

    def reject(self, group_id: GroupId, index: int, why: str, now: float) -> None:
        """The result under this lease breaks the contract: count it as a failed attempt."""
        group = self.groups[group_id]
        self._fail_attempt(group, index, group.slot(index), LeaseEnd.REJECTED, why, now)

    # --- time ---------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Expire silent nodes, overdue attempts and groups that ran out of time."""
        for node in self.node_registry.expire_silent(self._terms.ttl_s, now):
            self._end_all(node, LeaseEnd.EXPIRED, "its node fell silent", now)
        for timer in self._timers.due(now):
            group = self.groups.get(timer.group_id)
            if group is None:
                continue
            if timer.slot == SCHEDULE_TO_CLOSE:
                self._close_now(group, DropReason.OVERDUE, now)
                continue
            if timer.slot == SCHEDULE_TO_START:
                self._expire_waiting(group, now)
                continue
            self._expire_attempt(group, timer, now)

    def _expire_attempt(self, group: OpenGroup, timer: Timer, now: float) -> None:
        terms = self._terms
        is_session = self.waiting.is_session(group)
        limit_s = terms.session_start_to_close_s if is_session else terms.start_to_close_s
        why = f"no result within start-to-close ({limit_s:g} s)"
        for index in range(timer.slot, timer.slot + timer.num_slots):
            slot = group.slot(index)
            if slot.state is SlotState.LEASED and slot.epoch == timer.epoch:
                self._fail_attempt(group, index, slot, LeaseEnd.EXPIRED, why, now)

    def _expire_waiting(self, group: OpenGroup, now: float) -> None:
        start_s = self._terms.schedule_to_start_s
        if start_s is None or not group.num_waiting:
            return
        if now < group.waiting_since + start_s:  # it is waiting again after a lost attempt
            self._timers.start_wait_timer(group.record.group_id, group.waiting_since)
            return
        why = f"no node took it within schedule-to-start ({start_s:g} s)"
        while group.num_waiting:
            [index] = self.waiting.take(group, 1)
            self._give_up(group, index, group.slot(index), why, now)
        self._close_if_terminal(group, now)

    def _end_all(self, node: Node, end: LeaseEnd, why: str, now: float) -> None:
        for held in [*node.granted.values()]:
            for group, index, _ in self._running(held):
                slot = group.slot(index)
                if end is LeaseEnd.RELEASED:
                    self._end_lease(group, index, slot, end, now)
                    self._requeue(group, index, slot, now)
                else:
                    self._fail_attempt(group, index, slot, end, why, now)

    def _fail_attempt(
        self, group: OpenGroup, index: int, slot: Slot, end: LeaseEnd, why: str, now: float
    ) -> None:
        """An attempt failed: retry the slot, or give it up."""
        assert slot.grant is not None, "only a running attempt fails"
        slot.is_excused |= self.node_registry.is_untrusted(slot.grant.node_id)
        self._end_lease(group, index, slot, end, now, why)
        slot.attempt += 1
        slot.reasons += (_abbreviate(f"{end}: {why}"),)
        if slot.attempt < self._attempts_of(group):
            self._requeue(group, index, slot, now)
            return
        self._give_up(group, index, slot, "", now)
        self._close_if_terminal(group, now)

    @property
    def max_attempts(self) -> int:
        return 1 if self._closing.kind is ClosingKind.DROP else self._terms.max_attempts

    def _attempts_of(self, group: OpenGroup) -> int:
        return self._terms.max_attempts if group.is_evaluation else self.max_attempts

    def _closing_of(self, group: OpenGroup) -> ClosingPolicy:
        """Of an evaluation every question counts, with its failed attempts."""
        return EVALUATION_CLOSING if group.is_evaluation else self._closing

    def _give_up(self, group: OpenGroup, index: int, slot: Slot, why: str, now: float) -> None:
        """The slot becomes a dead letter with all its reasons."""
        if why:
            slot.reasons += (why,)
        slot.move(SlotState.DEAD)
        reasons = msgspec.json.encode(slot.reasons).decode()
        self._journal(
            DeadSlotRecord(group_id=group.record.group_id, slot=index, reasons=reasons, at=now)
        )

    def _end_lease(
        self, group: OpenGroup, index: int, slot: Slot, end: LeaseEnd, now: float, why: str = ""
    ) -> None:
        assert slot.grant is not None, "a lease ends once"
        self._journal(slot.grant.lease(index, end, now, _abbreviate(why)))
        self.node_registry.end_lease(slot.grant, index, end)
        slot.grant = None

    def _requeue(self, group: OpenGroup, index: int, slot: Slot, now: float) -> None:
        slot.move(SlotState.WAITING)
        if not group.num_waiting:
            group.waiting_since = now
            if not group.is_evaluation:
                self._timers.start_wait_timer(group.record.group_id, now)
        self.waiting.put_back(group, index)

    def _leased(self, node_id: NodeId, group_id: GroupId, index: int, epoch: int) -> Slot | None:
        group = self.groups.get(group_id)
        slot = None if group is None else group.known_slots.get(index)
        if slot is None or slot.state is not SlotState.LEASED or slot.epoch != epoch:
            return None
        return slot if slot.grant is not None and slot.grant.node_id == node_id else None

    # --- deliveries ---------------------------------------------------------------------------

    def holds(self, node_id: NodeId, group_id: GroupId, index: int, epoch: int) -> bool:
        return self._leased(node_id, group_id, index, epoch) is not None

    def deliver(self, row: RowRecord, outcome: Outcome, now: float) -> DeliveryStatus:
        """Accept the result of a held lease; a result under an older epoch is refused and changes
        nothing."""
        slot = self._leased(row.node_id, row.group_id, row.slot, row.epoch)
        if slot is None or slot.grant is None:
            return DeliveryStatus.FENCED
        group = self.groups[row.group_id]
        self._journal(row)
        node = self.nodes.get(row.node_id)
        if node is not None:
            node.last_seen, node.is_expired = now, False
            node.num_delivered += 1
            if outcome.has_reward:
                self.node_registry.finished(node, slot.grant, now)
        if outcome.has_reward:
            # No record: the row says how the lease ended.
            self.node_registry.end_lease(slot.grant, row.slot, LeaseEnd.DELIVERED)
            slot.grant = None
            slot.move(SlotState.DONE)
            slot.row = row.summary
            self._close_if_terminal(group, now)
        elif outcome.kind is OutcomeKind.CANCELLED:
            self._end_lease(group, row.slot, slot, LeaseEnd.RELEASED, now)
            self._requeue(group, row.slot, slot, now)
        else:
            why = f"{outcome.reason}: {outcome.detail}"
            self._fail_attempt(group, row.slot, slot, LeaseEnd.FAILED, why, now)
        return DeliveryStatus.STORED

    def _close_if_terminal(self, group: OpenGroup, now: float) -> None:
        if group.record.group_id not in self.groups:
            return  # it ended while several of its slots were given up
        num_dead, num_done = group.count_ended()
        if num_dead and self._closing_of(group).kind is not ClosingKind.SURVIVORS:
            self._truncate(group, LeaseEnd.CANCELLED, now)
            self._end_group(group, GroupState.DROPPED, DropReason.FAILED_SLOTS, now)
        elif num_dead + num_done == group.record.num_slots:
            self._close(group, DropReason.FAILED_SLOTS, now)

    def _close(self, group: OpenGroup, reason: DropReason, now: float) -> None:
        """Every slot is terminal: the closing policy decides. `reason` is recorded if it drops the
        group."""
        num_good = group.count(SlotState.DONE)
        num_lost = group.record.num_slots - num_good
        if self._closing_of(group).accepts(num_good, num_lost):
            self._end_group(group, GroupState.CLOSED, None, now)
        else:
            self._end_group(group, GroupState.DROPPED, reason, now)

    def _end_group(
        self, group: OpenGroup, state: GroupState, reason: DropReason | None, now: float
    ) -> None:
        assert state in GROUP_TRANSITIONS[GroupState(group.record.state)]
        self._journal(replace(group.record, state=state, reason=reason or "", ended_at=now))
        del self.groups[group.record.group_id]
        self._evaluations.pop(group.record.group_id, None)
        rows = group.rows
        is_whole = len(rows) == group.record.num_slots  # no slot was given up
        self._send(
            GroupEnded(
                group_id=group.record.group_id,
                policies=(),
                rows=rows,
                dropped=reason,
                num_failed=sum([slot.attempt for slot in group.known_slots.values()]),
                cause="" if is_whole else group.last_cause,
                is_excused=not is_whole and group.is_excused,
                failures={} if is_whole or not group.is_evaluation else group.failures,
            )
        )

    # --- restart ------------------------------------------------------------------------------

    def restore(
        self,
        groups: Iterable[GroupRecord],
        grants: Iterable[GrantRecord],
        leases: Iterable[LeaseRecord],
        rows: Iterable[RowRecord],
        nodes: Iterable[NodeRecord],
        dead: Iterable[DeadSlotRecord],
        quarantined: Iterable[str],
        now: float,
    ) -> None:
        """Rebuild open groups and give every live lease a full ttl. `leases` are those that ended
        without a result, in order of epoch."""
        self.node_registry.restore(nodes, quarantined, now)
        opened = [self._open(g, now) for g in sorted(groups, key=lambda record: record.issue)]
        results = [row for row in rows if row.is_result]
        ended = {(row.group_id, row.slot, row.epoch) for row in results}
        for lease in leases:
            ended.add((lease.group_id, lease.slot, lease.epoch))
            self._restore_ended(lease)
        for grant in grants:
            group_id, epoch = grant.group_id, grant.epoch
            running = [slot for slot in grant.slots if (group_id, slot, epoch) not in ended]
            self._restore_running(grant, running, now)
        for row in results:
            slot = self.groups[row.group_id].slot(row.slot)
            slot.state, slot.epoch, slot.row = SlotState.DONE, row.epoch, row.summary
        for letter in dead:
            self.groups[letter.group_id].slot(letter.slot).state = SlotState.DEAD
        for group in opened:
            self._restore_queue(group)
        # With fewer attempts configured than before, groups that were still open may end now.
        for group in opened:
            self._close_if_terminal(group, now)

    def _restore_queue(self, group: OpenGroup) -> None:
        group.next_fresh = max(group.known_slots, default=-1) + 1
        group.retry_slots = [
            index
            for index in range(group.next_fresh)
            if group.slot(index).state is SlotState.WAITING
        ]
        self.waiting.restore(group)

    def _restore_ended(self, lease: LeaseRecord) -> None:
        slot = self.groups[lease.group_id].slot(lease.slot)
        slot.epoch = lease.epoch
        if lease.ended in ENDS_COSTING_ATTEMPT:
            slot.attempt += 1
            slot.reasons += (f"{lease.ended}: {lease.detail}",)
            slot.is_excused |= self.node_registry.is_untrusted(lease.node_id)
            if slot.attempt >= self._attempts_of(self.groups[lease.group_id]):
                slot.state = SlotState.DEAD

    def _restore_running(self, grant: GrantRecord, slots: Sequence[int], now: float) -> None:
        if not slots:
            return
        group = self.groups[grant.group_id]
        for index in slots:
            slot = group.slot(index)
            slot.state, slot.epoch, slot.grant = SlotState.LEASED, grant.epoch, grant
        node = self.nodes.get(grant.node_id)
        assert node is not None, "a running lease names a registered node"
        self.node_registry.add_leases(node, grant, len(slots))
        self._timers.start_slot_timers(grant, now, is_session=self.waiting.is_session(group))


def encode_pins(pins: Mapping[PolicyName, tuple[int, int]]) -> str:
    """`why` of a group of an evaluation."""
    return msgspec.json.encode({"pins": pins}).decode()


def decode_pins(why: str) -> dict[PolicyName, tuple[int, int]]:
    """Incarnation and number of the versions that answer, by policy."""
    return _pins.decode(why)["pins"]


def _abbreviate(why: str) -> str:
    """Shorten a reason in the middle: its end usually holds the actual error. Always a plain str,
    even for a str subclass, because it goes into the ledger."""
    return (
        str(why)
        if len(why) <= MAX_REASON_CHARS
        else f"{why[:97]} … {why[100 - MAX_REASON_CHARS :]}"
    )
