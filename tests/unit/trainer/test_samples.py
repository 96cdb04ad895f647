# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from tests.unit.trainer.doubles import POLICY, make_trajectory, make_turn

from penstock.dataflow.service.nodes.validate import summarise
from penstock.trainer.samples import Samples, make_samples
from penstock.types import (
    FinishReason,
    PolicyName,
    RowSummary,
    SamplingSpec,
    Trajectory,
    VersionSpan,
    view_ids,
)

OTHER = PolicyName("other")


def sequences(samples: Samples) -> list[tuple[list[int], list[int]]]:
    """(ids, ids that are trained) of each sample."""
    out: list[tuple[list[int], list[int]]] = []
    for start, end in zip(samples.starts_S, samples.ends_S, strict=True):
        ids = samples.ids_T[start:end]
        out.append((ids.tolist(), ids[samples.mask_T[start:end]].tolist()))
    return out


def cut_one(trajectory: Trajectory) -> Samples:
    return make_samples([(0, trajectory)], POLICY)


def test_one_turn() -> None:
    samples = cut_one(make_trajectory(make_turn([3, 4], [5, 6], logprobs=[-1.0, -2.0])))
    assert sequences(samples) == [([3, 4, 5, 6], [5, 6])]
    assert samples.logprobs_T[samples.mask_T].tolist() == [-1.0, -2.0]
    assert samples.num_trained == 2


def test_a_conversation_is_one_sample() -> None:
    samples = cut_one(make_trajectory(make_turn([1], [2, 3]), make_turn([4], [5], parent=0)))
    assert sequences(samples) == [([1, 2, 3, 4, 5], [2, 3, 5])]


def test_a_shared_turn_is_trained_in_the_first_of_its_branches() -> None:
    samples = cut_one(
        make_trajectory(
            make_turn([1], [2, 3]),
            make_turn([4], [5], parent=0),
            make_turn([6], [7], parent=0),
            make_turn([8], [9], parent=2),
        )
    )
    assert sequences(samples) == [
        ([1, 2, 3, 4, 5], [2, 3, 5]),
        ([1, 2, 3, 6, 7, 8, 9], [7, 9]),
    ]


def test_fresh_contexts_are_samples_of_their_own() -> None:
    samples = cut_one(make_trajectory(make_turn([1], [2]), make_turn([3], [4])))
    assert sequences(samples) == [([1, 2], [2]), ([3, 4], [4])]
    assert samples.rows_S.tolist() == [0, 0]


def test_only_what_this_policy_sampled_and_its_agent_received_is_trained() -> None:
    samples = cut_one(
        make_trajectory(
            make_turn([1], [2]),
            make_turn([3], [4], parent=0, policy=OTHER),
            make_turn([5], [6], parent=1, finish=FinishReason.ABORT),
            make_turn([7], [8], parent=1, reached_agent=False),
            make_turn([9], [10], parent=1),
            make_turn([11], [12], parent=4, policy=OTHER),
        )
    )
    assert sequences(samples) == [
        ([1, 2], [2]),
        ([1, 2, 3, 4, 9, 10], [10]),
    ], "cut behind the last trained turn, dead branches left out"


def test_a_greedy_answer_has_no_gradient_and_is_not_trained() -> None:
    greedy = make_turn([1], [2], sampling=SamplingSpec(temperature=0.0))
    assert sequences(cut_one(make_trajectory(greedy))) == []


def test_a_token_without_context_cannot_be_trained() -> None:
    assert sequences(cut_one(make_trajectory(make_turn([], [5, 6])))) == [([5, 6], [6])]


def test_each_token_carries_its_own_spec_and_version() -> None:
    first = make_turn(
        [1], [2], sampling=SamplingSpec(temperature=0.5, top_k=4, top_p=0.75, min_p=0.5)
    )
    spans = (
        VersionSpan(start=0, end=1, incarnation=1, number=7),
        VersionSpan(start=1, end=3, incarnation=1, number=8),
    )
    second = replace(make_turn([3], [4, 5, 6], parent=0), spans=spans)
    samples = cut_one(make_trajectory(first, second))
    trained = samples.mask_T
    assert samples.temperature_T[trained].tolist() == [0.5, 1, 1, 1]
    assert samples.top_k_T[trained].tolist() == [4, 0, 0, 0]
    assert samples.top_p_T[trained].tolist() == [0.75, 1, 1, 1]
    assert samples.min_p_T[trained].tolist() == [0.5, 0, 0, 0]
    assert samples.versions_T[trained].tolist() == [0, 7, 8, 8]


