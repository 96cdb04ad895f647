# SPDX-License-Identifier: Apache-2.0
"""DAPO: a higher upper clip, a penalty for overlong answers, and no groups without spread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.config.algorithms import (
    Algorithm,
    StageEntry,
    advantage_entry,
    stage_entry,
    train_entry,
)
from penstock.config.rules import RuleConfig
from penstock.trainer.losses.clipped import clipped_loss

if TYPE_CHECKING:
    from penstock.config import AlgorithmConfig

OVERLONG_MARGIN = 0.25
"""Share of the longest answer over which the penalty grows from 0 to -1."""


def _stages(config: AlgorithmConfig, max_tokens: int) -> list[StageEntry]:
    margin = max(1, int(max_tokens * OVERLONG_MARGIN))
    options = {"how": "both", "max_length": max_tokens, "margin": margin}
    reads, writes = ["turns", "reward", "truncated"], ["shaped_reward", "excluded"]
    return [
        stage_entry("overlong", "compute", "overlong", reads, writes, options=options),
        {**advantage_entry(reads="shaped_reward"), "rename": {"shaped_reward": "reward"}},
        train_entry("excluded"),
    ]


ALGORITHM = Algorithm(
    loss=clipped_loss,
    stages=_stages,
    preset={"epsilon": 0.2, "epsilon_high": 0.28, "beta": 0.0, "aggregation": "token-mean"},
    rules=(RuleConfig(admit="reward-spread"),),
    has_ratio_bounds=True,
)
