# SPDX-License-Identifier: Apache-2.0
"""Every way in which a flow with pacing can stop for ever, as a run that must not.

Each scenario is a small kind world that would stand still, or fill its disk, if the core made the
mistake in its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from tests.sim.events import Command
from tests.sim.plans import CLOSINGS, Faults, Plan
from tests.sim.processes import SimProcess
from tests.sim.simulation import Simulation
from tests.sim.world import Settings, World

from penstock.dataflow.core.groups import ClosingKind, ClosingPolicy
from penstock.dataflow.core.leasing import Grant, NodeState
from penstock.dataflow.records import (
    BatchRecord,
    CheckpointRecord,
    CompletionRecord,
    FateRecord,
    FreedRecord,
    GrantRecord,
    GroupRecord,
)
from penstock.types import PolicyName

ANNA, BERT = PolicyName("anna"), PolicyName("bert")
SMALL = Plan(seed=1, groups_per_batch=2, num_slots=2, num_nodes=4)


@pytest.fixture
def start_simulation() -> Iterator[Callable[[Plan], Simulation]]:
    simulations: list[Simulation] = []

    def begin(plan: Plan) -> Simulation:
        simulation = Simulation(plan)
        simulations.append(simulation)
        simulation.begin()
        return simulation

    yield begin
    for simulation in simulations:
        simulation.close()


Begin = Callable[[Plan], Simulation]


def trained(simulation: Simulation, batches: int, policy: PolicyName = ANNA) -> bool:
    """Does this policy commit so many within the time any of its timers may take?"""
    branch = simulation.laws.branches[policy]
    until = simulation.engine.now + 240.0
    simulation.advance(lambda: branch.seq >= batches or simulation.engine.now > until)
    return branch.seq >= batches


def reasons(simulation: Simulation, policy: PolicyName = ANNA) -> set[str]:
    fates = simulation.laws.disks["home"].of(FateRecord).values()
    return {fate.reason for fate in fates if fate.consumer == policy}


def test_declining_by_a_room_that_counts_running_work(start_simulation: Begin) -> None:
    """Room is full of running work nearly always: declining by it would decline everything."""
    simulation = start_simulation(replace(SMALL, num_policies=2, max_staleness=2))
    assert trained(simulation, 6)
    assert trained(simulation, 6, BERT)
    assert "outpaced" not in reasons(simulation)


def test_a_policy_behind_declines_and_the_other_goes_on(start_simulation: Begin) -> None:
    simulation = start_simulation(replace(SMALL, num_policies=2))
    assert trained(simulation, 1, BERT)
    simulation.trainers[1].crash()
    assert trained(simulation, 10)
    assert "outpaced" in reasons(simulation, BERT)
    simulation.trainers[1].start()
    assert trained(simulation, simulation.laws.branches[BERT].seq + 3, BERT)


def test_slots_rounded_down(start_simulation: Begin) -> None:
    """A budget of one group of eight slots, and one node that runs one slot at a time."""
    plan = replace(SMALL, groups_per_batch=1, max_staleness=0, num_slots=8, num_nodes=1, capacity=1)
    assert trained(start_simulation(plan), 2)


def test_gating_single_slots_instead_of_groups(start_simulation: Begin) -> None:
    """Once a group runs, room has no say in its other slots."""
    plan = replace(SMALL, groups_per_batch=1, max_staleness=0, num_slots=6, num_nodes=2, capacity=1)
    simulation = start_simulation(plan)
    assert trained(simulation, 2)
    ended = [
        group
        for disk in simulation.laws.disks.values()
        for group in disk.of(GroupRecord).values()
        if group.state == "closed"
    ]
    leased = {
        (grant.group_id, slot)
        for disk in simulation.laws.disks.values()
        for grant in disk.of(GrantRecord).values()
        for slot in grant.slots
    }
    assert all((group.group_id, slot) in leased for group in ended for slot in range(6))


def test_staleness_judged_only_at_sealing() -> None:
    """What a fork made stale leaves at once: nobody has to ask for a batch first."""
    world = World(Settings(groups_per_batch=2, max_staleness=0))
    world.incarnate()
    world.publish()
    node = world.join("n0")
    for _ in range(3):
        while world.seal() is None:
            world.work(node)
        world.commit()
        world.publish()
    world.work(node)
    assert len(world.consumer.ready) == 2
    world.incarnate(number=2, seq=2)
    assert not world.consumer.ready
    world.assert_conserved()
    world.publish()
    world.commit()
    world.publish()
    assert world.coordinator.open, "their room is given to others"


def test_a_failed_column_after_admission(start_simulation: Begin) -> None:
    simulation = start_simulation(replace(SMALL, train=True, faults=Faults(column_failed=0.3)))
    assert trained(simulation, 5)
    assert "column_failed" in reasons(simulation)


def test_a_dead_scorer_does_not_raise_the_issue_rate(start_simulation: Begin) -> None:
    simulation = start_simulation(replace(SMALL, train=True, faults=Faults(column_failed=1.0)))
    simulation.advance(lambda: simulation.engine.now > 60.0)
    consumer = simulation.coordinator.coordinator.consumers[ANNA]
    assert consumer.expected_yield == 1.0
    assert reasons(simulation) <= {"", "column_failed", "stale"}
    simulation.plan.__dict__["faults"] = Faults()  # it comes back
    assert trained(simulation, 3)


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_replay_share_without_eligible_rows(start_simulation: Begin, max_staleness: int) -> None:
    """At bound 0 nothing that was served may be served again: all of a batch must be fresh."""
    plan = replace(SMALL, groups_per_batch=4, replay=0.5, max_staleness=max_staleness)
    simulation = start_simulation(plan)
    assert trained(simulation, 6)
    batches = simulation.laws.disks["home"].of(BatchRecord).values()
    assert any(batch.num_replayed for batch in batches) == (max_staleness > 0)


@pytest.mark.parametrize("closing", CLOSINGS, ids=lambda c: f"{c.kind}-{c.min_survivors}")
def test_groups_dropped_without_a_report(start_simulation: Begin, closing: ClosingPolicy) -> None:
    plan = replace(SMALL, closing=closing, faults=Faults(failed=0.4))
    if closing.kind is ClosingKind.DROP:
        plan = replace(plan, faults=Faults(failed=0.2))
    simulation = start_simulation(plan)
    assert trained(simulation, 4)
    simulation.laws.check_conservation()
    if closing.kind is ClosingKind.DROP:
        assert "failed_slots" in reasons(simulation)


def test_a_lost_offer(start_simulation: Begin) -> None:
    """Every third call, answer and message is lost; what is not repeated stops the flow."""
    simulation = start_simulation(replace(SMALL, has_partition=False, num_partitions=2))
    simulation.network.loss = 0.33
    assert trained(simulation, 4)


def test_fates_not_returned_to_partitions(start_simulation: Begin) -> None:
    """What nobody needs any more is freed where it lies, and leaves the partition's memory."""
    plan = replace(SMALL, has_partition=False, num_partitions=2, judge=True, retain_batches=1)
    simulation = start_simulation(replace(plan, names_checkpoints=False))
    assert trained(simulation, 8)
    laws = simulation.laws
    freed = set(laws.disks["home"].of(FreedRecord))
    assert len(freed) >= 8
    until = simulation.engine.now + 5.0
    simulation.advance(lambda: simulation.engine.now > until)
    for name in ("p1", "p2"):
        disk = laws.disks[name]
        mine = {(group,) for (group,) in freed if str(group).startswith(f"{name}-")}
        assert mine and mine <= disk.of(FreedRecord).keys()
        assert not {(group,) for group, _ in disk.of(CompletionRecord)} & mine


