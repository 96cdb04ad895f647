# SPDX-License-Identifier: Apache-2.0
"""REINFORCE: the batch is the baseline, so groups of one have a learning signal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.config.algorithms import Algorithm, StageEntry, advantage_entry, train_entry
from penstock.trainer.losses.clipped import clipped_loss

if TYPE_CHECKING:
    from penstock.config import AlgorithmConfig


def _stages(config: AlgorithmConfig, max_tokens: int) -> list[StageEntry]:
    return [advantage_entry("batch_advantage"), train_entry()]


ALGORITHM = Algorithm(
    loss=clipped_loss,
    stages=_stages,
    minibatches=1,
    is_group_relative=False,
    has_ratio_bounds=True,
)
