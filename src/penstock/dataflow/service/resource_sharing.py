# SPDX-License-Identifier: Apache-2.0
"""Nodes whose resource also trains: when they pause, and when a trainer may have its batch.

A node with the tag `train` pauses while a trainer trains; one that an operator took `rollout` from
pauses until it is given back. Running answers are kept. Each interruption and each resumption is
recorded with its trigger. The rule itself is `core.multiplexing`; the trainer knows nothing of it.
State is in memory: after a restart of the service, nodes go on until the trainer asks again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import lru_cache

import msgspec
import structlog

from penstock.dataflow.core.consumers import Consumer
from penstock.dataflow.core.coordinator import Coordinator
from penstock.dataflow.core.groups import Node
from penstock.dataflow.core.leasing import LiveVersion, NodeState
from penstock.dataflow.core.multiplexing import Multiplexer, Phase, SwitchTrigger, VisitSpec
from penstock.dataflow.core.partition import Partition
from penstock.dataflow.service.process import Process
from penstock.errors import BadRequest, NotFound
from penstock.types import RESERVED_TAGS, NodeId, PolicyName, subject_of_node

ROLLOUT, TRAIN = "rollout", "train"
NO_ROLLOUT = "rollout=off"
"""How the tags of a node say that `rollout` was taken away: every other node has it."""
PAUSE_GRACE_S = 30.0
"""A trainer waits for the nodes of its resources for this long, then trains beside them."""
MAX_TAGS = 16
log = structlog.get_logger(__name__)

RecordEvent = Callable[[Mapping[str, str | float]], None]


def _not_recorded(event: Mapping[str, str | float]) -> None:
    """A service without a run folder has no event log."""


class ResourceSharing:
    def __init__(
        self, process: Process, coordinator: Coordinator, partition: Partition, visit: VisitSpec
    ) -> None:
        self.record: RecordEvent = _not_recorded
        self._process = process
        self._coordinator = coordinator
        self._partition = partition
        self._visit = visit
        self._machines: dict[PolicyName, Multiplexer] = {}
        self._ordered: dict[NodeId, tuple[str, float]] = {}
        """The last order to each node, to pause or to go on, and when it was decided."""
        self._followed: dict[NodeId, tuple[str, float]] = {}
        """The last order that each node has followed."""
        self._interrupted_by: dict[tuple[NodeId, PolicyName], tuple[int, int]] = {}
        """The newest version of each policy that a node loaded in the middle of its answers."""
        self._tagged_at: dict[NodeId, float] = {}
        self._with_train: set[NodeId] = set()
        """Nodes with the tag `train` that were seen: few, so a batch request looks at no others."""
        self._heedless: set[str] = set()
        """Subjects of nodes that did not pause in time: a node says itself that it shares its
        resource, so trainers do not wait for them again until an operator tags them."""

    # --- orders to nodes ----------------------------------------------------------------------

    def is_shared(self, node: Node) -> bool:
        """Whether it may be ordered to pause, and so asks for orders often. Not for sessions and
        evaluations, and not if it is untrusted: a trainer would wait for it."""
        node_id = node.record.node_id
        is_plain = not (node.is_session_gateway or node.is_evaluator or node.is_untrusted)
        if is_plain and TRAIN in tags_of(node):
            self._with_train.add(node_id)
        else:
            self._with_train.discard(node_id)
        return node_id in self._with_train or node_id in self._tagged_at

    def pause_of(self, node: Node) -> str:
        """Why this node should generate nothing; empty: it should."""
        trigger, decided_at = self._reason(node)
        node_id = node.record.node_id
        if trigger or node_id in self._ordered:
            self._ordered.setdefault(node_id, ("", decided_at))
            if self._ordered[node_id][0] != trigger:
                self._ordered[node_id] = (trigger, decided_at)
        return trigger

    def _reason(self, node: Node) -> tuple[str, float]:
        """The trigger of its pause, and when that was decided."""
        tags, tagged_at = tags_of(node), self._tagged_at.get(node.record.node_id, 0.0)
        if NO_ROLLOUT in tags:
            return SwitchTrigger.TAG_CHANGED, tagged_at
        machines = self._machines.values() if TRAIN in tags else ()
        for machine in machines:
            if machine.phase is Phase.TRAIN and machine.trigger is not None:
                return machine.trigger, machine.since
        return "", max([tagged_at, *(machine.since for machine in machines)])

    # --- what nodes report --------------------------------------------------------------------

    def joined(self, node: Node) -> None:
        """A node that can roll out joins while others cannot."""
        self.is_shared(node)
        self._followed.pop(node.record.node_id, None)  # its new process follows the order, too
        nodes, paused = self._partition.nodes, {*self._with_train, *self._tagged_at}
        if any(nodes[one].state is NodeState.PAUSED for one in paused if one in nodes):
            self._write("resumed", node, SwitchTrigger.RESOURCE_ADDED)

    def reported(self, node: Node, before: NodeState, live: tuple[LiveVersion, ...]) -> None:
        """A heartbeat arrived; `before` and `live`: as of the one before it. A node says what it
        likes, as often as it likes: each order and each version is recorded once."""
        node_id, is_paused = node.record.node_id, node.state is NodeState.PAUSED
        order = self._ordered.get(node_id)
        if (
            is_paused != (before is NodeState.PAUSED)
            and order is not None
            and order != self._followed.get(node_id)
            and is_paused == bool(order[0])
        ):
            self._followed[node_id] = order
            trigger, decided_at = order
            self._write(
                "interrupted" if is_paused else "resumed",
                node,
                trigger or SwitchTrigger.TAG_RETURNED,
                seconds=round(max(0.0, self._process.clock() - decided_at), 4),
            )
            self._process.wake()  # a trainer may be waiting for it
        was_generating = before is NodeState.LIVE is node.state and node.num_leases
        if live and node.live != live and was_generating and self._has_newer(node):
            self._write("interrupted", node, SwitchTrigger.NEW_WEIGHTS)

    def _has_newer(self, node: Node) -> bool:
        """Whether it serves a published version, newer than all that interrupted it before."""
        newest = {t.policy: (t.incarnation, t.number) for t in self._partition.target_versions}
        found = False
        for version in node.live:
            key = (node.record.node_id, version.policy)
            loaded = (version.incarnation, version.number)
            if self._interrupted_by.get(key, (0, 0)) < loaded <= newest.get(version.policy, (0, 0)):
                self._interrupted_by[key] = loaded
                found = True
        return found

    def _write(self, event: str, node: Node, trigger: str, **more: float) -> None:
        entry: dict[str, str | float] = {
            "event": event,
            "trigger": str(trigger),
            "node": node.record.node_id,
            "num_leases": node.num_leases,
            **more,
        }
        try:
            self.record(entry)
        except OSError as error:  # a full disk must not end the service
            log.warning("event not recorded", error=str(error), **entry)

    # --- when trainers may train --------------------------------------------------------------

    def may_train(self, consumer: Consumer, seq: int) -> bool:
        """Whether its resources are free for this trainer, which asks for batch `seq` and so does
        not train. If enough data waits, tell their nodes to pause."""
        nodes = self._partition.nodes
        shared = [
            nodes[one]
            for one in self._with_train
            if one in nodes
            and not nodes[one].is_expired
            and subject_of_node(one) not in self._heedless
        ]
        if not shared or consumer.terms.is_streamed:
            return True  # a streamed step goes on while it is generated
        policy, now = consumer.terms.policy, self._process.clock()
        machine = self._machines.setdefault(policy, Multiplexer(self._visit, now))
        switch = machine.decide(
            ready_batches=self._num_ready(consumer, seq),
            batches_left=consumer.terms.steps - consumer.lineage.number,
            is_training=False,
            now=now,
        )
        if switch is not None:
            log.info("resources change over", policy=policy, to=switch.phase, why=switch.trigger)
            self._process.wake()
        if machine.phase is Phase.ROLLOUT:
            return False
        generating = [node.record.node_id for node in shared if node.state is NodeState.LIVE]
        if generating and now - machine.since < PAUSE_GRACE_S:
            return False
        if generating:
            log.warning("trainer does not wait for nodes that do not pause", nodes=generating)
            self._heedless.update(map(subject_of_node, generating))
        return True

    def _num_ready(self, consumer: Consumer, seq: int) -> int:
        """Batches that could be served now, those included that were served before."""
        coordinator, sealed = self._coordinator, len(consumer.sealed)
        if seq <= consumer.last_sealed:
            return max(1, sealed)
        if consumer.terms.is_lockstep:
            return sealed + coordinator.has_decided_batch(consumer, seq)
        num_ready = len(consumer.ready)
        is_last = coordinator.is_exhausted(consumer) and bool(num_ready)
        return sealed + max(num_ready // max(1, consumer.num_fresh_needed), int(is_last))

    # --- operators ----------------------------------------------------------------------------

    def retag(self, node_id: NodeId, add: Collection[str], remove: Collection[str]) -> list[str]:
        """Change the tags of a node, until its process ends; returns those that it has then."""
        node = self._partition.nodes.get(node_id)
        if node is None:
            raise NotFound(f"node {node_id} is not in this run; `penstock status` lists its nodes")
        if reserved := sorted({*add, *remove} & {*RESERVED_TAGS}):
            raise BadRequest(
                f"tag {reserved[0]} says what the token of {node_id} is for, and stays as it is; "
                "drain the node, and let it join with another token"
            )
        both = sorted({*add} & {*remove})
        if both:
            raise BadRequest(f"{both[0]} is to be added and removed; name it once")
        kept = [tag for tag in tags_of(node) if tag not in remove and tag != NO_ROLLOUT]
        has_rollout = (NO_ROLLOUT not in tags_of(node) or ROLLOUT in add) and ROLLOUT not in remove
        plain = [tag for tag in add if tag != ROLLOUT]
        marks = [] if has_rollout else [NO_ROLLOUT]
        tags = [*dict[str, None].fromkeys([*kept, *plain, *marks])]
        if len(tags) > MAX_TAGS:
            raise BadRequest(f"a node has at most {MAX_TAGS} tags; remove some")
        self._tagged_at[node_id] = self._process.clock()
        self._heedless.discard(subject_of_node(node_id))
        self._partition.node_registry.retag(node, tuple(tags), self._process.clock())
        return [*([ROLLOUT] if has_rollout else []), *(tag for tag in tags if tag != NO_ROLLOUT)]


def tags_of(node: Node) -> tuple[str, ...]:
    return _decode(node.record.tags)


@lru_cache(maxsize=4096)
def _decode(tags: str) -> tuple[str, ...]:
    """Asked for every node at every heartbeat."""
    return msgspec.json.decode(tags, type=tuple[str, ...])
