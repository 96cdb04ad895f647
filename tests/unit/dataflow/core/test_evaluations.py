# SPDX-License-Identifier: Apache-2.0
"""Evaluations beside training, in virtual time: one version each, within their share, and nothing
twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.sim.world import COMPLETED, FAILED, POLICY, Settings, World

from penstock.dataflow.core.evaluations import EvaluationSpec
from penstock.dataflow.core.ids import is_evaluation
from penstock.dataflow.core.leasing import Grant
from penstock.dataflow.records import EvaluatedRecord, EvaluationRecord, EvaluationState
from penstock.dataflow.sources import open_source
from penstock.types import EVALUATION_TAG, NodeId

QUESTIONS = 6
SAMPLES = 2
SPEC = EvaluationSpec(
    policy=POLICY,
    calls=frozenset({POLICY}),
    every=5,
    samples=SAMPLES,
    temperature=0.0,
    suites=((open_source("eval.held_out", "penstock.tasks.reverse", limit=QUESTIONS), "digest"),),
    best="held_out",
    workflow="single_turn",
    seed=7,
)
SETTINGS = Settings(steps=12, evaluation=SPEC, evaluation_share=0.25)


def begin(settings: Settings = SETTINGS, capacity: int = 12) -> tuple[World, NodeId]:
    world = World(settings)
    world.incarnate()
    world.publish()
    node = world.join("a", capacity=capacity)
    world.load(node)
    return world, node


def of_evaluations(grants: list[Grant]) -> list[Grant]:
    return [grant for grant in grants if is_evaluation(grant.group_id)]


def answer(world: World, node: NodeId, grants: list[Grant], reward: float = 0.5) -> None:
    for grant in grants:
        assert world.deliver(node, grant, reward=reward) == "stored"


def release(world: World, node: NodeId, grants: list[Grant]) -> None:
    for grant in grants:
        world.partition.release(node, grant.group_id, grant.slot, grant.epoch, world.now)
    world.settle()


def finish_evaluation(world: World, node: NodeId) -> None:
    """Answer every open question; training waits meanwhile."""
    while world.evaluations.current is not None:
        world.load(node)
        grants = world.lease(node)
        assert of_evaluations(grants)
        answer(world, node, of_evaluations(grants))
        release(world, node, [grant for grant in grants if not is_evaluation(grant.group_id)])


def train_step(world: World, node: NodeId) -> None:
    """One batch: only training is answered."""
    while (seq := world.seal()) is None:
        world.load(node)
        grants = world.lease(node)
        answer(world, node, [g for g in grants if not is_evaluation(g.group_id)])
        release(world, node, of_evaluations(grants))
    assert seq
    world.commit()
    world.publish()


def records(world: World) -> list[EvaluationRecord]:
    found = world.tables.read(EvaluationRecord)
    return sorted(found, key=lambda one: (one.number, one.incarnation))


def test_before_the_first_step_every_few_and_after_the_last() -> None:
    world, node = begin()
    for _ in range(SETTINGS.steps):
        finish_evaluation(world, node)
        train_step(world, node)
    assert world.coordinator.is_trained and not world.coordinator.is_finished
    finish_evaluation(world, node)
    assert world.coordinator.is_finished
    assert [one.number for one in records(world)] == [0, 5, 10, 12]
    assert {one.state for one in records(world)} == {EvaluationState.DONE}
    answers = world.tables.read(EvaluatedRecord)
    assert len(answers) == 4 * QUESTIONS
    for one in answers:
        assert {versions for row in one.rows for versions in row.versions.values()} == {
            ((1, one.number),)
        }, "every answer is by the version of its evaluation"


def test_a_slow_evaluation_takes_its_share_and_cancels_no_training() -> None:
    """An evaluation five times slower than a step."""
    world, node = begin()
    world.load(node)
    first = world.lease(node)
    held = of_evaluations(first)
    assert len(held) == 3, "a quarter of twelve slots"
    answer(world, node, [grant for grant in first if grant not in held])
    for step in range(10):
        train_step(world, node)
        if step % 5 == 4:  # only now are the questions answered that it took
            answer(world, node, held)
            world.load(node)
            grants = world.lease(node)
            held = of_evaluations(grants)
            assert 0 < len(held) <= 3
            answer(world, node, [grant for grant in grants if grant not in held])
    assert {one.number for one in records(world)} == {0}, "the next waits for its end"
    ends = world.tables.rows("SELECT ended FROM leases")
    assert not ends, "each that ended has its result: 0 cancelled"
    drops = world.tables.rows("SELECT reason FROM fates WHERE state = 'dropped'")
    assert not drops, "no training group was dropped for it"


def test_training_gets_what_evaluations_leave_of_a_node() -> None:
    world, node = begin()
    grants = world.lease(node)
    assert (len(of_evaluations(grants)), len(grants)) == (3, 12)
    plain, other = begin(replace(SETTINGS, evaluation=None))
    assert len(plain.lease(other)) == 12


def test_a_node_takes_questions_a_quarter_of_its_share_at_a_time() -> None:
    """Each lease costs the node a pass through the model, and small passes cost most."""
    source = open_source("eval.held_out", "penstock.tasks.reverse", limit=11)
    spec = replace(SPEC, suites=((source, "digest"),))
    world, node = begin(replace(SETTINGS, evaluation=spec), capacity=64)
    held = of_evaluations(world.lease(node))
    assert len(held) == 16
    answer(world, node, held[:3])
    assert not of_evaluations(world.lease(node)), "three free slots are no quarter of 16"
    answer(world, node, held[3:4])
    more = of_evaluations(world.lease(node))
    assert len(more) == 4
    answer(world, node, held[4:5])
    assert not of_evaluations(world.lease(node)), "one of the two that are left"
    answer(world, node, held[5:6])
    assert len(of_evaluations(world.lease(node))) == 2, "the last ones do not wait"


def test_a_node_without_the_version_gets_training_only() -> None:
    world, node = begin()
    world.pinned[node] = ()
    grants = world.lease(node)
    assert grants and not of_evaluations(grants)


@pytest.mark.parametrize("share", [0.0, 0.25])
def test_a_node_of_its_own_takes_all_its_slots_for_evaluation_and_none_for_training(
    share: float,
) -> None:
    world, node = begin(replace(SETTINGS, evaluation_share=share))
    own = world.join("e", capacity=8, tags=(EVALUATION_TAG,))
    world.load(own)
    grants = world.lease(own)
    assert len(grants) == 8 and of_evaluations(grants) == grants
    assert len(of_evaluations(world.lease(node))) == (3 if share else 0)


def test_after_training_evaluations_take_the_whole_node() -> None:
    world, node = begin(replace(SETTINGS, steps=1))
    finish_evaluation(world, node)
    train_step(world, node)
    assert world.coordinator.is_trained
    world.load(node)
    assert len(of_evaluations(world.lease(node))) == 12


def test_a_restart_repeats_no_answer() -> None:
    world, node = begin()
    world.load(node)
    answer(world, node, of_evaluations(world.lease(node)))
    [held] = [of_evaluations(world.lease(node))]
    before = {(g.group_id, g.slot): g.seed for g in held}
    world.crash()
    world.heartbeat(node)
    assert all(world.partition.holds(node, g.group_id, g.slot, g.epoch) for g in held)
    answer(world, node, held)
    world.crash()
    finish_evaluation(world, node)
    [done] = records(world)
    assert done.state == EvaluationState.DONE and done.scores == {"held_out": 0.5}
    rows = world.tables.rows("SELECT group_id, slot FROM rows")
    asked = [(g, int(s)) for g, s in rows if is_evaluation(g)]
    assert len(asked) == len(set(asked)) == QUESTIONS * SAMPLES
    assert before and world.evaluations.current is None


def test_seeds_depend_on_question_and_sample_only() -> None:
    def seeds(settings: Settings) -> dict[tuple[str, int, int], int]:
        world, node = begin(settings)
        world.now += 50
        found: dict[tuple[str, int, int], int] = {}
        while world.evaluations.current is not None:
            world.load(node)
            for grant in of_evaluations(world.lease(node)):
                task = world.partition.groups[grant.group_id].task
                found[task.source, task.ordinal, grant.slot] = grant.seed
                world.deliver(node, grant)
        return found

    first = seeds(SETTINGS)
    assert len(set(first.values())) == QUESTIONS * SAMPLES
    assert seeds(replace(SETTINGS, evaluation_share=1.0)) == first


def test_failed_attempts_are_retried_and_then_count_as_zero() -> None:
    world, node = begin(replace(SETTINGS, steps=1))
    failing = ""
    while world.evaluations.current is not None:
        world.load(node)
        for grant in of_evaluations(world.lease(node)):
            failing = failing or grant.group_id
            is_failing = grant.group_id == failing and grant.slot == 0
            world.deliver(node, grant, FAILED if is_failing else COMPLETED, reward=1.0)
    [one] = [r for r in world.tables.read(EvaluatedRecord) if r.group_id == failing]
    assert [*one.failures] == ["0"] and "engine" in one.failures["0"] and len(one.rows) == 1
    attempts = world.tables.scalar(
        "SELECT count(*) FROM leases WHERE group_id = :g AND slot = 0", g=failing
    )
    assert attempts == 3, "as often as any other slot"
    [done] = records(world)
    assert done.scores["held_out"] == (QUESTIONS * SAMPLES - 1) / (QUESTIONS * SAMPLES)
    assert not world.coordinator.failure_limit.cause(world.now)


def test_a_version_that_waits_for_its_evaluation_is_kept_and_the_best_too() -> None:
    world, node = begin()
    assert world.evaluations.in_use() == {(POLICY, 1, 0)}
    for _ in range(5):
        train_step(world, node)
    assert world.evaluations.in_use() == {(POLICY, 1, 0), (POLICY, 1, 5)}
    finish_evaluation(world, node)
    best = world.evaluations.best
    assert best is not None and best.number == 0, "of equal ones the first"
    assert [one.number for one in records(world)] == [0, 5]
    assert world.evaluations.in_use() == {(POLICY, 1, 0)}


def test_a_version_made_again_after_a_rewind_is_evaluated_again_only_if_it_differs() -> None:
    for weights, numbers in (("same", [0, 5]), ("", [0, 5, 5])):
        world, node = begin()
        for _ in range(5):
            finish_evaluation(world, node)
            train_step(world, node)
        finish_evaluation(world, node)
        record = world.consumer.lineage.version(1, 5)
        assert record is not None
        world.incarnate(number=4, seq=4)
        world.publish(weights="w1.4")
        world.commit()
        world.publish(weights=record.weights_digest if weights else "")
        assert [one.number for one in records(world)] == numbers


def test_lockstep_batches_do_not_count_the_questions() -> None:
    world, node = begin(replace(SETTINGS, is_lockstep=True, max_staleness=0))
    for _ in range(3):
        finish_evaluation(world, node)
        train_step(world, node)
    assert world.consumer.lineage.number == 3
