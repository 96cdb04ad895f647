# SPDX-License-Identifier: Apache-2.0
"""How well scores agree with labels: mean absolute error, rank correlation, calibration.

N = steps, B = bins."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.trainer.arrays import Floats

NUM_BINS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationBin:
    """Steps whose scores are in one tenth of the range."""

    low: float
    high: float
    num_steps: int
    mean_score: float
    mean_label: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Of scores with labels, over steps that the model was not trained on."""

    num_steps: int
    num_trajectories: int
    mae: float
    """Mean absolute error."""
    constant_mae: float
    """The same of a model that always gives the mean label of the training steps."""
    spearman: float
    """Rank correlation; 0 if scores or labels are all alike."""
    calibration: tuple[CalibrationBin, ...]
    """Empty bins are left out."""


def compare_with_labels(
    scores_N: Floats, labels_N: Floats, *, num_trajectories: int, constant: float
) -> Agreement:
    """`constant`: the mean label of the steps that were trained on."""
    return Agreement(
        num_steps=scores_N.size,
        num_trajectories=num_trajectories,
        mae=float(np.abs(scores_N - labels_N).mean()) if scores_N.size else 0.0,
        constant_mae=float(np.abs(constant - labels_N).mean()) if scores_N.size else 0.0,
        spearman=spearman(scores_N, labels_N),
        calibration=calibrate(scores_N, labels_N),
    )


def spearman(first_N: Floats, second_N: Floats) -> float:
    """Correlation of ranks, equal values sharing the mean of theirs."""
    first_N, second_N = _ranks(first_N), _ranks(second_N)
    if first_N.size < 2 or first_N.std() == 0 or second_N.std() == 0:
        return 0.0
    return float(np.corrcoef(first_N, second_N)[0, 1])


def calibrate(scores_N: Floats, labels_N: Floats) -> tuple[CalibrationBin, ...]:
    """Mean label by tenth of the score."""
    bins_N = np.clip((scores_N * NUM_BINS).astype(np.int64), 0, NUM_BINS - 1)
    return tuple(
        CalibrationBin(
            low=index / NUM_BINS,
            high=(index + 1) / NUM_BINS,
            num_steps=int(np.count_nonzero(bins_N == index)),
            mean_score=float(scores_N[bins_N == index].mean()),
            mean_label=float(labels_N[bins_N == index].mean()),
        )
        for index in np.unique(bins_N).tolist()
    )


def _ranks(values_N: Floats) -> Floats:
    _, group_N, counts_B = np.unique(values_N, return_inverse=True, return_counts=True)
    ends_B = np.cumsum(counts_B)
    means_B = ends_B - (counts_B - 1) / 2
    return means_B[group_N]
