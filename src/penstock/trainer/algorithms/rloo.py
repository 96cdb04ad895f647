# SPDX-License-Identifier: Apache-2.0
"""RLOO: each reward minus the mean of the group's other members, with a KL penalty."""

from __future__ import annotations

from penstock.config.algorithms import Algorithm, advantage_entry, train_entry
from penstock.trainer.losses.clipped import clipped_loss

ALGORITHM = Algorithm(
    loss=clipped_loss,
    stages=lambda config, max_tokens: [advantage_entry("leave_one_out_advantage"), train_entry()],
    preset={"beta": 1e-3},
    has_ratio_bounds=True,
)
