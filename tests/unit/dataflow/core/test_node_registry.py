# SPDX-License-Identifier: Apache-2.0
"""How many leases a node may hold."""

from __future__ import annotations

import pytest
from tests.sim.world import COMPLETED, FAILED, World

from penstock.dataflow.core.leasing import NodeState, RegisterRequest
from penstock.dataflow.core.node_registry import NodeRegistry
from penstock.dataflow.records import GrantRecord
from penstock.types import UNTRUSTED_TAG, GroupId, NodeId, Outcome, OutcomeKind

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


# --- whose time counts ---------------------------------------------------------------------------

CAPACITY = 512
FAST = [NodeId(f"other.{n}") for n in range(9)]
SPEED = 3000
"""Times faster than a node of the run."""


def pool(*tags: str) -> NodeRegistry:
    """Three nodes take a minute; nine names of another token a fiftieth of a second."""
    registry = NodeRegistry(lambda record: None)
    for node_id in (*NODES, *FAST):
        own = tags if node_id in FAST else ()
        body = RegisterRequest(
            node_id=node_id, boot_id="b", capacity=CAPACITY, policies=(), tags=own
        )
        registry.register(body, 0.0)
        took_s = 60.0 / SPEED if node_id in FAST else 60.0
        registry.finished(registry.nodes[node_id], grant(node_id, 0.0), took_s)
    return registry


def slots(registry: NodeRegistry, node_id: NodeId) -> int:
    assert list(registry.expire_silent(1e9, 61.0)) == []
    return registry.max_leases(registry.nodes[node_id])


def test_many_fast_trusted_nodes_make_the_others_slow() -> None:
    assert slots(pool(), NODES[0]) == 1


def test_names_of_an_untrusted_token_make_no_node_slow() -> None:
    """One token has as many nodes as it likes, and each could say at once that it is done."""
    registry = pool(UNTRUSTED_TAG)
    assert slots(registry, NODES[0]) == CAPACITY
    registry.finished(registry.nodes[FAST[0]], grant(FAST[0], 0.0), 1e6)
    assert slots(registry, FAST[0]) < CAPACITY, "a slow one has fewer slots still"


def test_nodes_in_quarantine_and_silent_ones_make_no_node_slow() -> None:
    registry = pool()
    registry.quarantine("other")
    assert slots(registry, NODES[0]) == CAPACITY
    registry = pool()
    for node_id in NODES:
        registry.ask(node_id, "b", "r", 100.0)
    silent = {node.record.node_id for node in registry.expire_silent(50.0, 100.0)}
    assert silent == set(FAST)
    assert slots(registry, NODES[0]) == CAPACITY


@pytest.mark.parametrize("outcome", [FAILED, Outcome(kind=OutcomeKind.CANCELLED), COMPLETED])
def test_only_results_with_a_reward_say_how_long_an_attempt_takes(outcome: Outcome) -> None:
    """A node without its sandbox fails at once; it is not fast."""
    world = World()
    world.incarnate()
    world.publish()
    node_id = world.join("a")
    world.load(node_id)
    [lease] = world.lease(node_id, 1)
    world.now += 5.0
    assert world.deliver(node_id, lease, outcome) == "stored"
    expected = 5.0 if outcome.has_reward else 0.0
    assert world.partition.nodes[node_id].mean_attempt_s == expected
