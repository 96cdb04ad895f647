# SPDX-License-Identifier: Apache-2.0
"""Pacing on levels: skips, rewinds and restarts neither stop the flow nor let too much work
start."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sim.world import FAILED, Settings, World

from penstock.dataflow.core.groups import ClosingKind, ClosingPolicy

SEEDS = int(os.environ.get("PENSTOCK_SIM_SEEDS", "60"))


def started(world: World) -> World:
    world.incarnate()
    world.publish()
    return world


def test_nothing_starts_before_a_first_version() -> None:
    world = World()
    world.settle()
    assert not world.coordinator.open
    started(world)
    assert len(world.coordinator.open) == world.budget


def test_ten_skipped_batches_do_not_stop_the_flow() -> None:
    world = started(World())
    node = world.join("n0")
    for _ in range(10):
        world.work(node)
        assert world.seal() is not None
        world.commit(skipped="nothing to learn")
        world.assert_conserved()
    assert world.consumer.lineage.number == 0
    world.work(node)
    assert world.seal() is not None, "the flow goes on after ten skips"


@given(
    groups_per_batch=st.integers(1, 6),
    max_staleness=st.integers(0, 4),
    batches=st.integers(1, 8),
    back=st.integers(0, 8),
    is_idle=st.booleans(),
)
@settings(max_examples=SEEDS, deadline=None)
def test_a_rewind_starts_no_more_than_there_is_room_for(
    groups_per_batch: int, max_staleness: int, batches: int, back: int, is_idle: bool
) -> None:
    world = started(World(Settings(groups_per_batch=groups_per_batch, max_staleness=max_staleness)))
    node = world.join("n0")
    for _ in range(batches):
        while world.seal() is None:
            world.work(node)
        world.commit()
        world.publish()
    if is_idle:  # nothing runs: a fork far back expires all that is ready
        world.work(node)
    cursor = max(0, batches - back)
    before = world.tables.scalar("SELECT count(*) FROM groups")
    world.incarnate(number=cursor, seq=cursor)
    world.crash()
    world.settle()
    world.publish()
    started_now = world.tables.scalar("SELECT count(*) FROM groups") - before
    issued, admitted, sealed = world.levels()
    assert not started_now or issued + admitted + sealed <= world.budget
    world.assert_conserved()
    for _ in range(batches + 3):  # the sealed batches come again, then new ones
        if world.consumer.lineage.seq == world.consumer.last_sealed:
            while world.seal() is None:
                assert world.work(node), "work must flow again"
        world.commit()
        world.publish()
    world.assert_conserved()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_histories_keep_every_law(seed: int) -> None:
    """Nodes that fail, vanish and return, a trainer that skips and rewinds, a service that
    crashes."""
    closing = [
        ClosingPolicy(kind=ClosingKind.COMPLETE),
        ClosingPolicy(kind=ClosingKind.SURVIVORS, min_survivors=2),
        ClosingPolicy(kind=ClosingKind.DROP),
    ][seed % 3]
    world = started(
        World(
            Settings(
                groups_per_batch=1 + seed % 4,
                max_staleness=seed % 3,
                closing=closing,
                admit=["all", "reward-spread"][seed % 2],
            ),
            seed,
        )
    )
    nodes = [world.join(f"n{i}", capacity=8) for i in range(3)]
    for node in nodes:
        world.load(node)
    for _ in range(150):
        one_event(world)
        world.assert_conserved()
    finish(world)


def one_event(world: World) -> None:
    rng = world.rng
    node = rng.choice(sorted(world.held))
    lineage = world.consumer.lineage
    grants = world.held[node]
    world.now += rng.random() * 3
    before, budget = len(world.coordinator.open), world.budget
    match rng.randrange(11):
        case 0:
            world.load(node)
        case 1 | 2:
            world.lease(node, rng.randrange(1, 8))
        case 3 | 4 | 5 if grants:
            grant = grants.pop(rng.randrange(len(grants)))
            outcome = {} if rng.random() < 0.8 else {"outcome": FAILED}
            world.deliver(node, grant, reward=rng.random(), **outcome)
        case 6:
            world.settle(world.partition.tick(world.now))
        case 7 if rng.random() < 0.3:
            world.join(node, capacity=8)
            world.load(node)
        case 8:
            if lineage.seq == world.consumer.last_sealed and world.seal() is None:
                return
            world.commit(skipped="bad luck" if rng.random() < 0.2 else "")
            world.publish()
        case 9 if rng.random() < 0.2:
            back = rng.randrange(0, lineage.number + 1)
            cursor = world.tables.scalar(
                "SELECT coalesce(max(seq), 0) FROM commits WHERE number = :n AND incarnation = :i",
                n=back,
                i=lineage.incarnation,
            )
            if cursor or back == 0:
                world.incarnate(number=back, seq=cursor)
                world.publish()
        case 10 if rng.random() < 0.3:
            world.crash()
            world.settle()
        case _:
            world.heartbeat(node)
    if len(world.coordinator.open) > before and world.consumer.expected_yield == 1.0:
        assert sum(world.levels()) <= budget, "more work started than the bound has room for"


def finish(world: World) -> None:
    """Once faults stop, training goes on."""
    number = world.consumer.lineage.number
    node = world.join("last")
    for _ in range(200):
        world.now += 13.0  # whoever fell silent loses its leases
        world.settle(world.partition.tick(world.now))
        world.load(node)
        for grant in world.lease(node):
            world.deliver(node, grant, reward=world.rng.random())
        if world.consumer.lineage.seq == world.consumer.last_sealed and world.seal() is None:
            continue
        world.commit()
        world.publish()
        world.assert_conserved()
        if world.consumer.lineage.number >= number + 3:
            return
    raise AssertionError(f"no progress: levels {world.levels()}")


def test_a_source_that_ends_seals_its_short_remainder_and_ends() -> None:
    world = started(World(Settings(limit=6, groups_per_batch=4)))
    node = world.join("n0")
    sizes: list[int] = []
    for _ in range(10):
        world.work(node)
        if world.seal() is None:
            break
        sizes.append(world.consumer.sealed[world.consumer.last_sealed])
        world.commit()
        world.publish()
    assert sizes == [4, 2]
    assert world.coordinator.has_ended(world.consumer) and world.coordinator.is_finished


def test_the_last_steps_start_no_work_they_cannot_use() -> None:
    world = started(World(Settings(steps=3, max_staleness=4, groups_per_batch=2)))
    node = world.join("n0")
    for _ in range(3):
        world.work(node)
        assert world.seal()
        world.commit()
        world.publish()
    assert world.coordinator.is_finished
    assert world.tables.scalar("SELECT count(*) FROM groups") == 6
