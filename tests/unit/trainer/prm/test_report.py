# SPDX-License-Identifier: Apache-2.0
"""Agreement of scores and labels, against pandas and by hand."""

from __future__ import annotations

import numpy as np
import pytest
from pandas import DataFrame

from penstock.trainer.prm.report import calibrate, compare_with_labels, spearman


@pytest.mark.parametrize("num_levels", [3, 50])
def test_rank_correlation_with_ties(num_levels: int) -> None:
    draw = np.random.default_rng(num_levels)
    first = draw.integers(0, num_levels, 200) / num_levels
    second = np.round(0.5 * first + draw.uniform(0, 1, 200), 1)
    table = DataFrame({"first": first, "second": second}).corr("spearman")
    assert spearman(first, second) == pytest.approx(table.loc["first", "second"])


def test_rank_correlation_of_constants_is_0() -> None:
    assert spearman(np.ones(5), np.arange(5.0)) == 0.0
    assert spearman(np.zeros(0), np.zeros(0)) == 0.0


def test_calibration_by_tenths() -> None:
    low, high = calibrate(np.array([0.05, 0.95, 1.0, 0.9]), np.array([0.0, 1.0, 0.5, 0.6]))
    assert (low.low, low.num_steps, low.mean_label) == (0.0, 1, 0.0)
    assert (high.low, high.num_steps) == (0.9, 3)
    assert high.mean_score == pytest.approx(0.95) and high.mean_label == pytest.approx(0.7)


def test_errors_beside_those_of_a_constant() -> None:
    found = compare_with_labels(
        np.array([0.1, 0.9]), np.array([0.0, 1.0]), num_trajectories=1, constant=0.5
    )
    assert found.mae == pytest.approx(0.1) and found.constant_mae == pytest.approx(0.5)
