# SPDX-License-Identifier: Apache-2.0
"""PPO with a critic, and a KL penalty."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.config.algorithms import (
    CLIPPED_LOSS_KEYS,
    Algorithm,
    StageEntry,
    stage_entry,
    train_entry,
)
from penstock.trainer.losses.clipped import clipped_loss

if TYPE_CHECKING:
    from penstock.config import AlgorithmConfig


def _stages(config: AlgorithmConfig, max_tokens: int) -> list[StageEntry]:
    options = {"gamma": config.gamma, "lam": config.lam, "normalise": True}
    reads, writes = ["reward", "values"], ["advantage", "returns"]
    return [
        stage_entry("values", "infer", "critic", ["turns"], ["values"]),
        stage_entry("advantage", "compute", "critic", reads, writes, options=options),
        stage_entry("train_critic", "train", "critic", ["turns", "values", "returns"], []),
        train_entry(),
    ]


ALGORITHM = Algorithm(
    loss=clipped_loss,
    stages=_stages,
    keys=CLIPPED_LOSS_KEYS | {"gamma", "lam"},
    preset={"beta": 1e-3},
    is_group_relative=False,
    has_ratio_bounds=True,
)
