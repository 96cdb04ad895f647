# SPDX-License-Identifier: Apache-2.0
"""Builds the loss of a run file's `algorithm` section, and the weights of its tokens.

Owns the layers around an algorithm's loss (correction, KL, entropy). The losses are in `losses/`
and in the algorithms' modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from penstock.config import AlgorithmConfig
from penstock.trainer.losses.aggregation import Aggregation, LossWeights
from penstock.trainer.losses.clipped import clip_bounds
from penstock.trainer.losses.divergence import EntropyBonus, KlPenalty
from penstock.trainer.losses.mismatch import CorrectedLoss, Correction, SequenceRatio, Weighting
from penstock.trainer.losses.tokens import BudgetedObjective, Objective, Tokens

NO_BOUNDS = (math.inf, math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrappedBudget:
    """An objective around one that has a budget: settled first, then wrapped."""

    budget: BudgetedObjective
    wrap: Callable[[Objective], Objective]

    def budget_terms(self, tokens: Tokens) -> Tensor:
        return self.budget.budget_terms(tokens)

    def with_budget(self, terms: Tensor) -> Objective:
        return self.wrap(self.budget.with_budget(terms))


def objective_of(algorithm: AlgorithmConfig) -> Objective | BudgetedObjective:
    """The algorithm's loss with its correction, KL penalty and entropy bonus."""

    def with_penalties(inner: Objective) -> Objective:
        if algorithm.beta > 0:
            inner = KlPenalty(inner=inner, coef=algorithm.beta)
        if algorithm.entropy_coef > 0:
            inner = EntropyBonus(inner=inner, coef=algorithm.entropy_coef)
        return inner

    inner = algorithm.declaration.loss(algorithm)
    if isinstance(inner, BudgetedObjective):
        return WrappedBudget(budget=inner, wrap=with_penalties)
    if (correction := correction_of(algorithm)) is not None:
        inner = CorrectedLoss(inner=inner, correction=correction)
    return with_penalties(inner)


def correction_of(algorithm: AlgorithmConfig) -> Correction | None:
    """What rejects tokens in its loss, and so in the denominators."""
    if (config := algorithm.correction) is None:
        return None
    return Correction(
        weighting=Weighting(config.weighting),
        low=config.low,
        high=config.high,
        sequence=None if config.sequence is None else SequenceRatio(config.sequence),
        sequence_low=config.sequence_low,
        sequence_high=math.inf if config.sequence_high is None else config.sequence_high,
        veto=config.veto,
    )


def bounds_of(algorithm: AlgorithmConfig) -> tuple[float, float]:
    """How far below and above 1 a token's ratio to its sampling log-prob may be before it has no
    gradient; infinite for losses that bound something else or keep every gradient."""
    if not algorithm.declaration.has_ratio_bounds or algorithm.ratio_against != "sampling":
        return NO_BOUNDS
    return clip_bounds(algorithm)


def loss_weights_of(algorithm: AlgorithmConfig, max_tokens: int) -> LossWeights:
    """How the losses of tokens are weighed in the sum of an update."""
    return LossWeights(aggregation=Aggregation(algorithm.aggregation), constant_length=max_tokens)
