# SPDX-License-Identifier: Apache-2.0
"""Dr.GRPO: rewards minus the group's mean, every sequence divided by the same constant."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.config.algorithms import Algorithm, StageEntry, advantage_entry, train_entry
from penstock.trainer.losses.clipped import clipped_loss

if TYPE_CHECKING:
    from penstock.config import AlgorithmConfig


def _stages(config: AlgorithmConfig, max_tokens: int) -> list[StageEntry]:
    return [advantage_entry("centred_advantage"), train_entry()]


ALGORITHM = Algorithm(
    loss=clipped_loss,
    stages=_stages,
    preset={"aggregation": "fixed-constant"},
    minibatches=1,
    has_ratio_bounds=True,
)
