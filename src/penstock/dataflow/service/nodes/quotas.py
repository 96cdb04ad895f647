# SPDX-License-Identifier: Apache-2.0
"""What one credential may take of a partition: nodes, slots, registrations in a time, open polls.

Counts by subject, so a second node under the same token shares the limits of the first. Refuses
with 429; the limits are far above what a fleet needs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from penstock.dataflow.core.leasing import RegisterRequest
from penstock.dataflow.core.node_registry import NodeRegistry
from penstock.dataflow.service.open_polls import OpenPolls
from penstock.errors import Busy
from penstock.types import NodeId, subject_of_node

MAX_NODES = 4096
"""Nodes that are registered at a time."""
MAX_SLOTS = 1_000_000
"""Sum of the capacities of these nodes: the most slots they may hold."""
REGISTRATIONS_PER_S = 4.0
"""Each costs a write to the ledger. A fleet of MAX_NODES may register at once."""
RELEASED_AT_ONCE, RELEASES_PER_S = 4096, 32.0
"""Slots handed back without a result, beside as many as its nodes hold: each costs no attempt, but
writes to the ledger and a timer. Nodes do it when they stop."""
MAX_OWED = 4096.0
"""More than these need not be waited for: all nodes of a fleet may be preempted at once, and are
served again two minutes later."""
MIN_POLLS = 8
POLLS_PER_NODE = 2
"""A node keeps one lease request open; a repeated one may overlap with it."""
RETRY_S = 5.0


class NodeQuotas:
    def __init__(
        self,
        registry: NodeRegistry,
        clock: Callable[[], float],
        forget_silent: Callable[[str], bool],
    ) -> None:
        """`forget_silent`: makes room for a node of this subject; False if none of its nodes is
        silent."""
        self._registry = registry
        self._clock = clock
        self._forget_silent = forget_silent
        self._registered: dict[str, tuple[float, float]] = {}
        """By subject: registrations that it may still make, and when that was counted."""
        self._released: dict[str, tuple[float, float, int]] = {}
        """By subject: slots that it may still hand back, when that was counted, and how many it had
        handed back then."""
        self._polls = OpenPolls()

    def check_registration(self, body: RegisterRequest) -> None:
        """Raise Busy when the subject may not register this node now."""
        subject = subject_of_node(body.node_id)
        self._check_rate(subject)
        registry = self._registry
        known = registry.nodes.get(body.node_id)
        num_nodes = len(registry.nodes_of(subject)) - (known is not None)
        if num_nodes >= MAX_NODES and not self._forget_silent(subject):
            raise _over(subject, f"has {num_nodes} nodes", f"{MAX_NODES} nodes")
        replaced = 0 if known is None else known.record.capacity
        num_slots = registry.capacity_of(subject) - replaced + body.capacity
        if num_slots > MAX_SLOTS:
            raise _over(subject, f"asks for {num_slots} slots", f"{MAX_SLOTS} slots")

    def _check_rate(self, subject: str) -> None:
        now = self._clock()
        left, counted_at = self._registered.get(subject, (float(MAX_NODES), now))
        left = min(float(MAX_NODES), left + max(0.0, now - counted_at) * REGISTRATIONS_PER_S)
        if left < 1:
            self._registered[subject] = left, now
            raise _over(subject, "registers too often", f"{REGISTRATIONS_PER_S:g} per second")
        self._registered[subject] = left - 1, now

    def check_released(self, node_id: NodeId) -> None:
        """Raise Busy for a subject that hands back what it leases, again and again."""
        subject, now = subject_of_node(node_id), self._clock()
        most = float(RELEASED_AT_ONCE + self._registry.capacity_of(subject))
        left, counted_at, counted = self._released.get(subject, (most, now, 0))
        released = self._registry.num_released[subject]
        left = min(most, left + max(0.0, now - counted_at) * RELEASES_PER_S)
        left = max(-MAX_OWED, left - (released - counted))
        self._released[subject] = left, now, released
        if left < 0:
            raise _over(subject, "hands back too many slots", f"{RELEASES_PER_S:g} per second")

    def poll(self, node_id: NodeId) -> AbstractContextManager[None]:
        """One lease request of the subject is open."""
        subject = subject_of_node(node_id)
        limit = MIN_POLLS + POLLS_PER_NODE * len(self._registry.nodes_of(subject))
        if (num_open := self._polls.num_open(subject)) >= limit:
            raise _over(subject, f"has {num_open} lease requests open", f"{limit}")
        return self._polls.hold(subject)


def _over(subject: str, what: str, limit: str) -> Busy:
    return Busy(
        f"credential {subject!r} {what}; the limit per credential is {limit}. Wait, let nodes "
        "leave, or use another token: `penstock token RUN --name NAME`",
        retry_after_s=RETRY_S,
    )
