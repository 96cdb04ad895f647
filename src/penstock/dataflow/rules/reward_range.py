# SPDX-License-Identifier: Apache-2.0
"""admit: reward-range. The mean reward of a group must lie between two bounds, both included; if
a policy has several roles, one of them is enough."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from penstock.dataflow.rules.rule import Rule
from penstock.options import Contradiction
from penstock.types import DropReason, Hook, JudgedGroup


class RewardRange(Rule):
    """Admit groups by their mean reward."""

    hook = Hook.ADMIT
    name = "reward-range"

    low: float | None = None
    """Smallest mean reward; null for no bound."""
    high: float | None = None
    """Largest mean reward; null for no bound."""

    def _contradictions(self) -> Iterator[Contradiction]:
        if self.low is None and self.high is None:
            text = "low and high are both null, so nothing is refused; set one of them"
        elif self.low is not None and self.high is not None and self.low > self.high:
            text = f"low {self.low} is above high {self.high}; set low <= high"
        else:
            return
        yield Contradiction(text=text, keys=(("low",), ("high",), ()))

    def judge(self, group: JudgedGroup) -> DropReason | None:
        means = [sum(rewards) / len(rewards) for rewards in group.role_rewards.values()] or [0.0]
        low = -inf if self.low is None else self.low
        high = inf if self.high is None else self.high
        is_inside = any(low <= mean <= high for mean in means)
        return None if is_inside else DropReason.REWARD_RANGE


RULE = RewardRange
