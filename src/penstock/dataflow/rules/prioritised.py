# SPDX-License-Identifier: Apache-2.0
"""replay: prioritised. Groups whose rewards differ more are replayed more often.

A group is drawn with probability proportional to (mean |reward − group mean| + epsilon)^alpha,
without replacement."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from statistics import fmean

from pydantic import Field

from penstock.dataflow.rules.replay import ReplayRule
from penstock.types import Candidate, RandomDraw


class Prioritised(ReplayRule):
    """Replay groups by the spread of their rewards."""

    name = "prioritised"

    alpha: float = Field(default=0.6, ge=0, le=10)
    """0 draws evenly, 1 in proportion."""
    epsilon: float = Field(default=1e-3, gt=0)
    """Weight of a group with equal rewards."""

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
        return (fmean(abs(reward - mean) for reward in rewards) + self.epsilon) ** self.alpha


RULE = Prioritised
