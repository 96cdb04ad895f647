# SPDX-License-Identifier: Apache-2.0
"""Decoupled PPO: the clip is around the policy at the start of the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.config.algorithms import CLIP_KEYS, Algorithm
from penstock.trainer.losses.clipped import clip_bounds
from penstock.trainer.losses.ratios import clip_loss, log_ratio, require_proximal
from penstock.trainer.losses.tokens import TokenLoss, Tokens

if TYPE_CHECKING:
    from penstock.config import AlgorithmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoupledLoss:
    """The trust region is around the proximal policy, and a detached weight corrects for the policy
    that sampled, engine mismatch included.

    K = trained tokens of a micro-batch."""

    epsilon: float = 0.2
    epsilon_high: float = 0.2
    max_weight: float = 5.0

    def __call__(self, tokens: Tokens) -> TokenLoss:
        proximal_K = require_proximal(tokens, "decoupled PPO")
        weight_K = log_ratio(proximal_K, tokens.sampling_K).exp().clamp(max=self.max_weight)
        weight_K = weight_K.detach()
        ratio_K = log_ratio(tokens.logprobs_K, proximal_K).exp()
        out = clip_loss(tokens, ratio_K, self.epsilon, self.epsilon_high)
        is_at_bound_K = (weight_K >= self.max_weight).to(weight_K.dtype)
        metrics = {**out.metrics, "weight": weight_K, "weight/at_bound": is_at_bound_K}
        return TokenLoss(loss_K=weight_K * out.loss_K, metrics=metrics)


def _loss(config: AlgorithmConfig) -> DecoupledLoss:
    epsilon, epsilon_high = clip_bounds(config)
    return DecoupledLoss(epsilon=epsilon, epsilon_high=epsilon_high)


ALGORITHM = Algorithm(loss=_loss, keys=CLIP_KEYS | {"correction"}, needs_proximal=True)
