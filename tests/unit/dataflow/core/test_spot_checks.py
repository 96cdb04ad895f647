# SPDX-License-Identifier: Apache-2.0
"""When rows that were generated again differ too often."""

from __future__ import annotations

import math

import pytest

from penstock.dataflow.core.spot_checks import CheckCounts, binomial_tail


@pytest.mark.parametrize(("k", "n", "p"), [(3, 3, 0.02), (5, 100, 0.02), (40, 50, 0.5)])
def test_the_bound_is_never_below_the_true_chance(k: int, n: int, p: float) -> None:
    true = sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k, n + 1))
    assert true <= binomial_tail(k, n, p) < 1
    assert binomial_tail(1, 100, 0.02) == 1.0


def test_three_of_three_differ_and_one_of_many_does_not() -> None:
    assert "3 of 3" in CheckCounts(num_compared=3, num_different=3).verdict(0.02)
    assert CheckCounts(num_compared=50, num_different=1).verdict(0.02) == ""
    assert CheckCounts(num_compared=1000, num_different=25).verdict(0.02) == ""
    assert CheckCounts(num_compared=1000, num_different=80).verdict(0.02)


def test_rewards_that_are_always_better_are_not_believed() -> None:
    assert "earned more" in CheckCounts(num_better=60, num_worse=10).verdict(0.02)
    assert CheckCounts(num_better=10, num_worse=60).verdict(0.02) == "", "it harms itself alone"
    assert CheckCounts(num_better=40, num_worse=30).verdict(0.02) == ""