def test_checkpoints_too_rare_for_the_disk_mark(start_simulation: Begin) -> None:
    """While a trainer names only its first checkpoint everything is kept; the next name frees."""
    simulation = start_simulation(replace(SMALL, retain_batches=1))
    coordinator, engine = simulation.coordinator, simulation.engine
    trainer = simulation.trainers[0]
    trainer.saves = False
    assert trained(simulation, 6)
    laws = simulation.laws
    sealed = [*laws.in_batches[ANNA]]
    assert not any((group,) in laws.disks["home"].of(FreedRecord) for group in sealed)
    trainer.saves = True
    assert trained(simulation, 14)
    engine.note(f"{len(coordinator.disk.of(CheckpointRecord))} checkpoint records")
    freed = sum((group,) in laws.disks["home"].of(FreedRecord) for group in sealed)
    assert freed == len(sealed)


def test_a_trainer_that_never_names_checkpoints(start_simulation: Begin) -> None:
    """Only the last batches are kept, so payload does not grow with the run."""
    simulation = start_simulation(replace(SMALL, retain_batches=2, names_checkpoints=False))
    assert trained(simulation, 12)
    laws = simulation.laws
    simulation.advance(lambda: simulation.coordinator.disk.is_quiet)
    freed = laws.disks["home"].of(FreedRecord)
    kept = [group for group in laws.in_batches[ANNA] if (group,) not in freed]
    last, floor = laws.branches[ANNA].last_sealed, laws.branches[ANNA].floor
    assert len(kept) <= (last - floor) * SMALL.groups_per_batch
    assert last - floor <= 2 + 1 + SMALL.max_staleness


