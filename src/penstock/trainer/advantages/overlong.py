# SPDX-License-Identifier: Apache-2.0
"""DAPO's treatment of answers that are too long: masked, penalised, or both.

Comes before any comparison: a penalty shifts the group's mean, and a masked row has no reward
(NaN), so it counts in no statistics, and its tokens are not trained.

R = rows of the manifest.
"""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlongPenalty:
    how: Overlong
    max_length: int
    """Tokens an answer may have, the margin included."""
    margin: int
    """Over the last `margin` tokens before the limit the penalty grows from 0 to -1."""

    def __post_init__(self) -> None:
        if not 0 < self.margin <= self.max_length:
            raise ValueError(
                f"the margin of {self.margin} tokens must be above 0 and within the "
                f"{self.max_length} that an answer may have"
            )

    def __call__(
        self, rewards_R: Floats, lengths_R: Ints, is_truncated_R: Bools
    ) -> tuple[Floats, Bools]:
        """(rewards to compare, rows whose tokens are masked)."""
        is_excluded_R = is_truncated_R & (self.how is not Overlong.PUNISH)
        if self.how is not Overlong.MASK:
            rewards_R = rewards_R + overlong_penalty(lengths_R, self.max_length, self.margin)
        return np.where(is_excluded_R, np.nan, rewards_R), is_excluded_R


def overlong_penalty(lengths_R: Ints, max_length: int, margin: int) -> Floats:
    """0 up to the margin, then falling evenly to -1 at the limit, and -1 beyond."""
    return np.clip((max_length - margin - lengths_R) / margin, -1.0, 0.0)
