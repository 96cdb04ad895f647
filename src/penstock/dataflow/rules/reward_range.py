# SPDX-License-Identifier: Apache-2.0
"""admit: reward-range. The mean reward of a group must lie between two bounds, both included."""

from __future__ import annotations

from collections.abc import MutableMapping
from math import inf
from typing import Any

from penstock.types import DropReason, JudgedGroup


class RewardRange:
    def __init__(
        self,
        state: MutableMapping[str, Any],
        *,
        low: float | None = None,
        high: float | None = None,
    ) -> None:
        self._low = -inf if low is None else low
        self._high = inf if high is None else high

    def judge(self, group: JudgedGroup) -> DropReason | None:
        mean = sum(group.rewards) / max(1, len(group.rows))
        return None if self._low <= mean <= self._high else DropReason.REWARD_RANGE
