# SPDX-License-Identifier: Apache-2.0
"""admit: reward-spread. Dynamic sampling: only groups whose rewards differ carry a learning signal.

Each role of the policy is compared with itself; one that differs is enough. Nothing refills the
batch: pacing counts refused groups in its yield and starts more work."""

from __future__ import annotations

from pydantic import Field

from penstock.dataflow.rules.rule import Rule
from penstock.types import DropReason, Hook, JudgedGroup


class RewardSpread(Rule):
    """Refuse groups with a uniform reward."""

    hook = Hook.ADMIT
    name = "reward-spread"

    same_reward: float = Field(default=1e-6, ge=0)
    """Largest difference at which rewards count as equal."""

    def judge(self, group: JudgedGroup) -> DropReason | None:
        spreads = (max(rewards) - min(rewards) for rewards in group.role_rewards.values())
        is_uniform = max(spreads, default=0.0) <= self.same_reward
        return DropReason.UNIFORM_REWARD if is_uniform else None


RULE = RewardSpread
