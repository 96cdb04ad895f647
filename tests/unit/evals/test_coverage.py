# SPDX-License-Identifier: Apache-2.0
"""How often the intervals contain the truth: exactly for one sample, by simulation for several."""

from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.unit.evals.exact_statistics import binomial_chances

from penstock.evals.comparison import difference_interval
from penstock.evals.figures import clustered_interval

Scores = NDArray[np.float64]
NUM_SIMULATIONS = 2000
MANY = 20_000
NOISE = 0.003
"""Two standard errors of a share of 95 % in `MANY` simulations."""


@cache
def _single(num_questions: int) -> tuple[tuple[float, float], ...]:
    """The interval for each number of right answers."""
    questions = range(num_questions)
    return tuple(
        clustered_interval([float(q < right) for q in questions], 1)
        for right in range(num_questions + 1)
    )


def _exact_coverage(num_questions: int, rate: float) -> float:
    chances = binomial_chances(num_questions, rate)
    intervals = _single(num_questions)
    pairs = zip(chances, intervals, strict=True)
    return sum(float(chance) for chance, (low, high) in pairs if low <= rate <= high)


def _draw(
    rng: np.random.Generator, shape: tuple[int, int], rate: float, alike: float, samples: int
) -> Scores:
    """Mean scores by simulation and question. `alike`: how close the questions' own rates are; 0
    for the same."""
    own = np.full(shape, rate)
    if alike:
        own = rng.beta(rate * alike, (1 - rate) * alike, shape)
    return rng.binomial(samples, own) / samples


def _simulated_coverage(
    num_questions: int,
    rate: float,
    alike: float,
    samples: int,
    num_simulations: int = NUM_SIMULATIONS,
) -> float:
    rng = np.random.default_rng([num_questions, int(rate * 1000), int(alike * 10), samples])
    scores = _draw(rng, (num_simulations, num_questions), rate, alike, samples)
    moments = np.stack([scores.sum(1), (scores**2).sum(1)], axis=1).round(6)
    _, firsts, counts = np.unique(moments, axis=0, return_index=True, return_counts=True)
    covered = 0
    for first, count in zip(firsts, counts, strict=True):  # rows alike have the same interval
        low, high = clustered_interval(scores[first].tolist(), samples)
        covered += int(count) if low <= rate <= high else 0
    return covered / num_simulations


@pytest.mark.parametrize("num_questions", [50, 100])
def test_coverage_for_one_sample_is_exactly_that(num_questions: int) -> None:
    for rate in np.linspace(0.1, 0.9, 321):
        assert 0.93 <= _exact_coverage(num_questions, float(rate)) <= 0.97, rate


@pytest.mark.parametrize("num_questions", [2, 5, 12, 20, 50])
def test_coverage_at_few_questions_and_extreme_rates(num_questions: int) -> None:
    for rate in np.linspace(0.001, 0.999, 500):
        assert _exact_coverage(num_questions, float(rate)) >= 0.93, rate


@pytest.mark.slow
@pytest.mark.parametrize("num_questions", [*range(2, 81, 3), 100, 150, 200, 300])
def test_exact_coverage_everywhere(num_questions: int) -> None:
    for rate in np.linspace(0.001, 0.999, 1997):
        covered = _exact_coverage(num_questions, float(rate))
        is_bounded = num_questions >= 50 and 0.1 <= rate <= 0.9
        assert covered >= 0.93 and (covered <= 0.97 or not is_bounded), rate


@pytest.mark.parametrize(
    ("rate", "alike", "samples"), [(0.1, 2.0, 4), (0.5, 0.0, 4), (0.3, 2.0, 16), (0.9, 10.0, 4)]
)
def test_coverage_for_several_samples(rate: float, alike: float, samples: int) -> None:
    assert 0.93 <= _simulated_coverage(50, rate, alike, samples) <= 0.97


@pytest.mark.parametrize(("num_questions", "rate"), [(50, 0.03), (10, 0.1), (30, 0.97)])
def test_coverage_for_several_samples_elsewhere(num_questions: int, rate: float) -> None:
    """Most questions are hopeless, a few are easy: the variance hides in questions not asked."""
    assert _simulated_coverage(num_questions, rate, 2.0, 16) >= 0.93


@pytest.mark.slow
@pytest.mark.parametrize("samples", [4, 16])
@pytest.mark.parametrize("num_questions", [5, 20, 50, 100, 200])
@pytest.mark.parametrize("alike", [0.0, 0.5, 2.0, 10.0])
def test_coverage_everywhere(num_questions: int, alike: float, samples: int) -> None:
    """The seeds are fixed, so chance cannot fail it; `NOISE` is what 20,000 simulations leave."""
    for rate in (0.01, 0.03, 0.1, 0.2, 0.5, 0.8, 0.9, 0.99):
        found = _simulated_coverage(num_questions, rate, alike, samples, MANY)
        is_bounded = num_questions >= 50 and 0.1 <= rate <= 0.9
        assert 0.93 - NOISE <= found <= (0.97 + NOISE if is_bounded else 1.0), rate


@pytest.mark.parametrize(("before", "gain"), [(0.2, 0.0), (0.5, 0.2), (0.9, 0.05)])
def test_coverage_of_a_difference(before: float, gain: float) -> None:
    """Of two versions, each with its own luck on the same questions."""
    rng = np.random.default_rng(7)
    luck = rng.random((NUM_SIMULATIONS, 2, 50))
    luck[:, 1, :25] = luck[:, 0, :25]  # half of the questions are answered alike
    changes = (luck[:, 1] < before + gain).astype(float) - (luck[:, 0] < before)
    intervals = [difference_interval(row.tolist()) for row in changes]
    covered = sum(low <= gain <= high for low, high in intervals) / NUM_SIMULATIONS
    assert 0.93 <= covered <= 0.985
