# SPDX-License-Identifier: Apache-2.0
"""replay: prioritised. Groups whose rewards differ more are served again more often.

A group is drawn with probability proportional to (mean |reward − group mean| + epsilon)^alpha,
without putting it back."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import MutableMapping, Sequence
from itertools import accumulate
from statistics import fmean
from typing import Any

from penstock.types import Candidate, RandomDraw


class Prioritised:
    def __init__(
        self,
        state: MutableMapping[str, Any],
        *,
        ratio: float = 0.3,
        max_uses: int = 4,
        max_staleness: int | None = None,
        alpha: float = 0.6,
        epsilon: float = 1e-3,
    ) -> None:
        self.ratio = ratio
        self.max_uses = max_uses
        self.max_staleness = max_staleness
        self._alpha = alpha
        self._epsilon = epsilon

    def choose(
        self, pool: Sequence[Candidate], count: int, draw: RandomDraw
    ) -> Sequence[Candidate]:
        left = list(pool)
        weights = [self._weight(group.rewards) for group in left]
        chosen: list[Candidate] = []
        for _ in range(min(count, len(left))):
            bounds = list(accumulate(weights))
            at = bisect_right(bounds, draw() * bounds[-1], hi=len(left) - 1)
            chosen.append(left.pop(at))
            weights.pop(at)
        return chosen

    def _weight(self, rewards: Sequence[float]) -> float:
        mean = fmean(rewards)
        return (fmean(abs(reward - mean) for reward in rewards) + self._epsilon) ** self._alpha
