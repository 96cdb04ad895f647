# SPDX-License-Identifier: Apache-2.0
"""Two terms added to a policy loss: the KL to a frozen reference, and the entropy.

With x = log reference - log now on sampled tokens, the KL is estimated as k3 = e^x - 1 - x. Tokens
were sampled by older weights, so it is multiplied by the ratio now / sampling: with the gradient
through the ratio too, it has value and gradient of KL(now ‖ reference) in expectation. Without
it, the gradient would be another divergence's.

K = trained tokens of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.trainer.losses.ratios import k3, log_ratio
from penstock.trainer.losses.tokens import Objective, TokenLoss, Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class KlPenalty:
    """An objective that also stays near the reference."""

    inner: Objective
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
        kl_K = k3(log_ratio(tokens.reference_K.detach(), tokens.logprobs_K))
        ratio_K = log_ratio(tokens.logprobs_K, tokens.sampling_K).exp().clamp(max=self.max_ratio)
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
