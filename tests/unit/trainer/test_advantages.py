# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import statistics

import numpy as np
import pytest

from penstock.trainer.advantages import EPSILON, batch_advantages, group_advantages


def oracle(groups: list[list[float]]) -> list[float]:
    out: list[float] = []
    for rewards in groups:
        if len(rewards) < 2 or max(rewards) - min(rewards) <= 1e-6:
            out += [0.0] * len(rewards)
            continue
        mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
        out += [(reward - mean) / (std + EPSILON) for reward in rewards]
    return out


def advantages(groups: list[list[float]]) -> list[float]:
    numbers = [index for index, rewards in enumerate(groups) for _ in rewards]
    flat = [reward for rewards in groups for reward in rewards]
    return group_advantages(np.array(flat), np.array(numbers, np.int64)).tolist()


def test_one_winner_of_four() -> None:
    values = advantages([[1.0, 0.0, 0.0, 0.0]])
    assert values == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-4)
    assert sum(values) == pytest.approx(0, abs=1e-12)


def test_ragged_groups_against_the_oracle() -> None:
    draw = np.random.default_rng(0)
    groups = [draw.random(draw.integers(1, 9)).tolist() for _ in range(50)]
    groups += [[0.3], [0.5] * 4, [1.0, 1.0 + 9e-7], [1.0, 1.0 + 2e-6]]
    assert advantages(groups) == pytest.approx(oracle(groups), rel=1e-9, abs=1e-12)


def test_scale_and_shift_of_rewards_do_not_matter() -> None:
    rewards = np.array([0.1, 0.9, 0.4, 0.4])
    zeros = np.zeros(4, np.int64)
    plain = group_advantages(rewards, zeros)
    assert group_advantages(1000 * rewards - 5, zeros) == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize("rewards", [[0.7], [0.3, 0.3, 0.3], [1.0, 1.0 + 1e-7]])
def test_no_spread_no_advantage(rewards: list[float]) -> None:
    assert advantages([rewards]) == [0.0] * len(rewards)


def test_an_empty_batch() -> None:
    assert group_advantages(np.zeros(0), np.zeros(0, np.int64)).size == 0


def test_groups_of_one_are_compared_with_their_batch() -> None:
    rewards, each_alone = np.array([1.0, 0.0, 0.5, 0.0]), np.arange(4)
    assert group_advantages(rewards, each_alone).tolist() == [0.0] * 4
    expected = oracle([rewards.tolist()])
    assert batch_advantages(rewards, each_alone).tolist() == pytest.approx(expected)
    assert batch_advantages(np.zeros(0), np.zeros(0, np.int64)).size == 0
