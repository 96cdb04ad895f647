# SPDX-License-Identifier: Apache-2.0
"""M2PO: a trust region that is a budget over a complete update, not a bound on each token.

A token is harmful if its advantage pushes it further from the policy that sampled it. The budget is
the mean squared log-ratio of the harmful tokens of an update, over all micro-batches and ranks; the
largest are dropped until the rest is within it. Dropped tokens lose their gradient as clipped ones
do: they stay in the denominator. Order, ties and sharding change nothing.

K = trained tokens of a micro-batch, H = harmful tokens of the update.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.config.algorithms import Algorithm
from penstock.trainer.losses.ratios import MAX_LOG_RATIO, log_ratio, ratio_metrics
from penstock.trainer.losses.tokens import Objective, TokenLoss, Tokens

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.config import AlgorithmConfig


RATIO_BOUNDS = (0.05, 20.0)
"""Of the ratio of tokens within the budget: they return by themselves, but not in one long step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class M2poBudget:
    """Settles the budget; the loss itself is `M2poLoss`."""

    budget: float = 0.04
    """Largest mean squared log-ratio over harmful tokens: a variance per token, whatever the
    length."""

    def budget_terms(self, tokens: Tokens) -> Tensor:
        """Squared log-ratios of this micro-batch's harmful tokens."""
        square_K, is_harmful_K = _squared_log_ratios(tokens)
        return square_K[is_harmful_K]

    def with_budget(self, terms: Tensor) -> Objective:
        threshold, num_dropped = _threshold(terms, self.budget)
        return M2poLoss(threshold=threshold, is_all_dropped=0 < num_dropped == terms.numel())


@dataclass(frozen=True, slots=True, kw_only=True)
class M2poLoss:
    """M2PO's loss in one update."""

    threshold: float
    """Harmful tokens at or above this squared log-ratio are dropped; inf when none is."""
    is_all_dropped: bool
    """No harmful token was within the budget; only self-correcting ones are left. An alarm."""

    def __call__(self, tokens: Tokens) -> TokenLoss:
        log_ratio_K = log_ratio(tokens.logprobs_K, tokens.sampling_K)
        ratio_K = log_ratio_K.exp().clamp(*RATIO_BOUNDS)
        square_K, is_harmful_K = _squared_log_ratios(tokens)
        is_dropped_K = is_harmful_K & (square_K >= self.threshold)
        loss_K = (-ratio_K * tokens.advantages_K).masked_fill(is_dropped_K, 0.0)
        metrics = self._metrics(log_ratio_K.detach(), is_dropped_K, tokens)
        metrics["m2po/harmful"] = is_harmful_K.to(loss_K.dtype)
        return TokenLoss(loss_K=loss_K, metrics=metrics)

    def _metrics(
        self, log_ratio_K: Tensor, is_dropped_K: Tensor, tokens: Tokens
    ) -> dict[str, Tensor]:
        square_K = log_ratio_K**2
        is_fresh_K = tokens.staleness_K == 0
        everywhere_K = square_K.new_ones(square_K.shape)
        radius = min(math.sqrt(self.threshold), MAX_LOG_RATIO)
        is_good_K = tokens.advantages_K > 0
        return {
            **ratio_metrics(tokens, is_dropped_K & ~is_good_K, is_dropped_K & is_good_K),
            "m2po/second_moment": square_K,
            "m2po/second_moment_kept": square_K.masked_fill(is_dropped_K, 0.0),
            "m2po/second_moment_fresh": square_K.masked_fill(~is_fresh_K, 0.0),
            "m2po/fresh": is_fresh_K.to(square_K.dtype),
            "m2po/radius": radius * everywhere_K,
            "m2po/all_dropped": float(self.is_all_dropped) * everywhere_K,
        }


def _squared_log_ratios(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """(squared log-ratio, whether the advantage makes it grow); in float64, so that thresholds mean
    the same on every rank."""
    log_ratio_K = log_ratio(tokens.logprobs_K.detach(), tokens.sampling_K).double()
    return log_ratio_K**2, tokens.advantages_K * log_ratio_K > 0


def _threshold(pressures_H: Tensor, budget: float) -> tuple[float, int]:
    """(smallest squared log-ratio dropped, how many are): the fewest of the largest whose absence
    leaves a mean within the budget.

    Sums run over the sorted values, on the host, so they depend neither on the order in which these
    came nor on the device.
    """
    import torch  # only here, so that a run file can be checked without it

    ascending_H = pressures_H.detach().double().cpu().sort().values
    counts_H = torch.arange(1, ascending_H.numel() + 1)
    is_within_H = ascending_H.cumsum(0) / counts_H <= budget
    num_kept = int((is_within_H * counts_H).max()) if ascending_H.numel() else 0
    if num_kept == ascending_H.numel():
        return math.inf, 0
    # A value within the budget is never dropped, whatever the rounding of a mean of equal values.
    threshold = max(float(ascending_H[num_kept]), math.nextafter(budget, math.inf))
    return threshold, int((ascending_H >= threshold).sum())


def _loss(config: AlgorithmConfig) -> M2poBudget:
    assert config.tau is not None, "the config requires it"
    return M2poBudget(budget=config.tau)


ALGORITHM = Algorithm(
    loss=_loss,
    keys=frozenset({"tau"}),
    required=("tau",),
    preset={"beta": 1e-3, "tau": 0.01},
    instead_of_clip="the budget tau",
    whole_batch="its budget tau is over all tokens of an update",
)
