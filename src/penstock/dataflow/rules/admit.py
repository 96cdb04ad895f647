# SPDX-License-Identifier: Apache-2.0
"""May this closed group enter? Answers None for yes, or the reason it is dropped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from penstock.types import DropReason, RowSummary

Admit = Callable[[Sequence[RowSummary]], DropReason | None]

SAME_REWARD = 1e-6
"""Rewards closer than this are equal: no advantage can be told from them."""


def everything(rows: Sequence[RowSummary]) -> DropReason | None:
    return None


def reward_spread(rows: Sequence[RowSummary]) -> DropReason | None:
    """Dynamic sampling: only groups whose members differ teach anything."""
    rewards = [row.reward for row in rows]
    return None if max(rewards) - min(rewards) > SAME_REWARD else DropReason.UNIFORM_REWARD


ADMIT: Mapping[str, Admit] = {"all": everything, "reward-spread": reward_spread}
