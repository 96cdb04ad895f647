# SPDX-License-Identifier: Apache-2.0
"""Whether one version is better than another on the same questions. Pure functions.

Owns every formula about a pair of results. Pairs them by question, which takes the difficulty of
the questions out of the comparison. Refuses results whose questions or scorer differ.

Significance: with one sample of 0 or 1 for each question, McNemar's exact test; otherwise the
paired t-test of the mean scores. The interval of the difference is Agresti and Min's: the
t-interval after half a flip more in each direction, so that it has a width without a flip."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, variance

import msgspec

from penstock.errors import ConfigError
from penstock.evals.distributions import fair_coin_p, t_quantile, t_tails
from penstock.evals.figures import SuiteFigures, figures, group_answers, mean_score
from penstock.evals.results import SuiteResult

SOLVED = 0.5
"""A question counts as right from this mean score of its samples."""
SIGNIFICANT = 0.05


class SuiteComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two results of one suite, `a` before and `b` after."""

    suite: str
    a: SuiteFigures
    b: SuiteFigures
    difference: float
    """`b` minus `a`."""
    interval: tuple[float, float]
    """95 % confidence interval of the difference."""
    p_value: float
    test: str
    """`McNemar, exact` or `paired t`."""
    lost: tuple[str, ...]
    """Questions that `a` got right and `b` wrong."""
    gained: tuple[str, ...]
    """Questions that `a` got wrong and `b` right."""

    @property
    def is_significant(self) -> bool:
        return self.p_value < SIGNIFICANT


def compare_suites(a: SuiteResult, b: SuiteResult) -> SuiteComparison:
    """Compare two results of the same questions."""
    _require_same(a, b)
    before, after = _means(a), _means(b)
    differences = [after[question] - before[question] for question in before]
    is_single = len(before) == len(a.answers) and len(after) == len(b.answers)
    is_binary = all(mean in (0.0, 1.0) for mean in (*before.values(), *after.values()))
    lost, gained = _flips(before, after)
    if is_single and is_binary:
        p_value, test = fair_coin_p(len(lost), len(lost) + len(gained)), "McNemar, exact"
    else:
        p_value, test = paired_t_p(differences), "paired t"
    return SuiteComparison(
        suite=a.suite,
        a=figures(a),
        b=figures(b),
        difference=fmean(differences),
        interval=difference_interval(differences),
        p_value=p_value,
        test=test,
        lost=lost,
        gained=gained,
    )


def _require_same(a: SuiteResult, b: SuiteResult) -> None:
    if a.suite_digest != b.suite_digest or a.scorer != b.scorer:
        raise ConfigError(
            f"suite {a.suite}: the two results are not comparable, because their questions or "
            f"scorers differ (digests {a.suite_digest[:12]} and {b.suite_digest[:12]}, scorers "
            f"{a.scorer} and {b.scorer}); evaluate both again with the same suite"
        )
    if _means(a).keys() != _means(b).keys():
        raise ConfigError(
            f"suite {a.suite}: one of the two results lacks questions of the other, so it is not "
            "complete; repeat its command, which asks only what is missing"
        )


def _means(result: SuiteResult) -> dict[str, float]:
    grouped = group_answers(result.answers)
    return {question: mean_score(answers) for question, answers in grouped.items()}


def _flips(
    before: Mapping[str, float], after: Mapping[str, float]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    lost = (q for q, mean in before.items() if mean >= SOLVED > after[q])
    gained = (q for q, mean in before.items() if mean < SOLVED <= after[q])
    return tuple(lost), tuple(gained)


def paired_t_p(differences: Sequence[float]) -> float:
    """Two-sided p-value of no difference."""
    if len(differences) < 2 or not any(differences):
        return 1.0
    mean, spread = fmean(differences), variance(differences)
    if spread <= 1e-15:
        return 0.0
    return t_tails(mean / math.sqrt(spread / len(differences)), len(differences) - 1)


def difference_interval(differences: Sequence[float]) -> tuple[float, float]:
    """95 % confidence interval of the mean of differences from -1 to 1."""
    size = len(differences) + 2
    mean = sum(differences) / size
    spread = (sum(value * value for value in differences) + 1.0) / size - mean * mean
    half = t_quantile(0.975, size - 1) * math.sqrt(spread / size)
    return max(-1.0, mean - half), min(1.0, mean + half)
