# SPDX-License-Identifier: Apache-2.0
"""How many values lie below each bound: what a Prometheus histogram needs, counted as rows pass."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

REWARDS = (-1.0, -0.5, 0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 2.0, 5.0, 10.0)
AGES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)


class Histogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        """Of all values."""

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """(bound, values up to it) for each bound, the last for all."""
        names = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        return [*zip(names, map(float, accumulate(self._counts)), strict=True)]
