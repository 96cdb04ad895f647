# SPDX-License-Identifier: Apache-2.0
"""Advantages against lists and the statistics module; ragged groups, groups of one, no reward."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple

import numpy as np
import pytest
from tests.unit.trainer import oracles

from penstock.trainer.advantages.baselines import (
    Credit,
    Floats,
    Ints,
    Moments,
    batch_advantages,
    centred_advantages,
    final_rewards,
    group_advantages,
    group_then_batch_advantages,
    leave_one_out_advantages,
    moments,
    normalised,
    returns_to_go,
    subtract_kl,
    token_kl,
)

Groups = list[list[float]]
NAN = math.nan


def flatten(groups: Groups) -> tuple[Floats, Ints]:
    numbers = [index for index, rewards in enumerate(groups) for _ in rewards]
    return np.array([r for rewards in groups for r in rewards]), np.array(numbers, np.int64)


def advantages(groups: Groups, credit: Credit = group_advantages) -> list[float]:
    return credit(*flatten(groups)).tolist()


def ragged(seed: int) -> Groups:
    """Of one to eight members, some without a reward, some without spread."""
    draw = np.random.default_rng(seed)
    groups = [draw.random(draw.integers(1, 9)).tolist() for _ in range(50)]
    for rewards in groups[::3]:
        rewards[int(draw.integers(len(rewards)))] = NAN
    groups += [[0.3], [0.5] * 4, [1.0, 1.0 + 9e-7], [1.0, 1.0 + 2e-6], [NAN, NAN], [NAN, 1.0]]
    return [*groups, [math.inf, 0.0, 1.0]]


def dr_grpo(groups: Groups) -> list[float]:
    return [value for part in oracles.centred(groups) for value in part]


def grpo_population(rewards_R: Floats, groups_R: Ints) -> Floats:
    return group_advantages(rewards_R, groups_R, std_ddof=0)


@pytest.mark.parametrize(
    ("credit", "oracle"),
    [
        (group_advantages, oracles.grpo),
        (grpo_population, lambda groups: oracles.grpo(groups, ddof=0)),
        (centred_advantages, dr_grpo),
        (leave_one_out_advantages, oracles.rloo),
        (batch_advantages, lambda groups: oracles.grpo([[r for g in groups for r in g]])),
        (group_then_batch_advantages, oracles.reinforce_baseline),
    ],
    ids=["grpo", "grpo_population", "dr_grpo", "rloo", "batch", "reinforce_baseline"],
)
@pytest.mark.parametrize("seed", range(3))
def test_ragged_groups_against_the_oracle(
    credit: Credit, oracle: Callable[[Groups], list[float]], seed: int
) -> None:
    groups = ragged(seed)
    want = oracle(groups)
    assert advantages(groups, credit) == pytest.approx(want, rel=1e-9, abs=1e-12)
    rewards, _ = flatten(groups)
    assert (credit(*flatten(groups))[~np.isfinite(rewards)] == 0).all()


def test_one_winner_of_four() -> None:
    values = advantages([[1.0, 0.0, 0.0, 0.0]])
    assert values == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-4)
    assert sum(values) == pytest.approx(0, abs=1e-12)


def test_scale_and_shift_of_rewards_do_not_matter() -> None:
    rewards = np.array([0.1, 0.9, 0.4, 0.4])
    zeros = np.zeros(4, np.int64)
    plain = group_advantages(rewards, zeros)
    assert group_advantages(1000 * rewards - 5, zeros) == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize("rewards", [[0.7], [0.3, 0.3, 0.3], [1.0, 1.0 + 1e-7], [NAN, 0.7]])
def test_no_spread_no_advantage(rewards: list[float]) -> None:
    for credit in (group_advantages, centred_advantages, leave_one_out_advantages):
        assert advantages([rewards], credit) == [0.0] * len(rewards)


def test_a_row_without_a_reward_changes_nobody() -> None:
    whole = advantages([[1.0, 0.0, 0.5], [0.2, 0.9]])
    with_one_more = advantages([[1.0, NAN, 0.0, 0.5], [0.2, 0.9, NAN]])
    assert with_one_more == [whole[0], 0.0, *whole[1:5], 0.0]


@pytest.mark.parametrize(
    "credit",
    [
        group_advantages,
        centred_advantages,
        leave_one_out_advantages,
        batch_advantages,
        group_then_batch_advantages,
    ],
)
def test_an_empty_batch(credit: Credit) -> None:
    assert credit(np.zeros(0), np.zeros(0, np.int64)).size == 0


def test_groups_of_one_are_compared_with_their_batch() -> None:
    rewards, each_alone = np.array([1.0, 0.0, 0.5, 0.0]), np.arange(4)
    assert group_advantages(rewards, each_alone).tolist() == [0.0] * 4
    expected = oracles.grpo([rewards.tolist()])
    assert batch_advantages(rewards, each_alone).tolist() == pytest.approx(expected)


def test_rloo_is_dr_grpo_stretched() -> None:
    groups = [[0.1, 0.9, 0.4, 0.4], [1.0, 0.0]]
    stretched = np.array([4 / 3] * 4 + [2.0] * 2) * centred_advantages(*flatten(groups))
    assert leave_one_out_advantages(*flatten(groups)) == pytest.approx(stretched, rel=1e-12)


def test_rloo_is_unbiased_on_a_bandit() -> None:
    """Two arms of known means; a million draws in groups of four."""
    draw, theta = np.random.default_rng(0), 0.3
    p = 1 / (1 + math.exp(-theta))
    arms = draw.random(1_000_000) < p
    rewards = (draw.random(arms.size) < np.where(arms, 0.7, 0.2)).astype(np.float64)
    groups = np.repeat(np.arange(arms.size // 4), 4)
    credit = leave_one_out_advantages(rewards, groups)
    by_group = (credit * (arms - p)).reshape(-1, 4).mean(axis=1)
    exact = p * (1 - p) * (0.7 - 0.2)
    z = (by_group.mean() - exact) / (by_group.std() / math.sqrt(by_group.size))
    assert abs(z) < 3


def test_reinforce_with_a_baseline_in_one_group_is_grpo() -> None:
    groups = [[0.1, 0.9, 0.4, 0.4, 1.3]]
    ours = advantages(groups, group_then_batch_advantages)
    assert ours == pytest.approx(oracles.grpo(groups), rel=1e-12)


def test_reinforce_with_a_baseline_does_not_divide_by_the_spread_between_groups() -> None:
    groups = [[0.0, 1.0], [100.0, 101.0]]
    assert advantages(groups, group_then_batch_advantages) == pytest.approx(
        [-math.sqrt(3) / 2, math.sqrt(3) / 2] * 2, rel=1e-4
    )


# ------------------------------------------------------------------------------------------- tokens

MASK = np.array([0, 1, 1, 0, 1, 0, 0, 1, 0, 1, 1], np.bool_)
STARTS, ENDS, ROWS = np.array([0, 6, 8]), np.array([6, 8, 11]), np.array([0, 0, 2])


def test_rewards_stand_on_the_last_trained_token_of_each_sample() -> None:
    rewards = final_rewards(np.array([1.0, 9.0, NAN]), MASK, STARTS, ENDS, ROWS)
    want = [0, 0, 0, 0, 1.0, 0, 0, 1.0, 0, 0, NAN]
    np.testing.assert_array_equal(rewards, want)


def test_a_sample_without_a_trained_token_gets_no_reward() -> None:
    rewards = final_rewards(
        np.array([5.0, 7.0]),
        np.array([1, 0, 0], np.bool_),
        np.array([0, 1]),
        np.array([1, 3]),
        np.array([0, 1]),
    )
    assert rewards.tolist() == [5.0, 0.0, 0.0]


def test_plain_reinforce_against_the_oracle() -> None:
    """Return-to-go of final reward less KL, normalised over trained tokens; row 2 has no reward."""
    draw = np.random.default_rng(0)
    logprobs, reference = draw.standard_normal((2, MASK.size))
    rewards = np.array([1.0, 9.0, NAN])
    kl = token_kl(logprobs, reference)
    by_token = final_rewards(rewards, MASK, STARTS, ENDS, ROWS) - 0.1 * kl
    to_go = returns_to_go(by_token, MASK, STARTS, ENDS)
    got = normalised(to_go, MASK, moments(to_go, MASK))

    want: dict[int, float] = {}
    for start, end in ((0, 6), (6, 8)):
        trained = [t for t in range(start, end) if MASK[t]]
        for index, t in enumerate(trained):
            want[t] = 1.0 - 0.1 * sum(logprobs[s] - reference[s] for s in trained[index:])
    mean = sum(want.values()) / len(want)
    std = math.sqrt(sum((v - mean) ** 2 for v in want.values()) / len(want))
    expected = [(want[t] - mean) / (std + 1e-5) if t in want else 0.0 for t in range(MASK.size)]
    assert got.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_normalised_over_trained_tokens_and_ranks() -> None:
    draw = np.random.default_rng(0)
    values, mask = draw.normal(3, 2, 500), draw.random(500) < 0.4
    whole = normalised(values, mask, moments(values, mask))
    assert whole[mask].mean() == pytest.approx(0, abs=1e-12)
    assert whole[mask].std() == pytest.approx(1, rel=1e-5)
    assert (whole[~mask] == 0).all()
    shards = [slice(0, 7), slice(7, 300), slice(300, 500)]
    parts = [moments(values[cut], mask[cut]) for cut in shards]
    summed = Moments(*np.sum([astuple(part) for part in parts], axis=0).tolist())
    for cut in shards:
        np.testing.assert_allclose(
            normalised(values[cut], mask[cut], summed), whole[cut], rtol=1e-9
        )
    padded = np.concatenate([values, np.full(50, 1e9)]), np.concatenate([mask, np.zeros(50, bool)])
    np.testing.assert_array_equal(normalised(*padded, moments(*padded))[:500], whole)


def test_equal_advantages_normalise_to_nothing() -> None:
    values, mask = np.full(5, 0.3), np.ones(5, np.bool_)
    assert normalised(values, mask, moments(values, mask)).tolist() == [0.0] * 5
    none = Moments(num_tokens=0, total=0.0, square=0.0)
    assert normalised(np.zeros(0), np.zeros(0, np.bool_), none).size == 0


def test_kl_in_the_reward_is_summed_over_trained_tokens_and_bounded() -> None:
    kl = token_kl(np.full(MASK.size, -1.0), np.full(MASK.size, -1.5))
    rows = np.array([0] * 8 + [2] * 3)
    got = subtract_kl(np.array([1.0, 2.0, NAN]), kl, MASK, rows, coef=0.1)
    np.testing.assert_allclose(got, [1.0 - 0.1 * 4 * 0.5, 2.0, NAN])
    assert token_kl(np.array([-1e38]), np.array([-1.0])).tolist() == [-20.0]
