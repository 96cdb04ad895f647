# SPDX-License-Identifier: Apache-2.0
"""Length balancing against brute force, and its two promises: no row lost, counts as asked."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from penstock.trainer.arrays import Floats, Ints
from penstock.trainer.pass_cost import TYPICAL
from penstock.trainer.ranks.balance import balance_parts


def _optimum(costs_R: Floats, num_parts: int) -> float:
    """The least possible dearest part, by trying every assignment of rows but the first."""
    least = np.inf
    for tail in itertools.product(range(num_parts), repeat=costs_R.size - 1):
        sums_P = np.zeros(num_parts)
        np.add.at(sums_P, np.array((0, *tail)), costs_R)
        least = min(least, float(sums_P.max()))
    return least


def _optimum_of_two(costs_R: Floats) -> float:
    """As `_optimum` for two parts, vectorised: 12 rows are 2,048 assignments."""
    bits = np.arange(2 ** (costs_R.size - 1))[:, None] >> np.arange(costs_R.size - 1) & 1
    second = bits @ costs_R[1:]
    return float(np.maximum(second, costs_R.sum() - second).min())


def _draw(seed: int, num_rows: int) -> Floats:
    draw = np.random.default_rng(seed)
    lengths = np.maximum(1, draw.lognormal(7.0, 1.0, num_rows))
    return TYPICAL.rows(lengths, lengths**2, lengths)


def _dearest(costs_R: Floats, parts: list[Ints]) -> float:
    return max(float(costs_R[rows].sum()) for rows in parts)


def _greedy(costs_R: Floats, num_parts: int) -> float:
    """Longest first, each to the part that has least: what it must beat on the whole."""
    sums = [0.0] * num_parts
    for cost in sorted(costs_R.tolist(), reverse=True):
        sums[sums.index(min(sums))] += cost
    return max(sums)


@pytest.mark.parametrize("num_parts", [3, 4])
@pytest.mark.parametrize("num_rows", [5, 6])
def test_dearest_part_is_within_four_thirds_of_the_optimum(num_parts: int, num_rows: int) -> None:
    for seed in range(4):
        costs_R = _draw(seed, num_rows)
        found = _dearest(costs_R, balance_parts(costs_R, num_parts))
        assert found <= _optimum(costs_R, num_parts) * 4 / 3 + 1e-9


def test_two_parts_of_twelve_rows_are_within_four_thirds_of_the_optimum() -> None:
    for seed in range(100):
        costs_R = _draw(seed, 12)
        found = _dearest(costs_R, balance_parts(costs_R, 2))
        assert found <= _optimum_of_two(costs_R) * 4 / 3 + 1e-9


@pytest.mark.parametrize("num_rows", [0, 1, 3, 7, 64, 65])
@pytest.mark.parametrize("num_parts", [1, 2, 3, 8])
def test_every_row_is_in_exactly_one_part(num_rows: int, num_parts: int) -> None:
    parts = balance_parts(_draw(1, num_rows), num_parts)
    assert len(parts) == num_parts
    assert sorted(np.concatenate(parts).tolist()) == list(range(num_rows))


def test_the_known_case_where_differencing_beats_greed() -> None:
    """8 7 6 5 4 in two parts: differencing 16 (the optimum is 15), greed 17."""
    costs_R = np.array([8.0, 7.0, 6.0, 5.0, 4.0])
    assert _dearest(costs_R, balance_parts(costs_R, 2)) == 16
    assert _greedy(costs_R, 2) == 17


def test_it_beats_greed_on_long_tailed_lengths_far_more_often_than_it_loses() -> None:
    wins = losses = 0
    for seed in range(200):
        costs_R = _draw(seed, 64)
        found, greedy = _dearest(costs_R, balance_parts(costs_R, 4)), _greedy(costs_R, 4)
        wins += found < greedy * (1 - 1e-9)
        losses += found > greedy * (1 + 1e-9)
    assert wins > 4 * losses, (wins, losses)


def test_long_tailed_rows_are_evened_out() -> None:
    costs_R = _draw(7, 256)
    as_served = [np.arange(rank, 256, 8) for rank in range(8)]
    mean = costs_R.sum() / 8
    assert _dearest(costs_R, as_served) > 1.2 * mean
    assert _dearest(costs_R, balance_parts(costs_R, 8)) < 1.01 * mean


def test_equal_rows_give_the_same_parts_every_time() -> None:
    costs_R = np.ones(12)
    parts = [rows.tolist() for rows in balance_parts(costs_R, 3)]
    assert [len(rows) for rows in parts] == [4, 4, 4]
    assert parts == [rows.tolist() for rows in balance_parts(costs_R.copy(), 3)]
