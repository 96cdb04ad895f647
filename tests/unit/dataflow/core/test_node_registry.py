# SPDX-License-Identifier: Apache-2.0
"""How many leases a node may hold."""

from __future__ import annotations

from penstock.dataflow.core.leasing import NodeState, RegisterRequest
from penstock.dataflow.core.node_registry import NodeRegistry
from penstock.dataflow.records import GrantRecord
from penstock.types import GroupId, NodeId

NODES = [NodeId(f"node-{n}") for n in range(3)]


def grant(node_id: NodeId, at: float) -> GrantRecord:
    return GrantRecord(
        group_id=GroupId("p0-1"),
        slot=0,
        epoch=1,
        num_slots=1,
        attempt=1,
        node_id=node_id,
        boot_id="b",
        request_id="r",
        granted_at=at,
    )


def max_leases_after_a_long_attempt(state: NodeState) -> int:
    """Two nodes take 10 s; the third takes 50 s, in 40 of which it reports this state."""
    registry = NodeRegistry(lambda record: None)
    for node_id in NODES:
        registry.register(
            RegisterRequest(node_id=node_id, boot_id="b", capacity=8, policies=()), 0.0
        )
    for node_id in NODES[:2]:
        registry.finished(registry.nodes[node_id], grant(node_id, 0.0), 10.0)
    third = NODES[2]
    for at, reported in ((5.0, state), (45.0, NodeState.LIVE)):
        registry.record_heartbeat(third, "b", at, state=reported, live=())
    registry.finished(registry.nodes[third], grant(third, 0.0), 50.0)
    assert list(registry.expire_silent(60.0, 50.0)) == []
    return registry.max_leases(registry.nodes[third])


def test_time_in_which_a_node_is_told_to_pause_does_not_make_it_slow() -> None:
    assert max_leases_after_a_long_attempt(NodeState.LIVE) == 3
    assert max_leases_after_a_long_attempt(NodeState.PAUSED) == 8


def test_an_attempt_that_is_granted_within_a_pause_counts_from_its_grant() -> None:
    registry = NodeRegistry(lambda record: None)
    registry.register(RegisterRequest(node_id=NODES[0], boot_id="b", capacity=8, policies=()), 0.0)
    node = registry.nodes[NODES[0]]
    registry.record_heartbeat(NODES[0], "b", 5.0, state=NodeState.PAUSED, live=())
    assert node.paused_s(since=8.0, now=12.0) == 4.0
    registry.record_heartbeat(NODES[0], "b", 12.0, state=NodeState.LIVE, live=())
    assert node.paused_s(since=8.0, now=99.0) == 4.0
