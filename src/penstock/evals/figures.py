# SPDX-License-Identifier: Apache-2.0
"""Figures of a result: score, interval, pass@k, failures, turns and tokens. Pure functions.

Owns every formula about one version. A failed attempt counts as wrong, never as missing. Questions
are the unit of chance: samples of one question are alike, so an interval over samples would be too
narrow.

Where every question is right or wrong in all its samples, the count of right ones is binomial, and
`binomial` has its interval. Otherwise it is Wilson's, with the number of independent questions that
would have the observed variance between questions in place of the sample size. Where fewer than
`FEW` questions' worth of answers are right (or wrong), it is Korn and Graubard's: the exact
binomial interval for that number; below `SCARCE` that number is at most the number of questions,
because the questions that would show the variance may all be missing. Measured coverage:
tests/unit/evals/test_coverage.py."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import NormalDist, fmean, variance

import msgspec

from penstock.evals.binomial import binomial_interval
from penstock.evals.distributions import beta_quantile, t_quantile
from penstock.evals.results import Answer, SuiteResult

CONFIDENCE = 0.95
FEW = 5.0
SCARCE = 2.0
_UPPER = 0.5 + CONFIDENCE / 2
_Z = NormalDist().inv_cdf(_UPPER)


class SuiteFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What one result says."""

    avg: float
    """avg@k: mean over questions of the mean score of their samples."""
    interval: tuple[float, float]
    """95 % confidence interval of `avg`, over questions like these."""
    pass_at: dict[int, float]
    """By k: probability that at least one of k samples is right (unbiased); k = 1, 2, 4, … and the
    number of samples."""
    questions: int
    samples: int
    """Samples of each question; the fewest if they differ."""
    failed: int
    """Attempts that failed; they count as wrong."""
    mean_turns: float
    mean_tokens: float


def figures(result: SuiteResult) -> SuiteFigures:
    """The figures of a result with at least one answer."""
    if not result.answers:
        raise ValueError(f"suite {result.suite} has no answers, so there is nothing to compute")
    by_question = group_answers(result.answers)
    means = [mean_score(answers) for answers in by_question.values()]
    samples = min(map(len, by_question.values()))
    return SuiteFigures(
        avg=fmean(means),
        interval=clustered_interval(means, samples),
        pass_at={k: _pass_at(by_question.values(), k) for k in _ks(samples)},
        questions=len(by_question),
        samples=samples,
        failed=sum(answer.score is None for answer in result.answers),
        mean_turns=fmean(answer.turns for answer in result.answers),
        mean_tokens=fmean(answer.tokens for answer in result.answers),
    )


def group_answers(answers: Iterable[Answer]) -> Mapping[str, list[Answer]]:
    """Answers by question, in the order of their first answers."""
    found: dict[str, list[Answer]] = {}
    for answer in answers:
        found.setdefault(answer.question, []).append(answer)
    return found


def mean_score(answers: Sequence[Answer]) -> float:
    """Mean score of the samples of one question; a failed one scores 0."""
    return sum(answer.score or 0.0 for answer in answers) / len(answers)


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Probability that k of the samples, drawn without replacement, contain a right one."""
    if num_samples - num_right < k:
        return 1.0
    first = num_samples - num_right + 1
    return 1.0 - math.prod(1.0 - k / i for i in range(first, num_samples + 1))


def _pass_at(questions: Iterable[Sequence[Answer]], k: int) -> float:
    return fmean(
        pass_at_k(len(answers), sum(answer.is_right for answer in answers), k)
        for answers in questions
    )


def _ks(samples: int) -> list[int]:
    """1, 2, 4, … and the number of samples itself."""
    powers = [1 << power for power in range(samples.bit_length()) if 1 << power < samples]
    return [*powers, samples]


def clustered_interval(means: Sequence[float], samples: int) -> tuple[float, float]:
    """95 % confidence interval of the mean of per-question means, each from 0 to 1."""
    num_questions = len(means)
    if num_questions < 2:
        return 0.0, 1.0
    if all(mean in (0.0, 1.0) for mean in means):
        return binomial_interval(round(sum(means)), num_questions)
    mean = min(1.0, max(0.0, fmean(means)))
    size = _effective_size(means, mean, samples)
    student = t_quantile(_UPPER, num_questions - 1)
    rarer = num_questions * min(mean, 1.0 - mean)
    if rarer < SCARCE:
        size = min(size, float(num_questions))
    if rarer < FEW:
        return _exact(mean, size * (_Z / student) ** 2)
    # At its bounds the size is known: questions that differ as much as they can, or samples that
    # are independent. Between them it is estimated, hence t.
    is_estimated = num_questions < size < num_questions * samples
    return _wilson(mean, size, student if is_estimated else _Z)


def _effective_size(means: Sequence[float], mean: float, samples: int) -> float:
    """The number of independent right-or-wrong questions with the variance of these means."""
    spread = variance(means, mean)
    if spread <= 1e-12:
        return float(len(means) * samples)
    return min(len(means) * mean * (1.0 - mean) / spread, float(len(means) * samples))


def _wilson(mean: float, size: float, z: float) -> tuple[float, float]:
    share = z * z / size
    centre = (mean + share / 2) / (1 + share)
    half = z / (1 + share) * math.sqrt(mean * (1 - mean) / size + share / (4 * size))
    return max(0.0, centre - half), min(1.0, centre + half)


def _exact(mean: float, size: float) -> tuple[float, float]:
    """Clopper and Pearson's interval; the size need not be a whole number."""
    right, wrong = mean * size, (1.0 - mean) * size
    low = beta_quantile(1 - _UPPER, right, wrong + 1) if right > 0 else 0.0
    high = beta_quantile(_UPPER, right + 1, wrong) if wrong > 0 else 1.0
    return low, high
