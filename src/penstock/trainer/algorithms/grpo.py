# SPDX-License-Identifier: Apache-2.0
"""GRPO: advantages relative to the group, PPO's clipped loss; one update per batch."""

from __future__ import annotations

from penstock.config.algorithms import Algorithm
from penstock.trainer.losses.clipped import clipped_loss

ALGORITHM = Algorithm(loss=clipped_loss, minibatches=1, has_ratio_bounds=True)
