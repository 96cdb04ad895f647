# SPDX-License-Identifier: Apache-2.0
"""Many policies in one run: each gets its share, and none waits for another."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from tests.sim.virtual_policies import PolicyWorld, Pool, Setup

from penstock.dataflow.core.manifests import ManifestCache
from penstock.dataflow.explain.starvation import unserved
from penstock.dataflow.records import BatchRecord
from penstock.types import PolicyName, RowSummary

A, B, JUDGE = PolicyName("a"), PolicyName("b"), PolicyName("judge")
APART = {"left": (A,), "right": (B,)}


def _unserved(world: PolicyWorld) -> dict[str, frozenset[PolicyName]]:
    partition = world.run.partition
    return partition.waiting.unserved_sources(partition.nodes.values())


@pytest.mark.parametrize(("nodes", "batches"), [((9, 3), (64, 64)), ((9, 3), (256, 128))])
def test_pools_and_batches_give_each_policy_its_arithmetic_share(
    nodes: tuple[int, int], batches: tuple[int, int]
) -> None:
    """Nodes are the bottleneck: groups come by nodes, steps by groups per batch."""
    setup = Setup(
        batches=dict(zip((A, B), batches, strict=True)),
        pools=[Pool(num_nodes=n, policies=(p,)) for n, p in zip(nodes, (A, B), strict=True)],
        sources=APART,
    )
    world = PolicyWorld(setup)
    world.advance(60.0)
    since = world.run.now
    world.advance(400.0)
    steps = {policy: world.step_rate(policy, since) for policy in (A, B)}
    groups = {policy: steps[policy] * size for policy, size in setup.batches.items()}
    assert groups[A] / groups[B] == pytest.approx(nodes[0] / nodes[1], rel=0.1)
    share = nodes[0] * batches[1] / (nodes[1] * batches[0])
    assert steps[A] / steps[B] == pytest.approx(share, rel=0.1)
    assert not {fate.reason for fate in world.run.tally.fates.values()} & {"absent", "outpaced"}


def test_policies_of_one_workflow_step_by_their_batch_sizes() -> None:
    """Every group is for both: the smaller batch is full twice as often."""
    world = PolicyWorld(Setup(batches={A: 256, B: 128}, pools=[Pool(num_nodes=12)]))
    world.advance(60.0)
    since = world.run.now
    world.advance(400.0)
    ratio = world.step_rate(B, since) / world.step_rate(A, since)
    assert ratio == pytest.approx(2.0, rel=0.1)


def test_eight_policies_train_at_once_and_none_starves() -> None:
    """Pairs share a source and a pool; pools differ in size and so do the steps."""
    names = [PolicyName(f"p{n}") for n in range(8)]
    pairs = [tuple(names[n : n + 2]) for n in range(0, 8, 2)]
    nodes = [1, 2, 3, 4]
    world = PolicyWorld(
        Setup(
            batches=dict.fromkeys(names, 32),
            pools=[Pool(num_nodes=n, policies=p) for n, p in zip(nodes, pairs, strict=True)],
            sources={f"s{n}": pair for n, pair in enumerate(pairs)},
        )
    )
    world.advance(60.0)
    since = world.run.now
    world.advance(300.0)
    total = sum(world.step_rate(policy, since) for policy in names)
    for num_nodes, pair in zip(nodes, pairs, strict=True):
        for policy in pair:
            share = world.step_rate(policy, since) / total
            assert share == pytest.approx(num_nodes / sum(nodes) / 2, rel=0.1), policy


@pytest.mark.parametrize("train_s", [0.5, 12.0], ids=["nodes are slow", "trainers are slow"])
def test_a_dead_trainer_costs_the_other_nothing(train_s: float) -> None:
    setup = Setup(
        batches={A: 16, B: 16}, pools=[Pool(num_nodes=3)], train_s=train_s, max_staleness=2
    )
    world = PolicyWorld(setup)
    world.advance(60.0)
    since = world.run.now
    world.advance(400.0)
    before = world.step_rate(A, since)
    dead, budget = world.trainers[B], 16 * (setup.max_staleness + 1)
    dead.is_stopped = True
    num_steps = dead.consumer.lineage.number
    world.advance(60.0)  # its budget is full by now
    since = world.run.now
    world.advance(400.0)
    assert world.step_rate(A, since) == pytest.approx(before, rel=0.05)
    assert dead.consumer.lineage.number == num_steps
    levels = dead.consumer.levels()
    assert levels.admitted + levels.sealed <= budget, "what it keeps is bounded"
    assert len(world.run.coordinator.open) <= 2 * budget
    dead.is_stopped = False
    since = world.run.now
    world.advance(150.0)
    assert dead.consumer.lineage.number >= num_steps + 5
    assert world.step_rate(B, since) >= 0.8 * world.step_rate(A, since), "it has caught up"
    assert max(batch.staleness_max for batch in dead.batches) <= setup.max_staleness


def test_a_trainer_that_died_before_it_published_starts_no_work() -> None:
    """Whatever its old version samples is stale by its next batch: its room must start nothing."""
    setup = Setup(batches={A: 16, B: 16}, pools=[Pool(num_nodes=6)], train_s=6.0)
    world = PolicyWorld(setup)
    world.advance(60.0)
    dying, number = world.trainers[B], world.trainers[B].consumer.lineage.number
    dying.publishes = False
    while dying.consumer.lineage.number == number or not dying.consumer.sealed:
        world.advance(1.0)
    dying.is_stopped = True
    world.advance(60.0)
    before, num_steps = len(world.run.tally.fates), len(world.trainers[A].batches)
    world.advance(240.0)
    num_groups = (len(world.run.tally.fates) - before) / 2
    num_trained = 16 * (len(world.trainers[A].batches) - num_steps)
    assert num_trained > 16 * 20
    assert num_groups < 1.2 * num_trained, "groups start for those who can use them"


def test_a_source_whose_trainer_is_dead_leaves_the_other_source_alone() -> None:
    """Each has its own pool: what waits for the dead one blocks no lease of the other."""
    pools = [Pool(num_nodes=3, policies=(policy,)) for policy in (A, B)]
    world = PolicyWorld(Setup(batches={A: 16, B: 16}, pools=pools, sources=APART))
    world.advance(60.0)
    since = world.run.now
    world.advance(300.0)
    before = world.step_rate(A, since)
    world.trainers[B].is_stopped = True
    world.advance(60.0)
    since = world.run.now
    world.advance(300.0)
    assert world.step_rate(A, since) == pytest.approx(before, rel=0.05)


def test_a_frozen_policy_is_called_and_never_trained() -> None:
    """Its tokens neither age nor count, and nothing waits for another version of it."""
    setup = Setup(batches={A: 16}, frozen=(JUDGE,), pools=[Pool(num_nodes=4)])
    world = PolicyWorld(setup)
    world.advance(150.0)
    trainer = world.trainers[A]
    assert trainer.consumer.lineage.number > 20
    assert {consumer for consumer, _ in world.run.tally.fates} == {A}
    assert {row.versions[JUDGE] for batch in trainer.batches for row in rows_of(batch)} == {
        ((1, 0),)
    }
    assert max(batch.staleness_max for batch in trainer.batches) <= setup.max_staleness


def rows_of(batch: BatchRecord) -> Iterable[RowSummary]:
    return ManifestCache().decode(batch.manifest).rows


def test_no_group_starts_before_its_frozen_policy_is_published() -> None:
    world = PolicyWorld(Setup(batches={A: 4}, frozen=(JUDGE,), pools=[], publishes_frozen=False))
    world.advance(10.0)
    assert not world.run.coordinator.open
    world.run.take_over(JUDGE)
    world.advance(10.0)
    assert world.run.coordinator.open


def test_a_node_gets_no_work_that_calls_what_it_does_not_serve() -> None:
    pools = [Pool(num_nodes=2, policies=(A,))]
    world = PolicyWorld(Setup(batches={A: 8, B: 8}, pools=pools, sources=APART))
    world.advance(120.0)
    assert world.trainers[A].consumer.lineage.number > 3
    assert world.trainers[B].consumer.lineage.number == 0
    assert not any(node.num_leases for node in world.run.partition.nodes.values() if not node.live)
    assert _unserved(world) == {"right": {B}}
    [text] = unserved(world.run.partition)
    assert "a node that serves b: source right" in text
    world.run.join("late", 16, (B,))
    world.advance(120.0)
    assert world.trainers[B].consumer.lineage.number > 3
    assert not _unserved(world)


def test_a_group_of_all_policies_is_for_nodes_that_serve_all() -> None:
    world = PolicyWorld(Setup(batches={A: 4, B: 4}, pools=[Pool(num_nodes=2, policies=(A,))]))
    world.advance(60.0)
    assert not any(node.num_leases for node in world.run.partition.nodes.values())
    assert _unserved(world) == {"train": {A, B}}
    world.run.join("both", 16, (A, B))
    world.advance(60.0)
    assert world.trainers[A].consumer.lineage.number and world.trainers[B].consumer.lineage.number
