# SPDX-License-Identifier: Apache-2.0
"""An oracle for statistics: integers, fractions and integrals in 40 digits by mpmath."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from importlib import import_module
from math import comb, lgamma, log, log1p
from statistics import fmean, variance
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
mp: Any = import_module("mpmath").mp.clone()
mp.dps = 40


def beta_cdf(x: float, a: float, b: float) -> float:
    return float(mp.betainc(a, b, 0, x, regularized=True))


def beta_quantile(share: float, a: float, b: float) -> float:
    low, high = mp.mpf(0), mp.mpf(1)
    for _ in range(60):
        middle = (low + high) / 2
        if mp.betainc(a, b, 0, middle, regularized=True) < share:
            low = middle
        else:
            high = middle
    return float(low)


def t_tails(t: float, degrees: int) -> float:
    """The chance of a larger distance from 0."""
    inside = mp.mpf(degrees) / (degrees + mp.mpf(t) ** 2)
    return float(mp.betainc(mp.mpf(degrees) / 2, mp.mpf(0.5), 0, inside, regularized=True))


def fair_coin_p(heads: int, tosses: int) -> float:
    """Two-sided: the chance of a result that is at most as likely."""
    likely = comb(tosses, heads)
    counts = (comb(tosses, other) for other in range(tosses + 1))
    return float(Fraction(sum(count for count in counts if count <= likely), 2**tosses))


@cache
def _log_ways(num: int) -> Floats:
    return np.array([lgamma(num + 1) - lgamma(k + 1) - lgamma(num - k + 1) for k in range(num + 1)])


def binomial_chances(num: int, rate: float) -> Floats:
    """In double precision, since there are many."""
    heads = np.arange(num + 1)
    return np.exp(_log_ways(num) + heads * log(rate) + (num - heads) * log1p(-rate))


def paired_p(first: Sequence[float], second: Sequence[float]) -> float:
    """Of a t test on the differences."""
    differences = [a - b for a, b in zip(first, second, strict=True)]
    error = (variance(differences) / len(differences)) ** 0.5
    return t_tails(fmean(differences) / error, len(differences) - 1)


def unpaired_p(first: Sequence[float], second: Sequence[float]) -> float:
    """Of a t test on two samples of one size and variance."""
    num = len(first)
    error = ((variance(first) + variance(second)) / num) ** 0.5
    return t_tails((fmean(first) - fmean(second)) / error, 2 * num - 2)
