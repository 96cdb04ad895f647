# SPDX-License-Identifier: Apache-2.0
"""REINFORCE: the batch is the baseline, so groups of one have a learning signal."""

from __future__ import annotations

from penstock.config.algorithms import Algorithm, advantage_entry, train_entry
from penstock.trainer.losses.clipped import clipped_loss

ALGORITHM = Algorithm(
    loss=clipped_loss,
    stages=lambda config, max_tokens: [advantage_entry("batch_advantage"), train_entry()],
    minibatches=1,
    is_group_relative=False,
    has_ratio_bounds=True,
)
