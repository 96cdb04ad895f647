# SPDX-License-Identifier: Apache-2.0
"""Comparisons of two results of one suite, against exact statistics."""

import random

import pytest
from tests.unit.evals import exact_statistics as exact
from tests.unit.evals.test_figures import result_of

from penstock.errors import ConfigError
from penstock.evals.comparison import compare_suites, difference_interval, paired_t_p


def test_one_sample_uses_the_exact_test_of_the_flips() -> None:
    before = result_of({f"q{i}": [float(i < 10)] for i in range(30)})
    after = result_of({f"q{i}": [float(2 <= i < 21)] for i in range(30)})
    found = compare_suites(before, after)
    assert found.test == "McNemar, exact"
    assert found.lost == ("q0", "q1")
    assert found.gained == tuple(f"q{i}" for i in range(10, 21))
    assert found.p_value == pytest.approx(exact.fair_coin_p(2, 13))
    assert found.is_significant
    assert found.difference == pytest.approx(9 / 30)
    low, high = found.interval
    assert 0 < low < 9 / 30 < high < 0.6


def test_several_samples_use_the_paired_t_test() -> None:
    rng = random.Random(3)
    before = {f"q{i}": [float(rng.random() < i / 40) for _ in range(4)] for i in range(40)}
    after = {q: [float(score or rng.random() < 0.1) for score in v] for q, v in before.items()}
    found = compare_suites(result_of(before), result_of(after))
    means = [[sum(v) / 4 for v in side.values()] for side in (after, before)]
    assert found.test == "paired t"
    assert found.p_value == pytest.approx(exact.paired_p(*means), rel=1e-9)


def test_pairs_count_and_not_the_two_means() -> None:
    """A small gain on each question is significant; between unpaired questions it would drown."""
    before = {f"q{i}": [float(s < i % 5) for s in range(5)] for i in range(20)}
    after = {f"q{i}": [float(s < i % 5 + (i % 2)) for s in range(5)] for i in range(20)}
    found = compare_suites(result_of(before), result_of(after))
    means = [[sum(v) / 5 for v in side.values()] for side in (after, before)]
    assert found.p_value < 0.001
    assert exact.unpaired_p(*means) > 0.2


def test_no_change_is_not_significant_and_has_a_width() -> None:
    same = result_of({f"q{i}": [1.0] for i in range(20)})
    found = compare_suites(same, same)
    assert (found.p_value, found.difference, found.lost, found.gained) == (1.0, 0.0, (), ())
    assert found.interval[0] < -0.03 < 0.03 < found.interval[1]
    assert paired_t_p([0.5]) == 1.0
    assert difference_interval([1.0] * 4)[1] == 1.0


def test_other_questions_are_refused() -> None:
    a, b = result_of({"q0": [1.0]}, digest="aaa"), result_of({"q0": [1.0]}, digest="bbb")
    with pytest.raises(ConfigError, match="not comparable"):
        compare_suites(a, b)


def test_an_incomplete_result_is_refused() -> None:
    a, b = result_of({"q0": [1.0], "q1": [1.0]}), result_of({"q0": [1.0]})
    with pytest.raises(ConfigError, match="lacks questions"):
        compare_suites(a, b)
