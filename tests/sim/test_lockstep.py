# SPDX-License-Identifier: Apache-2.0
"""Lockstep under losses: a batch of which nothing is left is sealed empty and skipped, and the flow
goes on in the order of issue."""

from __future__ import annotations

import pytest
from tests.sim.world import COMPLETED, FAILED, Settings, World

from penstock.dataflow.core.groups import ClosingKind, ClosingPolicy
from penstock.dataflow.core.ids import issue_number

DROP = ClosingPolicy(kind=ClosingKind.DROP)
"""One failed member ends its group."""


def started(*, max_staleness: int, limit: int | None = None, steps: int = 1_000_000) -> World:
    world = World(
        Settings(
            is_lockstep=True,
            groups_per_batch=2,
            max_staleness=max_staleness,
            closing=DROP,
            limit=limit,
            steps=steps,
        )
    )
    world.incarnate()
    world.publish()
    return world


def work(world: World, failing: range) -> None:
    """One node does all that it may; groups issued in `failing` fail."""
    node = next(iter(world.held), None) or world.join("n0")
    world.load(node)
    for grant in world.lease(node):
        outcome = FAILED if issue_number(grant.group_id) in failing else COMPLETED
        world.deliver(node, grant, outcome)


def batch(world: World, failing: range) -> list[int] | None:
    """Issues of the groups of the next batch, which is then committed; None: there is none yet."""
    for _ in range(10):
        work(world, failing)
        if world.seal() is not None:
            break
    else:
        return None
    record = world.consumer.newest_batch
    assert record is not None and record.num_groups == world.consumer.sealed[record.seq]
    issues = [
        int(issue)
        for (issue,) in world.tables.rows(
            "SELECT g.issue FROM fates f JOIN groups g ON g.group_id = f.group_id "
            "WHERE f.state = 'sealed' AND f.seq = :seq ORDER BY g.issue",
            seq=record.seq,
        )
    ]
    world.commit(skipped="" if issues else "no_tokens")
    if issues:
        world.publish()
    world.assert_conserved()
    return issues


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_a_batch_that_failed_as_a_whole_is_empty_and_the_next_one_comes(max_staleness: int) -> None:
    world = started(max_staleness=max_staleness)
    batches = [batch(world, failing=range(3, 8)) for _ in range(6)]
    assert batches == [[1, 2], [], [], [8], [9, 10], [11, 12]]
    assert (world.consumer.lineage.seq, world.consumer.lineage.number) == (6, 4)


def test_an_empty_batch_waits_until_each_of_its_groups_has_ended() -> None:
    world = started(max_staleness=0)
    node = world.join("n0")
    world.load(node)
    first, *others = world.lease(node)
    for grant in others:
        if grant.group_id != first.group_id:
            world.deliver(node, grant, FAILED)
    assert world.seal() is None, "the first group is still open"
    world.deliver(node, first, FAILED)
    assert world.seal() == 1


def test_an_empty_batch_outlives_a_crash() -> None:
    world = started(max_staleness=0)
    work(world, failing=range(1, 3))
    assert world.seal() == 1
    world.crash()
    assert world.consumer.last_sealed == 1
    world.commit(skipped="no_tokens")
    assert batch(world, failing=range(0)) == [3, 4]


def test_a_source_that_ends_makes_no_empty_batch() -> None:
    world = started(max_staleness=0, limit=4)
    assert [batch(world, failing=range(3, 5)) for _ in range(2)] == [[1, 2], None]
    assert world.coordinator.has_ended(world.consumer) and world.coordinator.is_finished
