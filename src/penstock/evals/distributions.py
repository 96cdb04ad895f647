# SPDX-License-Identifier: Apache-2.0
"""Quantiles and tails of the distributions that the figures need: beta, Student's t, binomial.

Pure functions, so that reading a result needs no scipy; the tests compare them with scipy."""

from __future__ import annotations

import math
from functools import lru_cache

MAX_TERMS = 500
PRECISION = 1e-14
TINY = 1e-300
RESOLUTION = 1e-11


def beta_cdf(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function, by its continued fraction."""
    if x <= 0.0 or x >= 1.0:
        return 0.0 if x <= 0.0 else 1.0
    if x > (a + 1.0) / (a + b + 2.0):  # the fraction converges fast on the other side
        return 1.0 - beta_cdf(1.0 - x, b, a)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    log_front += a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_front) / (a * _continued_fraction(x, a, b))


def _continued_fraction(x: float, a: float, b: float) -> float:
    """1 + d1/(1 + d2/(1 + …)), evaluated from the front (Lentz)."""
    value, above, below = 1.0, 1.0, 0.0
    for term in range(1, MAX_TERMS):
        half = term // 2
        if term % 2:
            factor = -(a + half) * (a + b + half) / ((a + 2 * half) * (a + 2 * half + 1))
        else:
            factor = half * (b - half) / ((a + 2 * half - 1) * (a + 2 * half))
        below = 1.0 / ((1.0 + factor * x * below) or TINY)
        above = (1.0 + factor * x / above) or TINY
        value *= above * below
        if abs(above * below - 1.0) < PRECISION:
            break
    return value


def beta_quantile(share: float, a: float, b: float) -> float:
    """Where the beta distribution reaches this share; `a` and `b` are above 0."""
    low, high = 0.0, 1.0
    while high - low > RESOLUTION:
        middle = (low + high) / 2
        low, high = (middle, high) if beta_cdf(middle, a, b) < share else (low, middle)
    return (low + high) / 2


def t_tails(t: float, degrees: float) -> float:
    """Probability of a value of Student's t at least this far from 0, on either side."""
    return beta_cdf(degrees / (degrees + t * t), degrees / 2, 0.5)


def binomial_tails(right: int, num: int, rate: float) -> tuple[float, float]:
    """Probability of at most, and of at least, this many of `num` at a rate between 0 and 1."""
    at_most = 1.0 - beta_cdf(rate, right + 1, num - right) if right < num else 1.0
    at_least = beta_cdf(rate, right, num - right + 1) if right > 0 else 1.0
    return at_most, at_least


@lru_cache(maxsize=256)
def t_quantile(share: float, degrees: int) -> float:
    """Where Student's t reaches this share, which is above one half."""
    x = beta_quantile(2.0 * (1.0 - share), degrees / 2, 0.5)
    return math.sqrt(degrees * (1.0 - x) / x)


def fair_coin_p(heads: int, tosses: int) -> float:
    """Two-sided probability of a split at least this uneven in tosses of a fair coin."""
    at_most, _ = binomial_tails(min(heads, tosses - heads), tosses, 0.5)
    return min(1.0, 2 * at_most)
