# SPDX-License-Identifier: Apache-2.0
"""Leases: granted once, ended once, fenced by epoch."""

from __future__ import annotations

import pytest
from tests.sim.world import FAILED, Settings, World

from penstock.dataflow.core.groups import ClosingKind, ClosingPolicy
from penstock.dataflow.core.leasing import RegisterRequest
from penstock.errors import Fenced, NotFound
from penstock.types import NodeId


def ready_world(settings: Settings | None = None) -> World:
    world = World(settings)
    world.incarnate()
    world.publish()
    for name in ("a", "b"):
        world.load(world.join(name))
    return world


def test_a_result_under_an_old_epoch_changes_nothing() -> None:
    world = ready_world()
    a, b = world.held
    [late] = world.lease(a, 1)
    world.now += 20
    world.heartbeat(b)
    world.settle(world.partition.tick(world.now))
    [again] = world.lease(b, 1)
    assert (again.group_id, again.slot) == (late.group_id, late.slot)
    assert again.epoch == late.epoch + 1 and again.attempt == 2 and again.seed == late.seed
    assert world.deliver(a, late) == "fenced"
    assert world.deliver(b, again) == "stored"
    assert world.tables.scalar("SELECT count(*) FROM rows") == 1


def test_a_node_cannot_answer_its_own_older_lease() -> None:
    world = ready_world()
    a, _ = world.held
    [late] = world.lease(a, 1)
    world.now += 20
    world.settle(world.partition.tick(world.now))
    world.heartbeat(a)
    [again] = world.lease(a, 1)
    assert (again.group_id, again.slot) == (late.group_id, late.slot)
    assert world.deliver(a, late) == "fenced"
    assert world.deliver(a, again) == "stored"


def test_a_repeated_request_gets_the_same_grants() -> None:
    world = ready_world()
    [a, _] = world.held

    def ask(request_id: str) -> list[tuple[str, int, int]]:
        world.partition.ask(a, world.boot_id(a), request_id, world.now)
        grants = world.partition.lease(
            a, world.boot_id(a), request_id, 3, (world.live[a],), world.now
        )
        return [(g.group_id, g.slot, g.epoch) for g in grants]

    first = ask("r1")
    assert len(first) == 3 and ask("r1") == first
    world.settle()
    world.crash()
    assert ask("r1") == first, "also after a restart of the service"
    second = ask("r2")
    assert second and not set(second) & set(first)
    assert ask("r1") == first and ask("r2") == second, "requests may arrive again, in any order"
    world.settle()
    world.crash()
    assert ask("r2") == second and ask("r1") == first


def test_a_heartbeat_renews_every_lease_and_silence_ends_them() -> None:
    world = ready_world()
    a, _ = world.held
    grants = world.lease(a, 5)
    for _ in range(10):
        world.now += 6
        world.heartbeat(a)
        world.settle(world.partition.tick(world.now))
    assert all(world.partition.holds(a, g.group_id, g.slot, g.epoch) for g in grants)
    world.now += 12.1
    world.settle(world.partition.tick(world.now))
    assert not any(world.partition.holds(a, g.group_id, g.slot, g.epoch) for g in grants)


def test_a_restart_gives_every_live_lease_a_full_ttl() -> None:
    world = ready_world()
    a, _ = world.held
    [grant] = world.lease(a, 1)
    world.now += 11.9
    world.crash()
    world.now += 11.9
    world.settle(world.partition.tick(world.now))
    assert world.partition.holds(a, grant.group_id, grant.slot, grant.epoch)
    assert world.deliver(a, grant) == "stored"


def test_a_stall_of_the_service_is_nobodys_silence() -> None:
    world = ready_world()
    a, _ = world.held
    [grant] = world.lease(a, 1)
    world.now += 700
    world.partition.extend_deadlines(700)
    world.settle(world.partition.tick(world.now))
    assert world.partition.holds(a, grant.group_id, grant.slot, grant.epoch)
    world.now += 13
    world.settle(world.partition.tick(world.now))
    assert not world.partition.holds(a, grant.group_id, grant.slot, grant.epoch)


def test_a_new_life_of_a_node_frees_what_the_old_one_held() -> None:
    world = ready_world()
    a, b = world.held
    [grant] = world.lease(a, 1)
    world.join(a)
    [taken] = world.lease(b, 1)
    assert (taken.group_id, taken.slot) == (grant.group_id, grant.slot)


def test_the_old_life_is_fenced_and_a_stranger_is_not_found() -> None:
    world = ready_world()
    a, _ = world.held
    old = world.boot_id(a)
    world.join(a)
    with pytest.raises(Fenced):
        world.partition.ask(a, old, "r", world.now)
    with pytest.raises(Fenced):  # its late duplicate must not fence the living
        again = RegisterRequest(node_id=a, boot_id=old, capacity=1, policies=())
        world.partition.register(again, world.now)
    with pytest.raises(NotFound):
        world.partition.leave(NodeId("nobody"), "s", world.now)


