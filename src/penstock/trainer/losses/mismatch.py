# SPDX-License-Identifier: Apache-2.0
"""Corrects for engine mismatch on the same weights: detached weights, and rejections.

Owns the correction, as a layer around an objective. For a token sampled by the version trained
from, ρ = proximal / sampling is that mismatch only; for an older token it includes the staleness
since then. An objective with a ratio to the sampling log-probs has corrected for ρ already: the
config refuses to weigh it again.

Rejected tokens are out of numerator and denominator (aggregation.py), which needs
`survivors` before the first backward pass.

K = trained tokens of a micro-batch, S = its sequences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from penstock.trainer.losses.ratios import (
    k3,
    log_ratio,
    require_proximal,
    sequence_means,
    sequence_sums,
)
from penstock.trainer.losses.tokens import Objective, TokenLoss, Tokens


class Weighting(StrEnum):
    """What a token's ρ does to it."""

    NONE = "none"
    TRUNCATE = "truncate"
    """TIS: weight min(ρ, high)."""
    MASK = "mask"
    """IcePop: weight ρ, rejected outside [low, high]. Token-MIS is this with low = 0."""


class SequenceRatio(StrEnum):
    """How a sequence's ρ is made of its tokens'."""

    SUM = "sum"
    """The product: exact, and shrinking with length."""
    GEOMETRIC = "geometric"
    """The geometric mean: needs bounds near 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Which disagreement is weighed and which is rejected. Beyond the parts chosen, none."""

    weighting: Weighting = Weighting.TRUNCATE
    low: float = 0.0
    high: float = 2.0
    sequence: SequenceRatio | None = None
    """Also reject complete sequences whose ρ is outside the two bounds below."""
    sequence_low: float = 0.0
    sequence_high: float = math.inf
    veto: float = 0.0
    """Reject a sequence with a token whose ρ is below this; 1e-4 is usual, 0 is off."""

    @torch.no_grad()
    def survivors(self, proximal_K: Tensor, sampling_K: Tensor, sequences_K: Tensor) -> Tensor:
        """True for the tokens that are not rejected. Needs no forward pass."""
        log_rho_K = log_ratio(proximal_K, sampling_K)
        rho_K = log_rho_K.exp()
        is_kept_K = torch.ones_like(rho_K, dtype=torch.bool)
        if self.weighting is Weighting.MASK:
            is_kept_K &= (rho_K >= self.low) & (rho_K <= self.high)
        if self.sequence is not None:
            join = sequence_sums if self.sequence is SequenceRatio.SUM else sequence_means
            rho_S = join(log_rho_K, sequences_K).exp()
            is_kept_S = (rho_S >= self.sequence_low) & (rho_S <= self.sequence_high)
            is_kept_K &= is_kept_S[sequences_K]
        if self.veto:
            num_vetoes_S = sequence_sums((rho_K < self.veto).to(rho_K.dtype), sequences_K)
            is_kept_K &= (num_vetoes_S == 0)[sequences_K]
        return is_kept_K

    @torch.no_grad()
    def weights(self, proximal_K: Tensor, sampling_K: Tensor) -> Tensor:
        """Before rejection."""
        rho_K = log_ratio(proximal_K, sampling_K).exp()
        match self.weighting:
            case Weighting.NONE:
                return torch.ones_like(rho_K)
            case Weighting.TRUNCATE:
                return rho_K.clamp(max=self.high)
            case Weighting.MASK:
                return rho_K


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectedLoss:
    """An objective whose tokens are weighed by ρ, and left out where it is out of bounds."""

    inner: Objective
    correction: Correction

    def __call__(self, tokens: Tokens) -> TokenLoss:
        proximal_K = require_proximal(tokens, "mismatch correction")
        out = self.inner(tokens)
        is_kept_K = self.correction.survivors(proximal_K, tokens.sampling_K, tokens.sequences_K)
        weights_K = self.correction.weights(proximal_K, tokens.sampling_K)
        log_rho_K = log_ratio(proximal_K, tokens.sampling_K)
        metrics = {
            **out.metrics,
            "mismatch/weight": torch.where(is_kept_K, weights_K, 0.0),
            "mismatch/rejected": (~is_kept_K).to(weights_K.dtype),
            "mismatch/k3": k3(log_rho_K),
        }
        return TokenLoss(
            loss_K=torch.where(is_kept_K, weights_K * out.loss_K, 0.0), metrics=metrics
        )
