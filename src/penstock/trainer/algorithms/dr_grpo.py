# SPDX-License-Identifier: Apache-2.0
"""Dr.GRPO: rewards minus the group's mean, every sequence divided by the same constant."""

from __future__ import annotations

from penstock.config.algorithms import Algorithm, advantage_entry, train_entry
from penstock.trainer.losses.clipped import clipped_loss

ALGORITHM = Algorithm(
    loss=clipped_loss,
    stages=lambda config, max_tokens: [advantage_entry("centred_advantage"), train_entry()],
    preset={"aggregation": "fixed-constant"},
    minibatches=1,
    has_ratio_bounds=True,
)
