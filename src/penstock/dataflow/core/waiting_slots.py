# SPDX-License-Identifier: Apache-2.0
"""The slots of a partition that no node holds: queues by what they are for and which policies they
call, and which nodes may take them.

The queues hold groups, oldest first; which of a group's slots wait, the group knows. Whether a
node's versions are recent enough is for the version gate to say.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import StrEnum

from penstock.dataflow.core.groups import LeaseSpec, Node, OpenGroup
from penstock.types import GroupId, PolicyName


class QueueKind(StrEnum):
    """What the slots of a queue are for."""

    TRAINING = "training"
    SESSION = "session"
    """For external agents."""
    EVALUATION = "evaluation"


QueueKey = tuple[QueueKind, frozenset[PolicyName]]
"""What its slots are for, and the policies they call; empty: all of the run."""


class WaitingSlots:
    def __init__(
        self,
        groups: Mapping[GroupId, OpenGroup],
        terms: LeaseSpec,
        run_policies: Collection[PolicyName],
    ) -> None:
        """groups: the open groups of the partition, which adds and removes them."""
        self.num_slots = 0
        """Slots that could be leased now, without evaluation slots."""
        self.num_sessions = 0
        """How many of them are for external agents."""
        self.num_evaluations = 0
        """Slots of evaluations that could be leased now."""
        self.num_queued = 0
        """Total number of slots ever queued."""
        self.has_training_ended = False
        """Evaluations may take all slots."""
        self._groups = groups
        self._terms = terms
        self._run_policies = run_policies
        self._queues: dict[QueueKey, deque[GroupId]] = {}
        """Groups with waiting slots; entries without any are removed when reached."""

    # --- what waits ---------------------------------------------------------------------------

    def add(self, group: OpenGroup) -> None:
        """Queue all slots of a new group."""
        self._queue_of(group).append(group.record.group_id)
        self._count(group, group.record.num_slots)
        self.num_queued += group.record.num_slots

    def put_back(self, group: OpenGroup, index: int) -> None:
        """Queue one slot again, before all other groups, which are younger."""
        group.retry_slots.append(index)
        self._queue_of(group).appendleft(group.record.group_id)
        self._count(group, 1)
        self.num_queued += 1

    def take(self, group: OpenGroup, most: int) -> range:
        """Remove and return waiting slots of this group: one slot to retry, or a range of fresh
        ones."""
        slots = group.pop_waiting(most)
        self._count(group, -len(slots))
        return slots

    def take_all(self, group: OpenGroup) -> list[int]:
        """Remove and return all waiting slots of this group."""
        self._count(group, -group.num_waiting)
        slots = [*group.retry_slots, *range(group.next_fresh, group.record.num_slots)]
        group.retry_slots, group.next_fresh = [], group.record.num_slots
        return slots

    def restore(self, group: OpenGroup) -> None:
        """Queue what waited before a restart; groups come oldest first."""
        if group.num_waiting:
            self._count(group, group.num_waiting)
            self._queue_of(group).append(group.record.group_id)

    def _count(self, group: OpenGroup, num_slots: int) -> None:
        """Count `num_slots` more waiting slots of this group; negative for fewer."""
        if group.is_evaluation:
            self.num_evaluations += num_slots
            return
        self.num_slots += num_slots
        if self.is_session(group):
            self.num_sessions += num_slots

    def is_session(self, group: OpenGroup) -> bool:
        """Is it for external agents?"""
        return group.record.source == self._terms.session_source

    def policies_of(self, source: str) -> frozenset[PolicyName]:
        """Policies that slots of this source call."""
        return self._terms.policies.get(source) or frozenset(self._run_policies)

    def _queue_of(self, group: OpenGroup) -> deque[GroupId]:
        kind = QueueKind.SESSION if self.is_session(group) else QueueKind.TRAINING
        if group.is_evaluation:
            kind = QueueKind.EVALUATION
        key = (kind, self._terms.policies.get(group.record.source, frozenset()))
        return self._queues.setdefault(key, deque())

    # --- who may take it ----------------------------------------------------------------------

    def first_groups(self, node: Node) -> Iterator[tuple[OpenGroup, frozenset[PolicyName]]]:
        """The oldest group with waiting slots of each queue that this node serves, and the policies
        of the queue."""
        for (kind, policies), queue in self._queues.items():
            if self._does(node, kind) and self._can_serve(node, policies):
                group = self._first(queue)
                if group is not None:
                    yield group, policies

    def has_any_for(self, node: Node) -> bool:
        """Are there slots that this node could take, if its versions are recent enough?"""
        return any(self.first_groups(node))

    def unserved_sources(self, nodes: Iterable[Node]) -> dict[str, frozenset[PolicyName]]:
        """Sources with waiting slots, and the policies they call, where nodes are live and none
        serves all these policies."""
        live = [node for node in nodes if not node.is_expired]
        found: dict[str, frozenset[PolicyName]] = {}
        for (kind, policies), queue in self._queues.items():
            group = self._first(queue)
            peers = [node for node in live if self._does(node, kind)]
            if group and peers and not any(self._can_serve(node, policies) for node in peers):
                found[group.record.source] = self.policies_of(group.record.source)
        return found

    def may_evaluate(self, node: Node) -> bool:
        """Scores come from the node, so an untrusted one never evaluates."""
        if node.is_session_gateway or node.is_untrusted:
            return False
        return node.is_evaluator or self._terms.evaluation_share > 0

    def evaluation_room(self, node: Node) -> int:
        """Slots of evaluations that this node may take now. None until a quarter of its share is
        free, or enough for all that wait: a pass through the model costs much the same for one
        answer as for many."""
        capacity = node.record.capacity
        if node.is_evaluator or self.has_training_ended:
            return capacity
        share = max(1, int(self._terms.evaluation_share * capacity))
        room = share - node.num_evaluations
        return room if room >= min(share // 4, self.num_evaluations) else 0

    def _first(self, queue: deque[GroupId]) -> OpenGroup | None:
        while queue:
            group = self._groups.get(queue[0])
            if group is not None and group.num_waiting:
                return group
            queue.popleft()  # ended, or all its slots are leased
        return None

    def _does(self, node: Node, kind: QueueKind) -> bool:
        """Does this node take slots of this kind?"""
        if kind is QueueKind.EVALUATION:
            return self.may_evaluate(node)
        return not node.is_evaluator and node.is_session_gateway == (kind is QueueKind.SESSION)

    def _can_serve(self, node: Node, policies: Collection[PolicyName]) -> bool:
        """Does this node serve all these policies; none: all of the run?"""
        return not node.policies or node.policies.issuperset(policies or self._run_policies)
