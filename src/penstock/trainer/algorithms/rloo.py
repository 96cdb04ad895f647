# SPDX-License-Identifier: Apache-2.0
"""RLOO: each reward minus the mean of the group's other members, with a KL penalty."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.config.algorithms import Algorithm, StageEntry, advantage_entry, train_entry
from penstock.trainer.losses.clipped import clipped_loss

if TYPE_CHECKING:
    from penstock.config import AlgorithmConfig


def _stages(config: AlgorithmConfig, max_tokens: int) -> list[StageEntry]:
    return [advantage_entry("leave_one_out_advantage"), train_entry()]


ALGORITHM = Algorithm(
    loss=clipped_loss,
    stages=_stages,
    preset={"beta": 1e-3},
    has_ratio_bounds=True,
)