def test_no_rows() -> None:
    assert make_samples([], POLICY).num_trained == 0


@pytest.mark.parametrize("seed", range(30))
def test_every_sampled_token_once_and_in_its_context(seed: int) -> None:
    draw = np.random.default_rng(seed)
    trajectories = [_random_tree(draw) for _ in range(5)]
    samples = make_samples(enumerate(trajectories), POLICY)
    found: Counter[tuple[int, tuple[int, ...]]] = Counter()
    for start, end, row in zip(samples.starts_S, samples.ends_S, samples.rows_S, strict=True):
        ids = samples.ids_T[start:end].tolist()
        for position in np.flatnonzero(samples.mask_T[start:end]):
            found[int(row), tuple(ids[: position + 1])] += 1
    assert found == Counter(
        (row, context)
        for row, trajectory in enumerate(trajectories)
        for context in _trainable_contexts(trajectory)
    )


@pytest.mark.parametrize("seed", range(30))
def test_the_judge_of_deliveries_knows_what_will_be_computed(seed: int) -> None:
    """What the manifest says of a row is what it is cut into, for each policy."""

    def is_published(policy: PolicyName, incarnation: int, number: int) -> bool:
        return True

    draw = np.random.default_rng(seed)
    for _ in range(5):
        tree = _random_tree(draw)
        greedy = SamplingSpec(temperature=0.0)
        turns = [replace(t, sampling=greedy) if draw.random() < 0.2 else t for t in tree.turns]
        tree = replace(tree, turns=tuple(turns))
        known = summarise(tree, "d", is_published)
        assert isinstance(known, RowSummary)
        for policy in (POLICY, OTHER):
            samples = make_samples([(0, tree)], policy)
            lengths_S = samples.ends_S - samples.starts_S
            due = (int(lengths_S.sum()), int((lengths_S**2).sum()))
            assert known.compute_cost.get(policy, (0, 0)) == due


def _random_tree(draw: np.random.Generator) -> Trajectory:
    tokens = iter(range(1, 10_000))  # distinct, so that a context names its token
    turns = [
        make_turn(
            [next(tokens) for _ in range(draw.integers(1, 4))],
            [next(tokens) for _ in range(draw.integers(0, 4))],
            parent=int(draw.integers(-1, index)) if index else -1,
            policy=POLICY if draw.random() < 0.7 else OTHER,
            finish=FinishReason.ABORT if draw.random() < 0.15 else FinishReason.STOP,
            reached_agent=bool(draw.random() < 0.85),
        )
        for index in range(int(draw.integers(1, 9)))
    ]
    return make_trajectory(*turns)


def _trainable_contexts(trajectory: Trajectory) -> list[tuple[int, ...]]:
    """Every prefix that ends in a token to train, by walking up from each turn."""
    out: list[tuple[int, ...]] = []
    for turn in trajectory.turns:
        context = list(view_ids(turn.prompt_ids))
        parent = turn.parent
        while parent >= 0:
            above = trajectory.turns[parent]
            context = [*view_ids(above.prompt_ids), *view_ids(above.sampled_ids), *context]
            parent = above.parent
        good = turn.reached_agent and turn.finish is not FinishReason.ABORT
        if turn.policy == POLICY and good:
            sampled = list(view_ids(turn.sampled_ids))
            out += [(*context, *sampled[: i + 1]) for i in range(len(sampled))]
    return out


def test_what_the_manifest_lets_a_trainer_see_is_trained() -> None:
    solved = replace(make_turn([1], [2], number=4), role="solve")
    taught = replace(make_turn([5], [6], parent=0, policy=OTHER, number=4), role="explain")
    talked = make_turn([3], [4], parent=1, number=4)
    rows = [(0, make_trajectory(solved, taught, talked))]
    both = make_samples(rows, POLICY, [(POLICY, "solve"), (OTHER, "explain")])
    assert sequences(both) == [([1, 2, 5, 6], [2, 6])]
    assert both.versions_T[both.mask_T].tolist() == [4, -1], "a teacher has other versions"
    assert both.logprobs_T[both.mask_T].tolist() == [-0.5, -0.5]
    assert make_samples(rows, POLICY, []).num_trained == 0
    assert sequences(make_samples(rows, POLICY)) == [([1, 2, 5, 6, 3, 4], [2, 4])]
