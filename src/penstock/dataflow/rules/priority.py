# SPDX-License-Identifier: Apache-2.0
"""select: priority. The most instructive groups first; equal ones by deadline."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Literal

from penstock.dataflow.rules.rule import Rule
from penstock.types import Candidate, Hook


class Priority(Rule):
    """Most instructive groups first."""

    hook = Hook.SELECT
    name = "priority"

    by: Literal["spread", "middle"] = "spread"
    """spread: largest standard deviation of the rewards first; middle: mean reward nearest to 0.5
    first."""

    def choose(self, ready: Sequence[Candidate], count: int) -> Sequence[Candidate]:
        cost = _distance_from_middle if self.by == "middle" else _negative_spread

        def order(group: Candidate) -> tuple[float, int, int]:
            return cost(group.rewards), group.oldest, group.arrival

        return sorted(ready, key=order)[:count]


def _negative_spread(rewards: Sequence[float]) -> float:
    return -pstdev(rewards)


def _distance_from_middle(rewards: Sequence[float]) -> float:
    return abs(fmean(rewards) - 0.5)


RULE = Priority
