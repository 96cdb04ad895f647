# SPDX-License-Identifier: Apache-2.0
"""Figures against enumeration and exact statistics."""

from collections.abc import Mapping, Sequence
from itertools import combinations

import pytest
from tests.unit.evals import exact_statistics as exact

from penstock.evals.distributions import beta_cdf, beta_quantile, fair_coin_p, t_quantile, t_tails
from penstock.evals.figures import clustered_interval, figures, pass_at_k
from penstock.evals.results import Answer, SuiteResult


def result_of(scores: Mapping[str, Sequence[float | None]], digest: str = "d") -> SuiteResult:
    return SuiteResult(
        suite="s",
        scorer="exact",
        suite_digest=digest,
        policy="policy",
        version=0,
        samples=max(map(len, scores.values())),
        temperature=0.6,
        answers=tuple(
            Answer(question=q, sample=i, seed=i, score=score, turns=2 + i, tokens=10 * i)
            for q, found in scores.items()
            for i, score in enumerate(found)
        ),
    )


def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample() -> None:
    for n in range(1, 9):
        for c in range(n + 1):
            for k in range(1, n + 1):
                subsets = list(combinations([True] * c + [False] * (n - c), k))
                share = sum(map(any, subsets)) / len(subsets)
                assert pass_at_k(n, c, k) == pytest.approx(share, abs=1e-12), (n, c, k)


def test_failed_attempts_count_as_wrong() -> None:
    found = figures(result_of({"q0": [1.0, None], "q1": [None, None], "q2": [1.0, 1.0]}))
    assert found.avg == pytest.approx((0.5 + 0 + 1) / 3)
    assert found.failed == 3
    assert found.pass_at == {1: pytest.approx(0.5), 2: pytest.approx(2 / 3)}
    assert (found.questions, found.samples) == (3, 2)
    assert (found.mean_turns, found.mean_tokens) == (2.5, 5.0)


def test_a_partial_score_counts_for_the_average_and_not_as_right() -> None:
    found = figures(result_of({"q0": [0.5, 0.5], "q1": [0.0, 1.0]}))
    assert found.avg == 0.5
    assert found.pass_at == {1: pytest.approx(0.25), 2: 0.5}


def test_more_samples_of_the_same_questions_do_not_narrow_the_interval() -> None:
    """The samples of one question are alike: they say nothing about other questions."""
    once = figures(result_of({f"q{i}": [float(i % 2)] for i in range(60)}))
    often = figures(result_of({f"q{i}": [float(i % 2)] * 16 for i in range(60)}))
    assert often.interval == pytest.approx(once.interval)
    low, high = once.interval
    assert 0.23 < high - low < 0.27


def test_interval_of_equal_scores_has_a_width() -> None:
    low, high = clustered_interval([0.0] * 20, 4)
    assert low == 0.0
    assert 0.13 < high < 0.25
    low, high = clustered_interval([1.0] * 20, 4)
    assert high == 1.0
    assert 0.75 < low < 0.87
    assert clustered_interval([1.0], 4) == (0.0, 1.0)


def test_a_result_without_answers_has_no_figures() -> None:
    empty = result_of({"q0": []})
    with pytest.raises(ValueError, match="no answers"):
        figures(empty)


@pytest.mark.parametrize(("a", "b"), [(0.5, 0.5), (3.2, 50.0), (40.0, 0.7), (700.0, 900.0)])
def test_beta_is_exact(a: float, b: float) -> None:
    for share in (0.001, 0.025, 0.5, 0.975, 0.999):
        assert beta_quantile(share, a, b) == pytest.approx(
            exact.beta_quantile(share, a, b), abs=1e-9
        )
    for x in (0.0, 0.01, 0.3, 0.7, 0.99, 1.0):
        assert beta_cdf(x, a, b) == pytest.approx(exact.beta_cdf(x, a, b), abs=1e-10)


@pytest.mark.parametrize("degrees", [1, 2, 7, 49, 1000])
def test_t_is_exact(degrees: int) -> None:
    assert exact.t_tails(t_quantile(0.975, degrees), degrees) == pytest.approx(0.05, rel=1e-6)
    for t in (-3.0, 0.0, 0.4, 2.0, 12.0):
        assert t_tails(t, degrees) == pytest.approx(exact.t_tails(t, degrees), rel=1e-8, abs=1e-12)


def test_coin_is_exact() -> None:
    for tosses in (1, 2, 9, 40, 1500):
        for heads in {0, 1, tosses // 3, tosses // 2, tosses}:
            expected = exact.fair_coin_p(heads, tosses)
            assert fair_coin_p(heads, tosses) == pytest.approx(expected, rel=1e-9)
    assert fair_coin_p(0, 0) == 1.0
