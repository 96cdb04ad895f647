# SPDX-License-Identifier: Apache-2.0
"""DAPO's treatment of answers that are too long: masked, penalised, or both.

Comes before any comparison: a penalty shifts the group's mean, and a masked row has no reward
(NaN), so it counts in no statistics, and its tokens are not trained.

R = rows of the manifest.
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class Overlong(StrEnum):
    MASK = "mask"
    """Truncated answers are masked."""
    PUNISH = "punish"
    """Answers near the limit, or over it, lose reward."""
    BOTH = "both"
    """Truncated answers are masked; others near the limit lose reward."""


def shape_overlong(
    rewards_R: Floats,
    lengths_R: Ints,
    is_truncated_R: Bools,
    *,
    how: Overlong,
    max_length: int,
    margin: int,
) -> tuple[Floats, Bools]:
    """(rewards to compare, rows whose tokens are masked). An answer may have `max_length` tokens,
    margin included; over the last `margin` of them the penalty grows from 0 to -1."""
    is_excluded_R = is_truncated_R & (how is not Overlong.PUNISH)
    if how is not Overlong.MASK:
        rewards_R = rewards_R + overlong_penalty(lengths_R, max_length, margin)
    return np.where(is_excluded_R, np.nan, rewards_R), is_excluded_R


def overlong_penalty(lengths_R: Ints, max_length: int, margin: int) -> Floats:
    """0 up to the margin, then falling evenly to -1 at the limit, and -1 beyond."""
    return np.clip((max_length - margin - lengths_R) / margin, -1.0, 0.0)
