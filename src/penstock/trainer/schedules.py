# SPDX-License-Identifier: Apache-2.0
"""The learning rate as a pure function of the version a step trains from.

Nothing to save and nothing to restore: a restarted trainer computes the same rate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


class Shape(StrEnum):
    CONSTANT = "constant"
    LINEAR = "linear"
    """Falls linearly, to 0 after the last step."""
    COSINE = "cosine"
    """Falls along half a cosine wave, to 0 after the last step."""
    WARMUP_STABLE_DECAY = "warmup_stable_decay"
    """Constant, then falls linearly over the last DECAY_SHARE of the steps, to 0 after the last."""


DECAY_SHARE = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    peak: float
    shape: Shape = Shape.CONSTANT
    warmup_steps: int = 0
    """Rises linearly over this many steps; the first step already has a rate above 0."""
    num_steps: int = 0
    """Of the complete run; a constant rate needs none."""

    def rate(self, number: int) -> float:
        """Of the step that trains from version `number`."""
        if number < self.warmup_steps:
            return self.peak * (number + 1) / self.warmup_steps
        if self.shape is Shape.CONSTANT:
            return self.peak
        left = max(self.num_steps - self.warmup_steps, 1)
        passed = min((number - self.warmup_steps) / left, 1.0)
        if self.shape is Shape.LINEAR:
            return self.peak * (1 - passed)
        if self.shape is Shape.WARMUP_STABLE_DECAY:
            return self.peak * min(1.0, (1 - passed) / DECAY_SHARE)
        return self.peak * (1 + math.cos(math.pi * passed)) / 2
