# SPDX-License-Identifier: Apache-2.0
"""admit: reward-spread. Dynamic sampling: only groups whose members differ teach anything.

What it refuses is made up for by pacing, whose yield counts it: there is no loop that refills."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from penstock.types import DropReason, JudgedGroup


class RewardSpread:
    def __init__(self, state: MutableMapping[str, Any], *, same_reward: float = 1e-6) -> None:
        self._same_reward = same_reward

    def judge(self, group: JudgedGroup) -> DropReason | None:
        spread = max(group.rewards, default=0.0) - min(group.rewards, default=0.0)
        return None if spread > self._same_reward else DropReason.UNIFORM_REWARD