def test_a_policy_that_is_done_holds_no_other_back(start_simulation: Begin) -> None:
    for pace in ("all", "anna"):
        plan = replace(SMALL, num_policies=2, pace=pace, steps=4, faults=Faults(skipped=0.3))
        simulation = start_simulation(plan)
        simulation.advance(
            lambda s=simulation: s.coordinator.coordinator.is_finished or s.engine.now > 400.0
        )
        assert simulation.coordinator.coordinator.is_finished, f"pace {pace}"


def test_a_partition_whose_clock_is_behind_home_still_closes_groups(
    start_simulation: Begin,
) -> None:
    """Limits of a group count from when its partition got it, by the partition's own clock."""
    lease = replace(SMALL.lease, schedule_to_close_s=40.0)
    plan = replace(SMALL, has_partition=False, lease=lease, num_nodes=1)
    simulation = Simulation(plan)
    simulation.coordinator.skew_s = 86_400.0
    simulation.begin()
    try:
        simulation.advance(lambda: bool(simulation.laws.running))
        simulation.nodes[0].pause(10**6)
        until = simulation.engine.now + 45.0
        simulation.advance(lambda: simulation.engine.now > until)
        opened = simulation.laws.disks["p1"].of(GroupRecord).values()
        assert any(group.state != "open" for group in opened), "nothing ran out of time"
    finally:
        simulation.close()


def test_a_clock_that_jumps_between_a_call_and_the_tick(start_simulation: Begin) -> None:
    """A node that is heard after the jump and then dies must not be believed alive for a day."""
    simulation = start_simulation(replace(SMALL, num_nodes=2, has_partition=False))
    partition, node = simulation.machines[1], simulation.nodes[0]
    simulation.advance(lambda: bool(node.held))
    partition.skew_s += 86_400.0
    assert partition.host is not None
    machine = partition.host.partition
    machine.heartbeat(node.name, node.boot_id, partition.clock, state=NodeState.LIVE, live=())
    node.is_dead = True
    node.stop()
    until = simulation.engine.now + SMALL.lease.ttl_s + 3.0
    simulation.advance(lambda: simulation.engine.now > until)
    assert not machine.nodes[node.name].num_leases, "its leases are free within a ttl"
    assert trained(simulation, simulation.laws.branches[ANNA].seq + 2)


def test_a_lease_nobody_heard_of_between_a_jump_and_the_tick(start_simulation: Begin) -> None:
    """Its node beats on; only the limit of the attempt can free it, and that is no day away."""
    plan = replace(SMALL, num_nodes=2, has_partition=False, capacity=1, max_staleness=50)
    simulation = start_simulation(plan)
    partition, node = simulation.machines[1], simulation.nodes[0]
    assert trained(simulation, 1)
    lost: list[Grant] = []

    def lease(machine: SimProcess, now: float) -> None:
        assert machine.host is not None
        found = machine.host.partition
        live = found.nodes[node.name].live
        found.ask(node.name, node.boot_id, "lost", now)
        lost.extend(found.lease(node.name, node.boot_id, "lost", 1, live, now))

    def look() -> bool:
        assert partition.host is not None
        found = partition.host.partition
        return bool(found.waiting.num_slots) and not found.nodes[node.name].num_leases

    simulation.advance(look)
    partition.skew_s += 86_400.0
    partition.handle("a lease whose answer is lost", Command(run=lease), lambda answer: None)
    [grant] = lost
    limits = SMALL.lease
    until = simulation.engine.now + limits.start_to_close_s + limits.ttl_s + 3.0
    simulation.advance(lambda: simulation.engine.now > until)
    running = simulation.laws.running.get((grant.group_id, grant.slot))
    assert running is None or running.epoch > grant.epoch
