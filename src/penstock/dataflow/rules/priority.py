# SPDX-License-Identifier: Apache-2.0
"""select: priority. The most instructive groups first; equal ones by deadline.

`by: spread` prefers a large standard deviation of the rewards, `by: middle` a mean reward near
0.5."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from statistics import fmean, pstdev
from typing import Any

from penstock.types import Candidate


class Priority:
    def __init__(self, state: MutableMapping[str, Any], *, by: str = "spread") -> None:
        self._cost = _distance_from_middle if by == "middle" else _negative_spread

    def choose(self, ready: Sequence[Candidate], count: int) -> Sequence[Candidate]:
        def order(group: Candidate) -> tuple[float, int, int]:
            return self._cost(group.rewards), group.oldest, group.arrival

        return sorted(ready, key=order)[:count]


def _negative_spread(rewards: Sequence[float]) -> float:
    return -pstdev(rewards)


def _distance_from_middle(rewards: Sequence[float]) -> float:
    return abs(fmean(rewards) - 0.5)
