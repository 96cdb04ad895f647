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

from penstock.trainer.losses.ratios import (
    RatioAgainst,
    clip_loss,
    clipped_tokens,
    policy_log_ratio,
    ratio_metrics,
)
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

    def __post_init__(self) -> None:
        if self.delta < 1 + self.epsilon_high:
            raise ValueError(
                f"delta {self.delta} must not be below 1 + epsilon_high ({1 + self.epsilon_high}): "
                "it bounds what the ordinary clip leaves open; 3 is usual"
            )

    def __call__(self, tokens: Tokens) -> TokenLoss:
        log_ratio_K = policy_log_ratio(tokens, self.ratio_against)
        ratio_K = log_ratio_K.exp().clamp(max=self.delta)
        loss_K = clip_loss(ratio_K, tokens.advantages_K, self.epsilon, self.epsilon_high)
        ratio_K = log_ratio_K.exp()
        low_K, high_K = clipped_tokens(
            ratio_K, tokens.advantages_K, self.epsilon, self.epsilon_high
        )
        high_K = high_K | ((ratio_K > self.delta) & (tokens.advantages_K < 0))
        return TokenLoss(loss_K=loss_K, metrics=ratio_metrics(tokens, low_K, high_K))


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
