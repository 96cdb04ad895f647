# SPDX-License-Identifier: Apache-2.0
"""The 95 % confidence interval of a rate, from a number of right answers. Pure functions.

A rate is in the interval unless the number of right answers would be rare at that rate. Blaker's
order says how rare: the smaller tail, plus the largest tail on the other side that does not exceed
it. Counts jump, so no rule contains 95 % of the truths at every rate. The observed number itself
counts half, which makes it 95 % on average; it counts fully where half would give less than
`FLOOR`. Exact coverage: 93.7 to 96.7 % at 50 questions or more and rates of 0.1 to 0.9, at least
`FLOOR` anywhere (tests/unit/evals/test_coverage.py). Wilson's interval has 84 % at small rates."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from penstock.evals.distributions import beta_quantile, binomial_tails

RARE = 0.05
FLOOR = 0.935
"""Least coverage at any rate and number of questions."""
NUM_STEPS = 64
RESOLUTION = 1e-9


@lru_cache(maxsize=256)
def binomial_interval(right: int, num: int) -> tuple[float, float]:
    """Of `right` among `num` questions; `num` is at least 1."""
    return _lowest(right, num), 1.0 - _lowest(num - right, num)


def _lowest(right: int, num: int) -> float:
    """The lowest rate at which this many right answers are not rare."""
    if right == 0:
        return 0.0
    low = beta_quantile(RARE / 2, right, num - right + 1)  # below it, both tails are too small
    step = (right / num - low) / NUM_STEPS
    for _ in range(NUM_STEPS):
        if _is_plausible(right, num, low + step):
            break
        low += step
    return _bisect(lambda rate: _is_plausible(right, num, rate), low, low + step)


def _is_plausible(right: int, num: int, rate: float) -> bool:
    at_most, at_least = binomial_tails(right, num, rate)
    tail = min(at_most, at_least)
    opposite = _largest_tail(num, rate, tail, upper=at_most < at_least)
    of_right = at_most + at_least - 1.0
    return tail + opposite > min(RARE + of_right / 2, 1.0 - FLOOR)


def _largest_tail(num: int, rate: float, limit: float, *, upper: bool) -> float:
    """The largest upper (or lower) tail of the counts that is at most `limit`."""
    few, many = -1, num + 1  # by how many counts the tail is short of all
    while many - few > 1:
        count = (few + many) // 2
        few, many = (few, count) if _tail(count, num, rate, upper=upper) <= limit else (count, many)
    return _tail(many, num, rate, upper=upper)


def _tail(count: int, num: int, rate: float, *, upper: bool) -> float:
    """Probability of the `num` + 1 - `count` largest (or smallest) counts."""
    if count > num:
        return 0.0
    return binomial_tails(count if upper else num - count, num, rate)[1 if upper else 0]


def _bisect(is_in: Callable[[float], bool], outside: float, inside: float) -> float:
    while inside - outside > RESOLUTION:
        middle = (outside + inside) / 2
        outside, inside = (outside, middle) if is_in(middle) else (middle, inside)
    return outside  # a bound at exactly one half, where two tails are equal, is inside
