# SPDX-License-Identifier: Apache-2.0
"""What a live process believes, compared with what its records say, and with what its next life
believes.

Looks into the machines' own fields: that is its purpose.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.sim.invariants import Invariants
from tests.sim.processes import CoordinatorProcess, PartitionProcess, SimProcess
from tests.sim.slot_invariants import require

from penstock.dataflow.core.consumers import Consumer
from penstock.dataflow.core.groups import SlotState
from penstock.dataflow.core.partition import Partition
from penstock.dataflow.records import BatchRecord, FreedRecord, GroupRecord
from penstock.types import NodeId

Facts = dict[str, Any]


def private(thing: object, name: str) -> Any:
    return getattr(thing, name)


def check(laws: Invariants, machine: SimProcess) -> None:
    """After each event at a process with nothing in flight to its disk."""
    if machine.host is not None:
        check_partition(laws, machine, machine.host.partition)
    if isinstance(machine, CoordinatorProcess):
        for consumer in machine.coordinator.consumers.values():
            check_consumer(laws, machine, consumer)


def check_consumer(laws: Invariants, machine: CoordinatorProcess, consumer: Consumer) -> None:
    """Levels equal a recount."""
    policy, branch = consumer.terms.policy, laws.branches[consumer.terms.policy]
    lineage = consumer.lineage
    require(
        (lineage.incarnation, lineage.number, lineage.seq)
        == (len(branch.forks) - 1, branch.number, branch.seq),
        f"{policy}: memory and records disagree on the lineage",
    )
    issued = sum(group_id not in laws.judged[policy] for group_id in laws.open_issued)
    require(consumer.num_undecided == issued, f"{policy}: {consumer.num_undecided} is not {issued}")
    held = {*consumer.ready, *consumer.incomplete}
    require(held == laws.admitted[policy].keys(), f"{policy}: admitted groups differ")
    sealed = {
        seq: batch.num_groups - batch.num_replayed
        for seq in range(branch.seq + 1, branch.last_sealed + 1)
        if (batch := machine.disk.of(BatchRecord).get((policy, seq))) is not None
    }
    if parts := laws.instalments.get((policy, branch.last_sealed + 1)):
        sealed[branch.last_sealed + 1] = sum(part.num_groups for part in parts)
    require(consumer.sealed == sealed, f"{policy}: sealed {consumer.sealed}, recount {sealed}")
    for group in consumer.ready.values():
        oldest = min(branch.effective_number(*version) for version in group.versions)
        require(consumer.oldest(group) == oldest, f"{group.group_id}: age differs for {policy}")


def check_room(machine: CoordinatorProcess, num_open: int) -> None:
    """Work that started just now had room: without the last of it there still is some."""
    coordinator = machine.coordinator
    if len(coordinator.open) <= num_open:
        return
    rooms: dict[str, bool] = {}
    for policy, consumer in coordinator.consumers.items():
        terms, levels = consumer.terms, consumer.levels()
        fresh = terms.groups_per_batch - consumer.num_replayable
        load = levels.admitted + levels.sealed + consumer.expected_yield * (levels.issued - 1)
        left = (terms.steps - consumer.lineage.number) * terms.groups_per_batch
        if left > 0:  # a policy that is done has no say
            rooms[policy] = load < min((terms.max_staleness + 1) * fresh, left)
    pace = machine.plan.pace
    enough = all(rooms.values()) if pace == "all" else any(rooms.values())
    enough = rooms.get(pace, enough)
    require(enough, f"a group started without room for it (pace {pace})")


def check_partition(laws: Invariants, machine: SimProcess, partition: Partition) -> None:
    """Every slot is in one state, every lease has one holder, every waiting slot can be found."""
    held: Counter[tuple[NodeId, str]] = Counter()
    num_waiting = 0
    queue = {one for queue in private(partition.waiting, "_queues").values() for one in queue}
    for group_id, group in partition.groups.items():
        stored = machine.disk.of(GroupRecord).get((group_id,))
        require(stored is not None and stored.state == "open", f"{group_id} is open in memory only")
        states = Counter(slot.state for slot in group.known_slots.values())
        fresh = group.record.num_slots - group.next_fresh
        waiting = group.num_waiting
        num_waiting += waiting
        require(states[SlotState.WAITING] == len(group.retry_slots), f"{group_id}: waiting slots")
        require(sum(states.values()) == group.next_fresh, f"{group_id}: untouched slots")
        require(
            len(set(group.retry_slots)) == len(group.retry_slots), f"{group_id}: a slot waits twice"
        )
        require(fresh >= 0 and not states[SlotState.TRUNCATED], f"{group_id}: cut and still open")
        require(not waiting or group_id in queue, f"{group_id} waits where nobody looks")
        require(
            waiting + states[SlotState.LEASED] > 0, f"{group_id} is open and nothing can end it"
        )
        for index, slot in group.running():
            grant = slot.grant
            require(grant is not None and index in grant.slots, f"{group_id}.{index}: its grant")
            if grant is not None:
                held[grant.node_id, grant.request_id] += 1
                named = partition.nodes[grant.node_id].granted[grant.request_id].grants
                require(grant in named, f"{group_id}.{index}: its node does not know it")
            running = laws.running.get((group_id, index))
            same = running is not None and running.epoch == slot.epoch
            require(same, f"{group_id}.{index}: memory and records disagree on its lease")
    require(
        partition.waiting.num_slots == num_waiting,
        f"{partition.waiting.num_slots} wait, not {num_waiting}",
    )
    by_nodes: Counter[tuple[NodeId, str]] = Counter()
    for node_id, node in partition.nodes.items():
        left = {(node_id, request): held.num_running for request, held in node.granted.items()}
        require(sum(left.values()) == node.num_leases, f"{node_id}: requests and leases")
        require(all(left.values()), f"{node_id}: a request of which nothing runs is remembered")
        by_nodes.update(left)
    require(by_nodes == held, "leases of slots and of nodes differ")


# --- the next life ----------------------------------------------------------------------------


def facts(machine: SimProcess) -> Facts:
    """What must survive a restart."""
    found: Facts = {}
    if isinstance(machine, CoordinatorProcess):
        found |= _coordinator_facts(machine)
    if isinstance(machine, PartitionProcess):
        found["link"] = machine.link.num_received
        found["unacknowledged"] = machine.link.unacknowledged(0)
    if machine.host is not None:
        found |= _partition_facts(machine.host.partition)
        completion = machine.host.completion
        if completion.is_needed:
            found |= _completion_facts(completion, machine.host.partition)
    return found


def _coordinator_facts(machine: CoordinatorProcess) -> Facts:
    coordinator = machine.coordinator
    found: Facts = {
        "shards": dict(coordinator.partition_states),
        "open": {
            group_id: coordinator.undecided(record) for group_id, record in coordinator.open.items()
        },
        "open at": {index: set(groups) for index, groups in coordinator.open_by_partition.items()},
        "served": dict(private(coordinator.supply, "_served")),
        "issued": private(coordinator, "_num_issued"),
        "waste": {reason: n for reason, n in coordinator.waste.tokens.items() if n},
        "links": {
            index: (link.num_received, link.unacknowledged(0))
            for index, link in machine.router.links.items()
        },
        "freed": {record.group_id for record in machine.disk.of(FreedRecord).values()},
        "rules": {
            bound.terms.id: dict(bound.memory) for bound in private(coordinator.rules, "_all")
        },
    }
    for policy, consumer in coordinator.consumers.items():
        lineage, pins = consumer.lineage, private(coordinator.retention, "_holds")[policy]
        for name in ("ready", "incomplete", "pool"):
            groups = private(consumer, name)
            found[f"{policy} {name}"] = {
                g.group_id: (g.arrival, g.uses, g.seq, g.tokens, g.versions)
                for g in groups.values()
            }
        found[f"{policy} sealed"] = (consumer.last_sealed, dict(consumer.sealed))
        found[f"{policy} levels"] = consumer.levels()
        found[f"{policy} arrived"] = consumer.num_arrived
        found[f"{policy} yield"] = consumer.expected_yield
        found[f"{policy} replayable"] = consumer.num_replayable
        found[f"{policy} pins"] = (
            {group: seq for seq, groups in pins.batches.items() for group in groups},
            set(pins.pool),
            pins.floor,
        )
        found[f"{policy} lineage"] = [
            private(lineage, name)
            for name in ("incarnation", "number", "seq", "_shared_until", "_path")
        ]
        found[f"{policy} newest"] = lineage.newest
    return found


def _partition_facts(partition: Partition) -> Facts:
    return {
        "groups": {
            group_id: (
                group.rows,
                sorted(group.retry_slots),
                group.next_fresh,
                {
                    index: (slot.state, slot.attempt, slot.epoch, slot.grant)
                    for index, slot in group.known_slots.items()
                },
            )
            for group_id, group in partition.groups.items()
        },
        "waiting": partition.waiting.num_slots,
        "nodes": {
            node_id: (node.record, {name: held.num_running for name, held in node.granted.items()})
            for node_id, node in partition.nodes.items()
        },
    }


def _completion_facts(completion: Any, partition: Partition) -> Facts:
    groups = {
        group_id: waiting
        for group_id, waiting in private(completion, "_groups").items()
        if any(stage != "done" for stage in waiting.stages.values())
    }
    completed = private(completion, "_completed")
    rows = {row.row_id for waiting in groups.values() for row in waiting.rows}
    rows |= {row.row_id for group in partition.groups.values() for row in group.rows}
    return {
        "stages": {
            group_id: {p: stage for p, stage in waiting.stages.items() if stage != "done"}
            for group_id, waiting in groups.items()
        },
        "landed": {
            row_id: dict(completed[row_id]) for row_id in sorted(rows) if row_id in completed
        },
    }


def has_open_transaction(machine: SimProcess) -> bool:
    """A start may end groups: on their last admissible version, or out of time."""
    return any(isinstance(record, GroupRecord) for record in private(machine.journal, "_records"))


def _compare_pins(before: Any, after: Any, freed: set[str], what: str) -> None:
    """A life that let go of a batch whose groups others still hold leaves no trace of that: the
    next one may hold it again, as long as nothing of it is freed."""
    batches, pool, floor = before
    now_batches, now_pool, now_floor = after
    told = f"{what} was {before}, is {after}"
    require(now_pool == pool and now_floor <= floor, told)
    require(batches.items() <= now_batches.items(), told)
    again = now_batches.keys() - batches.keys()
    require(not again & freed and (bool(again) or now_floor == floor), told)


def compare(before: Facts, after: Facts, who: str) -> None:
    for name, value in before.items():
        if name in ("links", "unacknowledged"):
            continue  # a start may say more; what was said stays, see below
        if name.endswith(" pins"):
            _compare_pins(value, after[name], after["freed"], f"{who} forgot: {name}")
            continue
        require(after[name] == value, f"{who} forgot: {name} was {value}, is {after[name]}")
    for index, (received, sent) in before.get("links", {}).items():
        again = after["links"][index]
        require(again[0] == received, f"{who} forgot what it received from {index}")
        require(again[1][: len(sent)] == sent, f"{who} forgot what it said to {index}")
    if "unacknowledged" in before:
        sent = before["unacknowledged"]
        require(after["unacknowledged"][: len(sent)] == sent, f"{who} forgot what it said")
