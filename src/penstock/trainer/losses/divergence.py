# SPDX-License-Identifier: Apache-2.0
"""Two terms added to a policy loss: the KL to a frozen reference, and the entropy.

With x = log reference - log now on sampled tokens, k1 = -x, k2 = x²/2, k3 = e^x - 1 - x. Tokens
were sampled by older weights, so each term is multiplied by the ratio now / sampling; with it, all
three have the gradient of KL(now ‖ reference) in expectation. For k1 and k3, whose *value* is the
KL, that takes the gradient through the ratio too; for k2, whose plain gradient is the KL's, the
ratio is detached. Without it, k1 would have no gradient at all and k3 another divergence's.

K = trained tokens of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from penstock.trainer.losses.ratios import log_ratio
from penstock.trainer.losses.tokens import Objective, TokenLoss, Tokens


class KlEstimator(StrEnum):
    """Which estimate of the divergence, by token."""

    K1 = "k1"
    """Unbiased, signed, of high variance."""
    K2 = "k2"
    """Biased value, plainest gradient."""
    K3 = "k3"
    """Unbiased and never negative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KlPenalty:
    """An objective that also stays near the reference."""

    inner: Objective
    kind: KlEstimator = KlEstimator.K3
    coef: float = 1e-3
    max_ratio: float = 5.0
    """Bounds the ratio, as an importance weight: a token far from its sampling policy must not
    drown the others."""

    def __call__(self, tokens: Tokens) -> TokenLoss:
        out = self.inner(tokens)
        if tokens.reference_K is None:
            raise ValueError(
                "the KL term reads the token column reference_logprobs, and no stage has written "
                "it; add an infer stage of the reference, or set its coefficient to 0"
            )
        kl_K = estimate(self.kind, tokens.logprobs_K, tokens.reference_K.detach())
        ratio_K = log_ratio(tokens.logprobs_K, tokens.sampling_K).exp()
        ratio_K = ratio_K.clamp(max=self.max_ratio)
        if self.kind is KlEstimator.K2:
            ratio_K = ratio_K.detach()
        loss_K = out.loss_K + self.coef * ratio_K * kl_K
        return TokenLoss(loss_K=loss_K, metrics={**out.metrics, "reference_kl": kl_K.detach()})


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyBonus:
    """An objective with a bonus for entropy."""

    inner: Objective
    coef: float

    def __call__(self, tokens: Tokens) -> TokenLoss:
        out = self.inner(tokens)
        return TokenLoss(loss_K=out.loss_K - self.coef * tokens.entropy_K, metrics=out.metrics)


def estimate(kind: KlEstimator, logprobs_K: Tensor, reference_K: Tensor) -> Tensor:
    """KL(now ‖ reference) by token."""
    x_K = log_ratio(reference_K, logprobs_K)
    match kind:
        case KlEstimator.K1:
            return -x_K
        case KlEstimator.K2:
            return x_K**2 / 2
        case KlEstimator.K3:
            return torch.exp(x_K) - 1 - x_K
