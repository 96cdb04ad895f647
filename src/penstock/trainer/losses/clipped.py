# SPDX-License-Identifier: Apache-2.0
"""PPO's clipped loss, which most algorithms share.

A loss is a frozen record of its few numbers that, called with `Tokens`, returns one loss per token.
It does not know denominators (aggregation.py), a reference (divergence.py) or engine mismatch
(mismatch.py). Losses of one algorithm are in its module of `algorithms/`.

K = trained tokens of a micro-batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.trainer.losses.ratios import RatioAgainst, clip_loss, policy_log_ratio
from penstock.trainer.losses.tokens import TokenLoss, Tokens

if TYPE_CHECKING:
    from penstock.config import AlgorithmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedLoss:
    """PPO's clipped objective; GRPO, Dr.GRPO, RLOO and DAPO differ only in their advantages, bounds
    and denominators."""

    epsilon: float = 0.2
    """No gain from a ratio below 1 - epsilon."""
    epsilon_high: float = 0.2
    """No gain from a ratio above 1 + epsilon_high."""
    delta: float = math.inf
    """Dual clip: the ratio of a token with negative advantage counts as at most this, so that every
    loss is bounded."""
    ratio_against: RatioAgainst = RatioAgainst.SAMPLING

    def __call__(self, tokens: Tokens) -> TokenLoss:
        ratio_K = policy_log_ratio(tokens, self.ratio_against).exp()
        return clip_loss(tokens, ratio_K, self.epsilon, self.epsilon_high, delta=self.delta)


def clip_bounds(config: AlgorithmConfig) -> tuple[float, float]:
    """(epsilon, epsilon_high) with the default of the second filled in."""
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    return config.epsilon, high


def clipped_loss(config: AlgorithmConfig) -> ClippedLoss:
    """The clipped loss with the numbers of a run file."""
    epsilon, epsilon_high = clip_bounds(config)
    return ClippedLoss(
        epsilon=epsilon,
        epsilon_high=epsilon_high,
        delta=math.inf if config.delta is None else config.delta,
        ratio_against=RatioAgainst(config.ratio_against),
    )
