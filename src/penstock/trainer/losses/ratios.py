# SPDX-License-Identifier: Apache-2.0
"""Probability ratios of tokens, and the metrics that every policy loss reports about them.

Against the sampling log-probs, a ratio bounds the distance from the policy that sampled, staleness
and engine mismatch included; against the proximal ones, it bounds the distance moved in this step.
Uses tensor methods only, so that importing it does not import torch.

K = trained tokens of a micro-batch, S = its sequences.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import TYPE_CHECKING

from penstock.trainer.losses.tokens import TokenLoss, Tokens

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Far beyond every clip, and its exponential can still be summed."""


class RatioAgainst(StrEnum):
    """Whose log-probs are the denominator of a ratio."""

    SAMPLING = "sampling"
    """The engine's, recorded when it sampled. Costs no forward pass."""
    PROXIMAL = "proximal"
    """The trainer's, under the weights at the start of the step."""


def log_ratio(logprobs_K: Tensor, behaviour_K: Tensor) -> Tensor:
    """Log-ratio of the current policy to the one that sampled, bounded: one absurd record, with a
    log-prob of -1e38, must not make the gradient of all others NaN. Beyond the bound a token has no
    gradient."""
    return (logprobs_K - behaviour_K).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def k3(log_ratio_K: Tensor) -> Tensor:
    """Estimate by token of the KL from the policy below the ratio, which sampled, to the one above:
    never negative, unbiased."""
    return log_ratio_K.exp() - 1 - log_ratio_K


def policy_log_ratio(tokens: Tokens, against: RatioAgainst) -> Tensor:
    """Log-ratio of the current policy to the chosen one."""
    if against is RatioAgainst.SAMPLING:
        return log_ratio(tokens.logprobs_K, tokens.sampling_K)
    return log_ratio(tokens.logprobs_K, require_proximal(tokens, "a ratio against proximal"))


def require_proximal(tokens: Tokens, reader: str) -> Tensor:
    """The trainer's log-probs at the start of the step, without gradient."""
    if tokens.proximal_K is None:
        raise ValueError(
            f"{reader} reads the token column proximal_logprobs, and no stage has written it; "
            "add an infer stage of the actor before training, or take ratios against sampling"
        )
    return tokens.proximal_K.detach()


def clip_loss(
    tokens: Tokens, ratio_K: Tensor, low: float, high: float, *, delta: float = math.inf
) -> TokenLoss:
    """PPO's pessimistic loss with the ratio clipped to [1 - low, 1 + high]; `delta` bounds the
    ratio of tokens with negative advantage."""
    advantages_K = tokens.advantages_K
    counted_K = ratio_K.clamp(max=delta)
    bounded_K = counted_K.clamp(1 - low, 1 + high)
    loss_K = -(counted_K * advantages_K).minimum(bounded_K * advantages_K)
    is_low_K = (ratio_K < 1 - low) & (advantages_K < 0)
    is_high_K = (ratio_K > 1 + high) & (advantages_K > 0)
    is_high_K = is_high_K | ((ratio_K > delta) & (advantages_K < 0))
    return TokenLoss(loss_K=loss_K, metrics=ratio_metrics(tokens, is_low_K, is_high_K))


def ratio_metrics(tokens: Tokens, low_K: Tensor, high_K: Tensor) -> dict[str, Tensor]:
    """Metrics of every policy loss: where its bounds apply, and how far the weights are from those
    that sampled. Effective sample share = `ratio` mean² / `ratio/square` mean."""
    log_ratio_K = log_ratio(tokens.logprobs_K.detach(), tokens.sampling_K.detach())
    ratio_K = log_ratio_K.exp()
    return {
        "clip_ratio/low": low_K.to(ratio_K.dtype),
        "clip_ratio/high": high_K.to(ratio_K.dtype),
        "kl": k3(log_ratio_K),
        "ratio": ratio_K,
        "ratio/square": ratio_K**2,
    }


def sequence_means(values_K: Tensor, sequences_K: Tensor) -> Tensor:
    """Mean over the tokens of each sequence (S)."""
    return sequence_sums(values_K, sequences_K) / sequence_sums(
        values_K.new_ones(values_K.shape), sequences_K
    )


def sequence_sums(values_K: Tensor, sequences_K: Tensor) -> Tensor:
    """Sum over the tokens of each sequence (S)."""
    num_sequences = int(sequences_K[-1]) + 1 if sequences_K.numel() else 0
    return values_K.new_zeros(num_sequences).index_add_(0, sequences_K, values_K)