def test_registering_twice_under_one_session_keeps_the_leases() -> None:
    world = ready_world()
    a, _ = world.held
    [grant] = world.lease(a, 1)
    body = RegisterRequest(node_id=a, boot_id=world.boot_id(a), capacity=9, policies=())
    world.settle(world.partition.register(body, world.now))
    assert world.partition.holds(a, grant.group_id, grant.slot, grant.epoch)


def test_leaving_hands_back_without_costing_an_attempt() -> None:
    world = ready_world()
    a, b = world.held
    [grant] = world.lease(a, 1)
    world.settle(world.partition.leave(a, world.boot_id(a), world.now))
    [again] = world.lease(b, 1)
    assert (again.group_id, again.slot, again.attempt) == (grant.group_id, grant.slot, 1)


def test_attempts_that_overrun_are_taken_away() -> None:
    """All that were granted together, but for the one that has its result."""
    world = ready_world(Settings(num_slots=3))
    a, _ = world.held
    done, *late = world.lease(a, 3)
    assert {grant.group_id for grant in late} == {done.group_id}
    assert world.deliver(a, done) == "stored"
    for _ in range(62):
        world.now += 10
        world.heartbeat(a)
        world.settle(world.partition.tick(world.now))
    for grant in late:
        assert not world.partition.holds(a, grant.group_id, grant.slot, grant.epoch)
    ends = world.tables.rows("SELECT slot, ended FROM leases ORDER BY slot")
    assert ends == [(1, "expired"), (2, "expired")]


def test_every_slot_has_a_seed_of_its_own_however_it_was_granted() -> None:
    seeds: list[list[int]] = []
    for at_once in (6, 1, 4):
        world = ready_world(Settings(num_slots=3))
        grants = [grant for _ in range(6) for grant in world.lease(NodeId("a"), at_once)][:6]
        assert [grant.slot for grant in grants] == [0, 1, 2, 0, 1, 2]
        seeds.append([grant.seed for grant in grants])
    assert seeds[0] == seeds[1] == seeds[2]
    assert len(set(seeds[0])) == 6 and all(0 <= seed < 1 << 63 for seed in seeds[0])


def test_slots_granted_together_are_one_record() -> None:
    world = ready_world(Settings(num_slots=3))
    world.lease(NodeId("a"), 5)
    grants = world.tables.rows("SELECT slot, num_slots, epoch FROM grants ORDER BY group_id")
    assert grants == [(0, 3, 1), (0, 2, 1)]
    assert not world.tables.rows("SELECT * FROM leases"), "none has ended"


@pytest.mark.parametrize(
    ("closing", "failures", "verdict"),
    [
        (ClosingPolicy(kind=ClosingKind.COMPLETE), 2, "closed"),
        (ClosingPolicy(kind=ClosingKind.COMPLETE), 3, "dropped"),
        (ClosingPolicy(kind=ClosingKind.DROP), 1, "dropped"),
        (ClosingPolicy(kind=ClosingKind.SURVIVORS, min_survivors=2), 3, "closed"),
        (ClosingPolicy(kind=ClosingKind.SURVIVORS, min_survivors=3), 3, "dropped"),
    ],
)
def test_closing_policies(closing: ClosingPolicy, failures: int, verdict: str) -> None:
    """One slot of three fails this often; failure is never a reward."""
    world = ready_world(Settings(closing=closing, num_slots=3))
    a, _ = world.held
    grants = world.lease(a, 3)
    group_id = grants[0].group_id
    for grant in grants[1:]:
        world.deliver(a, grant)
    grant = grants[0]
    for _ in range(failures):
        assert world.deliver(a, grant, FAILED) == "stored"
        if (
            world.tables.scalar("SELECT state FROM groups WHERE group_id = :g", g=group_id)
            != "open"
        ):
            break
        [grant] = world.lease(a, 1)
    else:
        world.deliver(a, grant)
    state = world.tables.scalar("SELECT state FROM groups WHERE group_id = :g", g=group_id)
    assert state == verdict
    world.assert_conserved()
    if verdict == "closed" and closing.kind is ClosingKind.SURVIVORS:
        assert len(world.consumer.ready[group_id].rows) == 2


def test_a_node_with_an_old_version_gets_no_work_it_would_waste() -> None:
    world = ready_world(Settings(max_staleness=1, groups_per_batch=4))
    a, b = world.held
    while world.lease(a):
        for grant in world.held[a]:
            world.deliver(a, grant)
        world.held[a] = []
    assert world.seal()
    world.commit()
    assert not world.lease(b), "version 1 is committed and not yet published"
    world.publish()
    assert not world.lease(b), "b still serves version 0"
    world.load(b)
    assert world.lease(b)
