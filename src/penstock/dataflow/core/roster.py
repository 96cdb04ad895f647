# SPDX-License-Identifier: Apache-2.0
"""Nodes of one partition: who lives under which session, who fell silent, who may hold how much.

A pure state machine beside the partition's leases. It never ends a lease itself: it says whose
leases are over.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator

import msgspec

from penstock.dataflow.core.groups import Held, Node
from penstock.dataflow.core.leasing import LiveVersion, NodeState, Register
from penstock.dataflow.records import (
    GrantRecord,
    Journal,
    LeaseEnd,
    LeaseRecord,
    NodeRecord,
    quarantine,
    row_id,
)
from penstock.errors import Fenced, NotFound
from penstock.types import NodeId, RowId

SLOW = 2.0
"""A node this many times slower than the median gets leases in proportion."""
ATTEMPT_WEIGHT = 0.2
"""Of one attempt in a node's moving average."""


class Roster:
    def __init__(self, journal: Journal) -> None:
        self.nodes: dict[NodeId, Node] = {}
        self._journal = journal
        self._quarantined: set[tuple[NodeId, str]] = set()
        """Lives of nodes that get no work, known here or not."""
        self._median_s = 0.0
        """Attempt time of the median node; brought up to date at each tick."""

    def get(self, node_id: NodeId, session: str) -> Node:
        node = self.nodes.get(node_id)
        if node is None:
            raise NotFound(f"node {node_id} is not registered; POST /v1/nodes first")
        if node.record.session != session:
            raise Fenced(f"node {node_id} lives under another session; this process was replaced")
        return node

    def replaced(self, body: Register) -> Node | None:
        """The life of this node that the new session ends, if there is one."""
        known = self.nodes.get(body.node_id)
        if known is None or known.record.session == body.session:
            return None
        if body.session in known.past_sessions:
            raise Fenced(f"node {body.node_id} lives under a newer session than this")
        return known

    def register(self, body: Register, now: float) -> None:
        known = self.nodes.get(body.node_id)
        if known is not None and known.record.session == body.session:
            known.last_seen, known.is_silent = now, False
            return
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
        node = self.nodes[body.node_id] = Node(
            record=record,
            last_seen=now,
            joined_at=now,
            is_quarantined=(body.node_id, body.session) in self._quarantined,
        )
        if known is not None:
            node.num_delivered, node.num_tokens = known.num_delivered, known.num_tokens
            node.past_sessions = known.past_sessions
            node.past_sessions.append(known.record.session)

    def heard(
        self,
        node_id: NodeId,
        session: str,
        now: float,
        *,
        state: NodeState,
        live: tuple[LiveVersion, ...],
    ) -> bool:
        """Does the node say anything new?"""
        node = self.get(node_id, session)
        node.last_seen, node.is_silent = now, False
        before = (node.state, node.live)
        node.state, node.live = state, live
        return before != (state, live)

    def ask(self, node_id: NodeId, session: str, request_id: str, now: float) -> None:
        """Take note of a lease request. A node's newest one replaces those before it: nobody
        listens to them any more, and what they were granted would be held by none."""
        node = self.get(node_id, session)
        node.last_seen, node.is_silent = now, False
        if request_id != node.asking and request_id not in node.asked_before:
            node.asked_before.append(node.asking)
            node.asking = request_id

    def allowance(self, node: Node) -> int:
        """Slots this node may hold: its capacity, or less when it is slower than the others, or
        none when it is in quarantine."""
        if node.is_quarantined:
            return 0
        capacity = node.record.capacity
        if node.serves_sessions:
            return capacity  # how long a session takes is its agent's business
        if node.attempt_s <= SLOW * self._median_s or not self._median_s:
            return capacity
        return max(1, int(capacity * SLOW * self._median_s / node.attempt_s))

    def quarantine(self, node_id: NodeId, session: str) -> Node | None:
        """For ever, for this life of the node, which may not have come here yet; a restart of the
        service changes nothing. The node, if its work ends now."""
        node = self.nodes.get(node_id)
        life = (node_id, session or (node.record.session if node is not None else ""))
        if not life[1] or life in self._quarantined:
            return None
        self._quarantined.add(life)
        self._journal(quarantine(*life))
        if node is None or node.record.session != life[1]:
            return None
        node.is_quarantined = True
        return node

    def finished(self, node: Node, grant: GrantRecord, now: float) -> None:
        """An attempt of this node has a result."""
        took_s = max(0.0, now - grant.granted_at)
        known = node.attempt_s
        node.attempt_s = took_s if not known else known + ATTEMPT_WEIGHT * (took_s - known)

    def newly_silent(self, ttl_s: float, now: float) -> Iterator[Node]:
        times_s = [
            node.attempt_s
            for node in self.nodes.values()
            if node.attempt_s and not node.serves_sessions
        ]
        self._median_s = statistics.median(times_s) if len(times_s) > 1 else 0.0
        for node in self.nodes.values():
            # One heard after the service stood still, and before it was forgiven, gains nothing.
            node.last_seen = min(node.last_seen, now)
            if not node.is_silent and now - node.last_seen > ttl_s:
                node.is_silent = True
                yield node

    def forgive(self, gap_s: float) -> None:
        """The service itself stood still: nobody could be heard, so nobody was silent."""
        for node in self.nodes.values():
            node.last_seen += gap_s

    # --- who holds what -----------------------------------------------------------------------

    def hold(self, node: Node, grant: GrantRecord, num_slots: int) -> None:
        """So many slots of the grant run."""
        held = node.granted.get(grant.request_id)
        if held is None:
            held = node.granted[grant.request_id] = Held()
        held.grants.append(grant)
        held.num_left += num_slots
        node.num_leases += num_slots

    def let_go(self, lease: LeaseRecord) -> None:
        node = self.nodes.get(lease.node_id)
        if node is not None and lease.ended in (LeaseEnd.CANCELLED, LeaseEnd.TRUNCATED):
            node.stopped.append(row_id(lease.group_id, lease.slot, lease.epoch))
        held = None if node is None else node.granted.get(lease.request_id)
        if node is None or held is None:
            return
        node.num_leases -= 1
        held.num_left -= 1
        if not held.num_left:
            del node.granted[lease.request_id]

    def stopped(self, node_id: NodeId) -> tuple[RowId, ...]:
        """Leases that ended without the node, told once; if that is lost, its result is fenced."""
        node = self.nodes.get(node_id)
        if node is None or not node.stopped:
            return ()
        told, node.stopped = tuple(node.stopped), []
        return told

    def restore(
        self,
        records: Iterable[NodeRecord],
        quarantined: Iterable[tuple[NodeId, str]],
        now: float,
    ) -> None:
        """`quarantined` names every life of a node that was ever in quarantine."""
        self._quarantined = set(quarantined)
        for record in records:
            # Live until it says otherwise; the version gate looks at each request anyway.
            self.nodes[record.node_id] = Node(
                record=record,
                last_seen=now,
                state=NodeState.LIVE,
                joined_at=record.at,
                is_quarantined=(record.node_id, record.session) in self._quarantined,
            )
