# SPDX-License-Identifier: Apache-2.0
"""One data partition: slots, leases, deliveries and the closing of groups. A pure state machine.

Time comes in as `now`, facts go out through the journal, ended groups go to home as Reports. No
I/O, no clock. A lease ends exactly once: delivered, failed, released, expired or cancelled.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

import msgspec

from penstock.dataflow.groups import (
    Closing,
    ClosingKind,
    LeaseTerms,
    Node,
    OpenGroup,
    Slot,
    SlotState,
)
from penstock.dataflow.protocol import (
    DeliveryStatus,
    Grant,
    LiveVersion,
    NodeState,
    Register,
)
from penstock.dataflow.records import (
    NEXT_GROUP,
    GroupRecord,
    GroupState,
    Issue,
    Journal,
    LeaseEnd,
    LeaseRecord,
    NodeRecord,
    Report,
    RowRecord,
)
from penstock.dataflow.sources import derive_seed
from penstock.errors import Fenced, NotFound
from penstock.types import DropReason, GroupId, NodeId, Outcome, OutcomeKind, Task

MayRun = Callable[[OpenGroup], bool]
"""Home's gate: is this node's live version young enough for this group?"""


class Partition:
    def __init__(
        self, index: int, *, closing: Closing, terms: LeaseTerms, journal: Journal
    ) -> None:
        self.index = index
        self.groups: dict[GroupId, OpenGroup] = {}
        """Open ones only; the ledger answers for the rest."""
        self.nodes: dict[NodeId, Node] = {}
        self._closing = closing
        self._terms = terms
        self._journal = journal
        self._waiting: deque[tuple[GroupId, int]] = deque()
        self._deadlines: list[tuple[float, GroupId, int, int]] = []
        """Heap of start-to-close limits; entries of ended leases are skipped when met."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    # --- groups -------------------------------------------------------------------------------

    def issue(self, issue: Issue) -> None:
        record = issue.record
        self._journal(record)
        self._open(record)
        self._waiting.extend((record.group_id, slot) for slot in range(record.num_slots))

    def _open(self, record: GroupRecord) -> OpenGroup:
        group = OpenGroup(
            record=record,
            task=msgspec.json.decode(record.task, type=Task),
            due=msgspec.json.decode(record.due),
            slots=[Slot() for _ in range(record.num_slots)],
        )
        self.groups[record.group_id] = group
        return group

    def drop(self, group_id: GroupId, reason: DropReason, now: float) -> Report | None:
        """End an open group whatever its members do."""
        group = self.groups.get(group_id)
        if group is None:
            return None
        for index, slot in enumerate(group.slots):
            if slot.state is SlotState.LEASED:
                self._end_lease(group_id, index, slot, LeaseEnd.CANCELLED, now)
        return self._end_group(group, GroupState.DROPPED, reason, now)

    # --- nodes --------------------------------------------------------------------------------

    def register(self, body: Register, now: float) -> list[Report]:
        """A known node under a new session is a new life: what its old life held is free again."""
        reports: list[Report] = []
        known = self.nodes.get(body.node_id)
        if known is not None and known.record.session == body.session:
            known.last_seen, known.is_silent = now, False
            return reports
        if known is not None:
            if body.session in known.past_sessions:
                raise Fenced(f"node {body.node_id} lives under a newer session than this")
            reports = self._end_all(known, LeaseEnd.EXPIRED, now)
        record = NodeRecord(
            node_id=body.node_id,
            session=body.session,
            capacity=body.capacity,
            policies=msgspec.json.encode(body.policies).decode(),
            tags=msgspec.json.encode(body.tags).decode(),
            left=False,
            at=now,
        )
        self._journal(record)
        node = self.nodes[body.node_id] = Node(record=record, last_seen=now)
        if known is not None:
            node.num_delivered = known.num_delivered
            node.past_sessions = known.past_sessions
            node.past_sessions.append(known.record.session)
        return reports

    def heartbeat(
        self,
        node_id: NodeId,
        session: str,
        now: float,
        *,
        state: NodeState,
        live: tuple[LiveVersion, ...],
    ) -> None:
        node = self._node(node_id, session)
        node.last_seen, node.is_silent = now, False
        node.state, node.live = state, live

    def leave(self, node_id: NodeId, session: str, now: float) -> list[Report]:
        node = self._node(node_id, session)
        reports = self._end_all(node, LeaseEnd.RELEASED, now)
        self._journal(replace(node.record, left=True, at=now))
        del self.nodes[node_id]
        return reports

    def _node(self, node_id: NodeId, session: str) -> Node:
        node = self.nodes.get(node_id)
        if node is None:
            raise NotFound(f"node {node_id} is not registered; POST /v1/nodes first")
        if node.record.session != session:
            raise Fenced(f"node {node_id} lives under another session; this process was replaced")
        return node

    def forgive(self, gap_s: float) -> None:
        """The service itself stood still: nobody could be heard meanwhile, so nobody was silent."""
        for node in self.nodes.values():
            node.last_seen += gap_s
        self._deadlines = [(at + gap_s, g, s, e) for at, g, s, e in self._deadlines]

    # --- leases -------------------------------------------------------------------------------

    def ask(self, node_id: NodeId, session: str, request_id: str, now: float) -> None:
        """Take note of a lease request. A node's newest one replaces those before it: nobody
        listens to them any more, and what they were granted would be held by none."""
        node = self._node(node_id, session)
        node.last_seen, node.is_silent = now, False
        if request_id != node.asking and request_id not in node.asked_before:
            node.asked_before.append(node.asking)
            node.asking = request_id

    def lease(
        self,
        node_id: NodeId,
        session: str,
        request_id: str,
        max_slots: int,
        may_run: MayRun,
        now: float,
    ) -> list[Grant]:
        node = self._node(node_id, session)
        if request_id in node.granted:
            return self._granted_before(node, request_id)
        if request_id != node.asking or node.state is not NodeState.LIVE:
            return []
        free = min(max_slots, node.record.capacity - len(node.leases))
        grants: list[Grant] = []
        while self._waiting and len(grants) < free:
            group_id, index = self._waiting[0]
            group = self.groups.get(group_id)
            if group is None:  # dropped while it waited
                self._waiting.popleft()
                continue
            if not may_run(group):  # groups behind it need a version at least as young
                break
            self._waiting.popleft()
            grants.append(self._grant(node, group, index, request_id, now))
        return grants

    def _grant(
        self, node: Node, group: OpenGroup, index: int, request_id: str, now: float
    ) -> Grant:
        slot = group.slots[index]
        slot.move(SlotState.LEASED)
        slot.epoch += 1
        group_id = group.record.group_id
        slot.lease = LeaseRecord(
            group_id=group_id,
            slot=index,
            epoch=slot.epoch,
            attempt=slot.attempt + 1,
            node_id=node.record.node_id,
            session=node.record.session,
            request_id=request_id,
            granted_at=now,
            ended="",
            ended_at=0.0,
        )
        self._journal(slot.lease)
        self._hold(node, slot.lease)
        self._watch(slot.lease, now)
        return self._describe(group, slot.lease)

    def _hold(self, node: Node, lease: LeaseRecord) -> None:
        node.leases.add((lease.group_id, lease.slot))
        node.granted.setdefault(lease.request_id, set()).add((lease.group_id, lease.slot))

    def _describe(self, group: OpenGroup, lease: LeaseRecord) -> Grant:
        return Grant(
            group_id=lease.group_id,
            slot=lease.slot,
            epoch=lease.epoch,
            attempt=lease.attempt,
            task=0,
            seed=derive_seed(group.task.seed, lease.slot),
        )

    def _granted_before(self, node: Node, request_id: str) -> list[Grant]:
        grants: list[Grant] = []
        for group_id, index in sorted(node.granted[request_id]):
            group = self.groups[group_id]
            lease = group.slots[index].lease
            assert lease is not None, "a held slot has a lease"
            grants.append(self._describe(group, lease))
        return grants

    def _watch(self, lease: LeaseRecord, now: float) -> None:
        # One ttl of grace: the node itself cuts at start-to-close and needs time to deliver.
        limit = now + self._terms.start_to_close_s + self._terms.ttl_s
        heapq.heappush(self._deadlines, (limit, lease.group_id, lease.slot, lease.epoch))

    def release(
        self, node_id: NodeId, group_id: GroupId, index: int, epoch: int, now: float
    ) -> bool:
        """Hand a slot back unharmed; False when the lease had ended before."""
        slot = self._leased(node_id, group_id, index, epoch)
        if slot is None:
            return False
        self._end_lease(group_id, index, slot, LeaseEnd.RELEASED, now)
        self._requeue(group_id, index, slot)
        return True

    def reject(self, group_id: GroupId, index: int, now: float) -> list[Report]:
        """The result of this held lease breaks the contract: an attempt that came to nothing."""
        group = self.groups[group_id]
        return self._lose(group, index, group.slots[index], LeaseEnd.REJECTED, now)

    def tick(self, now: float) -> list[Report]:
        """Expire nodes that fell silent and attempts that overran."""
        reports: list[Report] = []
        for node in self.nodes.values():
            if not node.is_silent and now - node.last_seen > self._terms.ttl_s:
                node.is_silent = True
                reports += self._end_all(node, LeaseEnd.EXPIRED, now)
        while self._deadlines and self._deadlines[0][0] <= now:
            _, group_id, index, epoch = heapq.heappop(self._deadlines)
            group = self.groups.get(group_id)
            slot = None if group is None else group.slots[index]
            if group and slot and slot.state is SlotState.LEASED and slot.epoch == epoch:
                reports += self._lose(group, index, slot, LeaseEnd.EXPIRED, now)
        return reports

    def _end_all(self, node: Node, end: LeaseEnd, now: float) -> list[Report]:
        reports: list[Report] = []
        for group_id, index in sorted(node.leases):
            group = self.groups.get(group_id)
            if group is None:  # ended by an earlier turn of this loop
                continue
            slot = group.slots[index]
            if slot.state is not SlotState.LEASED:
                continue
            if end is LeaseEnd.RELEASED:
                self._end_lease(group_id, index, slot, end, now)
                self._requeue(group_id, index, slot)
            else:
                reports += self._lose(group, index, slot, end, now)
        return reports

    def _lose(
        self, group: OpenGroup, index: int, slot: Slot, end: LeaseEnd, now: float
    ) -> list[Report]:
        """An attempt came to nothing: try again, or give the slot up."""
        self._end_lease(group.record.group_id, index, slot, end, now)
        slot.attempt += 1
        limit = 1 if self._closing.kind is ClosingKind.DROP else self._terms.max_attempts
        if slot.attempt < limit:
            self._requeue(group.record.group_id, index, slot)
            return []
        slot.move(SlotState.DEAD)
        return self._close_if_over(group, now)

    def _end_lease(
        self, group_id: GroupId, index: int, slot: Slot, end: LeaseEnd, now: float
    ) -> None:
        lease = slot.lease
        assert lease is not None and not lease.ended, "a lease ends once"
        self._journal(replace(lease, ended=end, ended_at=now))
        slot.lease = None
        node = self.nodes.get(lease.node_id)
        if node is not None and (group_id, index) in node.leases:
            node.leases.remove((group_id, index))
            held = node.granted[lease.request_id]
            held.remove((group_id, index))
            if not held:
                del node.granted[lease.request_id]

    def _requeue(self, group_id: GroupId, index: int, slot: Slot) -> None:
        slot.move(SlotState.WAITING)
        self._waiting.appendleft((group_id, index))  # its group is older than all that wait

    def _leased(self, node_id: NodeId, group_id: GroupId, index: int, epoch: int) -> Slot | None:
        group = self.groups.get(group_id)
        if group is None or not 0 <= index < len(group.slots):
            return None
        slot = group.slots[index]
        if slot.state is not SlotState.LEASED or slot.epoch != epoch:
            return None
        return slot if slot.lease is not None and slot.lease.node_id == node_id else None

    # --- deliveries ---------------------------------------------------------------------------

    def holds(self, node_id: NodeId, group_id: GroupId, index: int, epoch: int) -> bool:
        return self._leased(node_id, group_id, index, epoch) is not None

    def deliver(
        self, row: RowRecord, outcome: Outcome, now: float
    ) -> tuple[DeliveryStatus, list[Report]]:
        """Take the result of a held lease; under an older epoch it is refused and changes
        nothing."""
        slot = self._leased(row.node_id, row.group_id, row.slot, row.epoch)
        if slot is None:
            return DeliveryStatus.FENCED, []
        group = self.groups[row.group_id]
        self._journal(row)
        node = self.nodes.get(row.node_id)
        if node is not None:
            node.last_seen, node.is_silent = now, False
            node.num_delivered += 1
        if outcome.has_reward:
            self._end_lease(row.group_id, row.slot, slot, LeaseEnd.DELIVERED, now)
            slot.move(SlotState.DONE)
            slot.row = row.summary
            return DeliveryStatus.STORED, self._close_if_over(group, now)
        if outcome.kind is OutcomeKind.CANCELLED:
            self._end_lease(row.group_id, row.slot, slot, LeaseEnd.RELEASED, now)
            self._requeue(row.group_id, row.slot, slot)
            return DeliveryStatus.STORED, []
        return DeliveryStatus.STORED, self._lose(group, row.slot, slot, LeaseEnd.FAILED, now)

    def _close_if_over(self, group: OpenGroup, now: float) -> list[Report]:
        states = [slot.state for slot in group.slots]
        num_dead = states.count(SlotState.DEAD)
        if num_dead and self._closing.kind is not ClosingKind.SURVIVORS:
            report = self.drop(group.record.group_id, DropReason.FAILED_SLOTS, now)
            return [] if report is None else [report]
        if num_dead + states.count(SlotState.DONE) < len(states):
            return []
        if num_dead and len(group.rows) < max(1, self._closing.min_survivors):
            return [self._end_group(group, GroupState.DROPPED, DropReason.FAILED_SLOTS, now)]
        return [self._end_group(group, GroupState.CLOSED, None, now)]

    def _end_group(
        self, group: OpenGroup, state: GroupState, reason: DropReason | None, now: float
    ) -> Report:
        assert state in NEXT_GROUP[GroupState(group.record.state)]
        record = replace(group.record, state=state, reason=reason or "", ended_at=now)
        self._journal(record)
        del self.groups[record.group_id]
        return Report(
            group_id=record.group_id,
            task_key=record.task_key,
            rows=group.rows,
            dropped=reason,
        )

    # --- restart ------------------------------------------------------------------------------

    def restore(
        self,
        groups: Iterable[GroupRecord],
        leases: Iterable[LeaseRecord],
        rows: Iterable[RowRecord],
        nodes: Iterable[NodeRecord],
        now: float,
    ) -> list[Report]:
        """Rebuild open groups and give every live lease a full ttl; `leases` come in order of
        epoch."""
        for record in nodes:
            # Live until it says otherwise; the version gate looks at each request anyway.
            self.nodes[record.node_id] = Node(record=record, last_seen=now, state=NodeState.LIVE)
        for group in sorted(groups, key=lambda record: record.issue):
            self._open(group)
        for lease in leases:
            self._restore_lease(lease, now)
        for row in rows:
            if Outcome(kind=row.outcome).has_reward:
                slot = self.groups[row.group_id].slots[row.slot]
                slot.state, slot.row = SlotState.DONE, row.summary
        for group_id, group in self.groups.items():
            self._waiting.extend(
                (group_id, index)
                for index, slot in enumerate(group.slots)
                if slot.state is SlotState.WAITING
            )
        # A config with fewer attempts than before may end groups that were still open.
        return [r for group in [*self.groups.values()] for r in self._close_if_over(group, now)]

    def _restore_lease(self, lease: LeaseRecord, now: float) -> None:
        slot = self.groups[lease.group_id].slots[lease.slot]
        slot.epoch = max(slot.epoch, lease.epoch)
        if lease.ended in (LeaseEnd.FAILED, LeaseEnd.REJECTED, LeaseEnd.EXPIRED):
            slot.attempt += 1
            if slot.attempt >= self._terms.max_attempts:
                slot.state = SlotState.DEAD
        if lease.ended:
            return
        slot.state, slot.lease = SlotState.LEASED, lease
        node = self.nodes.get(lease.node_id)
        assert node is not None, "a running lease names a registered node"
        self._hold(node, lease)
        self._watch(lease, now)
