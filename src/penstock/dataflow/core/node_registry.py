# SPDX-License-Identifier: Apache-2.0
"""Nodes of one partition: which process each node runs, which nodes are silent, and how many leases
each may hold.

A pure state machine next to the partition's leases. It never ends a lease itself: it reports whose
leases must end.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import replace

import msgspec

from penstock.dataflow.core.groups import HeldLeases, Node
from penstock.dataflow.core.ids import is_evaluation
from penstock.dataflow.core.leasing import LiveVersion, NodeState, RegisterRequest
from penstock.dataflow.records import (
    GrantRecord,
    Journal,
    LeaseEnd,
    NodeRecord,
    quarantine_record,
    row_id,
)
from penstock.errors import Fenced, NotFound
from penstock.types import GroupId, NodeId, RowId, subject_of_node

SLOW_FACTOR = 2.0
"""A node this many times slower than the median gets proportionally fewer leases."""
ATTEMPT_WEIGHT = 0.2
"""Weight of one attempt in a node's moving average."""


class NodeRegistry:
    def __init__(self, journal: Journal) -> None:
        self.nodes: dict[NodeId, Node] = {}
        self._by_subject: dict[str, set[NodeId]] = {}
        self._capacities: Counter[str] = Counter()
        """By subject, over all its nodes."""
        self.num_released: Counter[str] = Counter()
        """Leases that ended without a result or an attempt, by subject, also of nodes that left."""
        self._journal = journal
        self._quarantined: set[str] = set()
        """Subjects in quarantine, including those without a node here."""
        self._untrusted_leases: Counter[GroupId] = Counter()
        """Running leases of untrusted nodes, by group."""
        self._median_s = 0.0
        """Attempt time of the median node, of those that others are compared with; updated at each
        tick."""

    def get(self, node_id: NodeId, boot_id: str) -> Node:
        node = self.nodes.get(node_id)
        if node is None:
            raise NotFound(f"node {node_id} is not registered; POST /v1/nodes first")
        if node.record.boot_id != boot_id:
            raise Fenced(
                f"node {node_id} has registered with a newer boot_id; "
                "this process was replaced and must exit"
            )
        return node

    def nodes_of(self, subject: str) -> AbstractSet[NodeId]:
        """Registered nodes that use a token for this subject."""
        return self._by_subject.get(subject, frozenset())

    def capacity_of(self, subject: str) -> int:
        """Slots that its nodes can run concurrently, all together."""
        return self._capacities[subject]

    def _add(self, node: Node) -> None:
        node_id, subject = node.record.node_id, subject_of_node(node.record.node_id)
        replaced = self.nodes.get(node_id)
        self._capacities[subject] -= 0 if replaced is None else replaced.record.capacity
        self._capacities[subject] += node.record.capacity
        self.nodes[node_id] = node
        self._by_subject.setdefault(subject, set()).add(node_id)

    def remove(self, node: Node, now: float) -> None:
        """The node leaves; its leases have ended."""
        node_id, subject = node.record.node_id, subject_of_node(node.record.node_id)
        self._journal(replace(node.record, left=True, at=now))
        del self.nodes[node_id]
        self._capacities[subject] -= node.record.capacity
        self._by_subject[subject].discard(node_id)
        if not self._by_subject[subject]:
            del self._by_subject[subject], self._capacities[subject]

    def node_to_replace(self, body: RegisterRequest) -> Node | None:
        """The node's earlier process that this registration replaces, if any."""
        known = self.nodes.get(body.node_id)
        if known is None or known.record.boot_id == body.boot_id:
            return None
        if body.boot_id in known.past_boot_ids:
            raise Fenced(
                f"node {body.node_id} has registered with a newer boot_id; "
                "this process was replaced and must exit"
            )
        return known

    def register(self, body: RegisterRequest, now: float) -> None:
        known = self.nodes.get(body.node_id)
        if known is not None and known.record.boot_id == body.boot_id:
            known.last_seen, known.is_expired = now, False
            return
        record = NodeRecord(
            node_id=body.node_id,
            boot_id=body.boot_id,
            capacity=body.capacity,
            policies=msgspec.json.encode(body.policies).decode(),
            tags=msgspec.json.encode(body.tags).decode(),
            left=False,
            at=now,
        )
        self._journal(record)
        node = Node(
            record=record,
            last_seen=now,
            joined_at=now,
            is_quarantined=subject_of_node(body.node_id) in self._quarantined,
        )
        self._add(node)
        if known is not None:
            node.num_delivered, node.num_tokens = known.num_delivered, known.num_tokens
            node.past_boot_ids = known.past_boot_ids
            node.past_boot_ids.append(known.record.boot_id)

    def retag(self, node: Node, tags: tuple[str, ...], now: float) -> None:
        """Change what a node says about itself, until its process ends."""
        node.record = replace(node.record, tags=msgspec.json.encode(tags).decode(), at=now)
        self._journal(node.record)

    def record_heartbeat(
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
        node = self.get(node_id, boot_id)
        node.last_seen, node.is_expired = now, False
        before = (node.state, node.live, node.pinned)
        node.state, node.live, node.pinned = state, live, pinned
        if state is NodeState.PAUSED and node.paused_since is None:
            node.paused_since = now
        elif state is not NodeState.PAUSED and node.paused_since is not None:
            node.pauses.append((node.paused_since, now))
            node.paused_since = None
        return before != (state, live, pinned)

    def ask(self, node_id: NodeId, boot_id: str, request_id: str, now: float) -> None:
        """Record a lease request. A node's newest request replaces the earlier ones: the node no
        longer waits for their responses, so leases granted to them would be lost."""
        node = self.get(node_id, boot_id)
        node.last_seen, node.is_expired = now, False
        if request_id != node.current_request and request_id not in node.past_requests:
            node.past_requests.append(node.current_request)
            node.current_request = request_id

    def max_leases(self, node: Node) -> int:
        """Slots this node may hold: its capacity, less if it is slower than the others, none if it
        is in quarantine."""
        if node.is_quarantined:
            return 0
        capacity = node.record.capacity
        if node.is_session_gateway:
            return capacity  # a session's duration depends on its agent
        if node.mean_attempt_s <= SLOW_FACTOR * self._median_s or not self._median_s:
            return capacity
        return max(1, int(capacity * SLOW_FACTOR * self._median_s / node.mean_attempt_s))

    def is_untrusted(self, node_id: NodeId) -> bool:
        """Whether it registered with an untrusted credential; False if it has left."""
        node = self.nodes.get(node_id)
        return node is not None and node.is_untrusted

    def may_take(self, node: Node, group_id: GroupId, num_groups: int) -> bool:
        """Whether this node may lease slots of this group, one of `num_groups` open ones. Beside a
        trusted node, untrusted ones hold slots of at most half of them: a group waits for all its
        slots, and who takes work need not do it."""
        held = self._untrusted_leases
        if not node.is_untrusted or group_id in held or len(held) < num_groups // 2:
            return True
        return not any(map(_is_working, self.nodes.values()))

    def is_quarantined(self, subject: str) -> bool:
        return subject in self._quarantined

    def quarantine(self, subject: str) -> list[Node]:
        """Quarantine every node of this subject permanently: those that are registered, and any
        that registers later, also after a restart of the service. Returns the nodes whose work must
        end now."""
        if subject in self._quarantined:
            return []
        self._quarantined.add(subject)
        self._journal(quarantine_record(subject))
        nodes = [self.nodes[node_id] for node_id in sorted(self.nodes_of(subject))]
        for node in nodes:
            node.is_quarantined = True
        return nodes

    def finished(self, node: Node, grant: GrantRecord, now: float) -> None:
        """Update the node's attempt time: one of its attempts has a reward. What failed or was
        cancelled says nothing, nor do evaluations, which have other tasks."""
        if is_evaluation(grant.group_id):
            return
        paused_s = 0.0
        if (node.pauses or node.paused_since is not None) and not node.is_untrusted:
            paused_s = node.paused_s(grant.granted_at, now)
        took_s = max(0.0, now - grant.granted_at - paused_s)
        known = node.mean_attempt_s
        node.mean_attempt_s = took_s if not known else known + ATTEMPT_WEIGHT * (took_s - known)

    def expire_silent(self, ttl_s: float, now: float) -> Iterator[Node]:
        times_s = [
            node.mean_attempt_s
            for node in self.nodes.values()
            if node.mean_attempt_s and _is_compared(node)
        ]
        self._median_s = statistics.median(times_s) if len(times_s) > 1 else 0.0
        for node in self.nodes.values():
            # A heartbeat between a stall of the service and extend_deadlines() must not count
            # double.
            node.last_seen = min(node.last_seen, now)
            if not node.is_expired and now - node.last_seen > ttl_s:
                node.is_expired = True
                yield node

    def extend_deadlines(self, gap_s: float) -> None:
        """The service stalled for gap_s: extend all deadlines by that much, since heartbeats could
        not arrive."""
        for node in self.nodes.values():
            node.last_seen += gap_s

    # --- held leases --------------------------------------------------------------------------

    def add_leases(self, node: Node, grant: GrantRecord, num_slots: int) -> None:
        """`num_slots` slots of the grant are running."""
        held = node.granted.get(grant.request_id)
        if held is None:
            held = node.granted[grant.request_id] = HeldLeases()
        held.grants.append(grant)
        held.num_running += num_slots
        node.num_leases += num_slots
        if is_evaluation(grant.group_id):
            node.num_evaluations += num_slots
        if node.is_untrusted:
            self._untrusted_leases[grant.group_id] += num_slots

    def end_lease(self, grant: GrantRecord, slot: int, end: LeaseEnd) -> None:
        node = self.nodes.get(grant.node_id)
        if node is not None and end in (LeaseEnd.CANCELLED, LeaseEnd.TRUNCATED):
            node.revoked.append(row_id(grant.group_id, slot, grant.epoch))
        if end is LeaseEnd.RELEASED:
            self.num_released[subject_of_node(grant.node_id)] += 1
        held = None if node is None else node.granted.get(grant.request_id)
        if node is None or held is None:
            return
        node.num_leases -= 1
        node.num_evaluations -= is_evaluation(grant.group_id)
        held.num_running -= 1
        if node.is_untrusted:
            self._untrusted_leases[grant.group_id] -= 1
            if not self._untrusted_leases[grant.group_id]:
                del self._untrusted_leases[grant.group_id]
        if not held.num_running:
            del node.granted[grant.request_id]

    def revoked(self, node_id: NodeId) -> tuple[RowId, ...]:
        """Leases that ended without the node, reported once. If that report is lost, the node's
        result is fenced."""
        node = self.nodes.get(node_id)
        if node is None or not node.revoked:
            return ()
        revoked, node.revoked = tuple(node.revoked), []
        return revoked

    def restore(
        self,
        records: Iterable[NodeRecord],
        quarantined: Iterable[str],
        now: float,
    ) -> None:
        """`quarantined` lists every subject that was ever quarantined."""
        self._quarantined = set(quarantined)
        for record in records:
            # Assumed live until it reports otherwise; the version gate checks each request anyway.
            self._add(
                Node(
                    record=record,
                    last_seen=now,
                    state=NodeState.LIVE,
                    joined_at=record.at,
                    is_quarantined=subject_of_node(record.node_id) in self._quarantined,
                )
            )


def _is_working(node: Node) -> bool:
    """A trusted node that takes tasks now."""
    return node.state is NodeState.LIVE and _is_compared(node)


def _is_compared(node: Node) -> bool:
    """Whether others are slow beside it: one token may have many names, and say of each at once
    that it is done."""
    is_trusted = not (node.is_untrusted or node.is_quarantined)
    return is_trusted and not (node.is_session_gateway or node.is_expired)
