# SPDX-License-Identifier: Apache-2.0
"""Credit by turn: who gets what, that shaping telescopes, and that long rows weigh no more."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from tests.unit.trainer import oracles

from penstock.trainer.advantages.baselines import group_advantages, leave_one_out_advantages
from penstock.trainer.advantages.credit import (
    Combine,
    Turns,
    by_role,
    combine_returns,
    compare_turns,
    discounted,
    last_turn,
    spread_to_tokens,
)
from penstock.trainer.arrays import Floats
from penstock.trainer.stage_functions.overlong import Overlong, overlong_penalty, shape_overlong

NAN = math.nan
TURNS = Turns(nums_R=np.array([3, 1, 0, 2]))
SCORES = np.array([0.1, 0.9, 0.4, 0.7, 0.2, 0.6])
OUTCOMES = np.array([1.0, 0.0, 5.0, 0.5])


def test_the_last_turn_carries_its_trajectory() -> None:
    assert last_turn(OUTCOMES, TURNS).tolist() == [0.0, 0.0, 1.0, 0.0, 0.0, 0.5]


def test_a_discount_runs_backward_within_a_row() -> None:
    want = [0.1 + 0.5 * (0.9 + 0.5 * 0.4), 0.9 + 0.5 * 0.4, 0.4, 0.7, 0.2 + 0.5 * 0.6, 0.6]
    assert discounted(SCORES, TURNS, 0.5).tolist() == pytest.approx(want)
    last = last_turn(OUTCOMES, TURNS)
    assert discounted(last, TURNS, 0.5).tolist() == [0.25, 0.5, 1.0, 0.0, 0.25, 0.5]


def test_outcome_and_scores_combined() -> None:
    def got(how: Combine, share: float = 0.25, discount: float = 0.5) -> list[float]:
        out = combine_returns(OUTCOMES, SCORES, TURNS, how, share=share, discount=discount)
        return out.tolist()

    spread = [1.0, 1.0, 1.0, 0.0, 0.5, 0.5]
    weighted = [0.25 * o + 0.75 * q for o, q in zip(spread, SCORES, strict=True)]
    assert got(Combine.WEIGHTED) == pytest.approx(weighted)
    sums = discounted(SCORES, TURNS, 0.5).tolist()
    returns = [s + 0.25 * o for s, o in zip(sums, spread, strict=True)]
    assert got(Combine.RETURN) == pytest.approx(returns)
    assert got(Combine.MIN) == [0.1, 0.1, 0.1, 0.7, 0.2, 0.2]
    assert got(Combine.OUTCOME) == spread
    assert got(Combine.WEIGHTED, share=1.0) == got(Combine.OUTCOME)


BEFORE = [0.0, 0.1, 0.9, 0.0, 0.0, 0.2]
"""The score of the turn before in the same row; 0 for the first."""


@pytest.mark.parametrize("discount", [1.0, 0.8])
def test_shaping_telescopes(discount: float) -> None:
    """From any turn on, shaping takes off the return exactly the score of the turn before."""
    got = combine_returns(OUTCOMES, SCORES, TURNS, Combine.SHAPING, discount=discount)
    plain = discounted(last_turn(OUTCOMES, TURNS), TURNS, discount)
    assert (plain - got).tolist() == pytest.approx(BEFORE)


def test_shaping_does_not_hold_the_score_of_a_turn_against_it() -> None:
    """A potential is of the state that a turn finds, or a better turn would earn less."""
    for turn in range(SCORES.size):
        better = SCORES.copy()
        better[turn] = 1.0
        one, other = (
            combine_returns(OUTCOMES, scores, TURNS, Combine.SHAPING)[turn]
            for scores in (SCORES, better)
        )
        assert one == pytest.approx(other)


def test_a_turn_without_a_score_counts_as_zero_and_a_row_without_an_outcome_as_nothing() -> None:
    scores = SCORES.copy()
    scores[1] = NAN
    got = combine_returns(np.array([1.0, 0.0, 0.0, NAN]), scores, TURNS, Combine.WEIGHTED)
    np.testing.assert_allclose(got, [0.55, 0.5, 0.7, 0.35, NAN, NAN])
    credit = compare_turns(got, np.zeros(4, np.int64), TURNS)
    assert credit[4:].tolist() == [0.0, 0.0]
    without = compare_turns(got[:4], np.zeros(3, np.int64), Turns(nums_R=np.array([3, 1, 0])))
    np.testing.assert_allclose(credit[:4], without, rtol=1e-12)


# ----------------------------------------------------------------------------------------- compared


def weighted_oracle(sets: list[list[list[float]]]) -> list[list[list[float]]]:
    """Sets of trajectories of returns, each trajectory of weight 1."""
    out: list[list[list[float]]] = []
    for rows in sets:
        mean = statistics.fmean(statistics.fmean(row) for row in rows)
        square = sum(statistics.fmean((r - mean) ** 2 for r in row) for row in rows)
        std = math.sqrt(square / max(len(rows) - 1, 1))
        out.append([[(r - mean) / (std + 1e-5) for r in row] for row in rows])
    return out


def test_turns_of_a_group_compared() -> None:
    draw = np.random.default_rng(0)
    nums = [3, 1, 5, 2, 4, 4, 1]
    groups = np.array([0, 0, 0, 1, 1, 1, 1])
    rows = [draw.random(n).tolist() for n in nums]
    turns = Turns(nums_R=np.array(nums))
    got = compare_turns(np.concatenate(rows), groups, turns)
    want = [r for rows_ in weighted_oracle([rows[:3], rows[3:]]) for row in rows_ for r in row]
    assert got.tolist() == pytest.approx(want, rel=1e-10)
    at_depth = compare_turns(np.concatenate(rows), groups, turns, is_by_depth=True)
    for members in (range(3), range(3, 7)):
        for depth in range(5):
            deep = [i for i in members if nums[i] > depth]
            values = [rows[i][depth] for i in deep]
            credits = [float(at_depth[sum(nums[:i]) + depth]) for i in deep]
            assert credits == pytest.approx(oracles.grpo([values]), rel=1e-10)


def test_equal_returns_give_the_trajectories_own_advantages() -> None:
    """A row of nine turns must not count nine times."""
    outcomes, groups = np.array([1.0, 0.0, 0.2, 0.9, 0.1]), np.array([0, 0, 0, 1, 1])
    turns = Turns(nums_R=np.array([9, 1, 3, 2, 2]))
    got = compare_turns(
        combine_returns(outcomes, np.zeros(17), turns, Combine.OUTCOME), groups, turns
    )
    want = group_advantages(outcomes, groups)[turns.rows_Q]
    np.testing.assert_allclose(got, want, rtol=1e-12)
    with_scores = combine_returns(outcomes, np.arange(17.0), turns, Combine.WEIGHTED, share=1.0)
    np.testing.assert_array_equal(compare_turns(with_scores, groups, turns), got)


def test_all_malformed_and_groups_of_one_give_zeros() -> None:
    turns = Turns(nums_R=np.array([2, 3, 1]))
    groups = np.array([0, 0, 1])
    assert compare_turns(np.zeros(6), groups, turns).tolist() == [0.0] * 6
    assert compare_turns(np.array([0.0] * 5 + [0.9]), groups, turns)[5] == 0.0
    assert compare_turns(np.full(6, NAN), groups, turns).tolist() == [0.0] * 6
    assert (
        compare_turns(np.zeros(0), np.zeros(0, np.int64), Turns(nums_R=np.zeros(0, np.int64))).size
        == 0
    )


def test_each_role_is_compared_with_itself() -> None:
    """Role 1 has no part in row 2, and changes nothing there."""
    rewards = np.array([[1.0, 0.2], [0.0, 0.8], [0.5, NAN]])
    groups = np.zeros(3, np.int64)
    turns = Turns(nums_R=np.array([3, 2, 1]))
    roles = np.array([0, 1, 0, 0, 1, 0])
    got = by_role(rewards, groups, roles, turns, leave_one_out_advantages)
    assert got.tolist() == pytest.approx([0.75, -0.6, 0.75, -0.75, 0.6, 0.0])


def test_credit_is_laid_on_the_trained_tokens_of_its_turn() -> None:
    turns = Turns(nums_R=np.array([2, 1]))
    got = spread_to_tokens(
        np.array([0.1, 0.2, 0.3]),
        turns,
        rows_T=np.array([0, 0, 0, 0, 1, 1]),
        turns_T=np.array([0, 0, 1, 1, 0, 0]),
        mask_T=np.array([0, 1, 0, 1, 1, 1], np.bool_),
    )
    assert got.tolist() == [0.0, 0.1, 0.0, 0.2, 0.3, 0.3]


def test_finer_credit_is_nearer_the_truth() -> None:
    """Two steps, each good or bad; the second matters four times as much."""
    draw = np.random.default_rng(0)
    num = 4000
    is_good = (draw.random((num, 2)) < 0.5).astype(np.float64)
    worth = np.array([0.2, 0.8])
    truth = ((is_good - 0.5) * worth).ravel()
    outcomes = is_good @ worth + 0.3 * draw.standard_normal(num)
    turns, groups = Turns(nums_R=np.full(num, 2)), np.repeat(np.arange(num // 8), 8)
    scores = 0.5 + truth + 0.1 * draw.standard_normal(2 * num)
    advantages = group_advantages(outcomes, groups)

    def nearness(credit: Floats) -> float:
        return float(np.corrcoef(credit, truth)[0, 1])

    both = combine_returns(outcomes, scores, turns, Combine.WEIGHTED, share=0.2)
    process = compare_turns(both, groups, turns)
    later = discounted(last_turn(advantages, turns), turns, 0.4)
    everywhere = advantages[turns.rows_Q]
    assert nearness(process) > nearness(later) + 0.02 > nearness(everywhere) + 0.04
    assert (everywhere[::2] == everywhere[1::2]).all()


# ----------------------------------------------------------------------------------------- overlong


def test_the_punishment_by_hand() -> None:
    lengths = np.array([1, 768, 896, 1024, 1025, 9999])
    assert overlong_penalty(lengths, 1024, 256).tolist() == [0.0, 0.0, -0.5, -1.0, -1.0, -1.0]


REWARDS, LENGTHS = np.array([1.0, 1.0, 0.0, 0.5]), np.array([10, 60, 80, 80])
CUT = np.array([False, False, True, False])


@pytest.mark.parametrize(
    ("how", "rewards", "aside"),
    [
        (Overlong.MASK, [1.0, 1.0, NAN, 0.5], CUT.tolist()),
        (Overlong.PUNISH, [1.0, 0.5, -1.0, -0.5], [False] * 4),
        (Overlong.BOTH, [1.0, 0.5, NAN, -0.5], CUT.tolist()),
    ],
)
def test_what_becomes_of_overlong_answers(
    how: Overlong, rewards: list[float], aside: list[bool]
) -> None:
    got, is_aside = shape_overlong(REWARDS, LENGTHS, CUT, how=how, max_length=80, margin=40)
    np.testing.assert_array_equal(got, rewards)
    assert is_aside.tolist() == aside


def test_an_answer_set_aside_does_not_shift_its_group() -> None:
    got, _ = shape_overlong(REWARDS, LENGTHS, CUT, how=Overlong.MASK, max_length=80, margin=40)
    credit = group_advantages(got, np.zeros(4, np.int64))
    assert credit[[0, 1, 3]].tolist() == pytest.approx(oracles.grpo([[1.0, 1.0, 0.5]]))
    assert credit[2] == 0
