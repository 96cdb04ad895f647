# SPDX-License-Identifier: Apache-2.0
"""The loss that an algorithm's name and numbers stand for, and how its tokens are weighed.

Owns which of the losses is meant; what they compute is in `losses/`, and the graph of stages before
them in `pipeline/builtin.py`.
"""

from __future__ import annotations

import math

from penstock.config import AlgorithmConfig, CorrectionConfig
from penstock.trainer.losses.aggregation import Aggregation, LossWeights
from penstock.trainer.losses.divergence import EntropyBonus, KlPenalty
from penstock.trainer.losses.m2po import M2poBudget
from penstock.trainer.losses.mismatch import CorrectedLoss, Correction, SequenceRatio, Weighting
from penstock.trainer.losses.objectives import (
    CispoLoss,
    ClippedLoss,
    DecoupledLoss,
    DistillationLoss,
    GspoLoss,
    RatioAgainst,
    SapoLoss,
    WrappedBudget,
)
from penstock.trainer.losses.tokens import BudgetedObjective, Objective


def objective_of(algorithm: AlgorithmConfig) -> Objective | BudgetedObjective:
    """The loss that the algorithm's name and numbers stand for."""

    def near_reference(inner: Objective) -> Objective:
        if algorithm.beta > 0:
            inner = KlPenalty(inner=inner, coef=algorithm.beta)
        if algorithm.entropy_coef > 0:
            inner = EntropyBonus(inner=inner, coef=algorithm.entropy_coef)
        return inner

    if algorithm.name == "m2po":
        assert algorithm.tau is not None, "the config has seen to it"
        return WrappedBudget(budget=M2poBudget(budget=algorithm.tau), wrap=near_reference)
    inner = _policy_loss(algorithm)
    if algorithm.correction is not None:
        inner = CorrectedLoss(inner=inner, correction=_correction(algorithm.correction))
    return near_reference(inner)


def _policy_loss(algorithm: AlgorithmConfig) -> Objective:
    high = algorithm.epsilon if algorithm.epsilon_high is None else algorithm.epsilon_high
    low, against = algorithm.epsilon, RatioAgainst(algorithm.ratio_against)
    match algorithm.name:
        case "decoupled":
            return DecoupledLoss(epsilon=low, epsilon_high=high)
        case "gspo":
            return GspoLoss(epsilon=low, epsilon_high=high, ratio_against=against)
        case "cispo":
            return CispoLoss(epsilon=low, epsilon_high=high, ratio_against=against)
        case "sapo":
            return SapoLoss(ratio_against=against)
        case name:
            delta = math.inf if algorithm.delta is None else algorithm.delta
            clipped = ClippedLoss(
                epsilon=low, epsilon_high=high, delta=delta, ratio_against=against
            )
            return DistillationLoss(inner=clipped) if name == "opd" else clipped


def _correction(config: CorrectionConfig) -> Correction:
    return Correction(
        weighting=Weighting(config.weighting),
        low=config.low,
        high=config.high,
        sequence=None if config.sequence is None else SequenceRatio(config.sequence),
        sequence_low=config.sequence_low,
        sequence_high=math.inf if config.sequence_high is None else config.sequence_high,
        veto=config.veto,
    )


NO_BOUNDS = (math.inf, math.inf)


def bounds_of(algorithm: AlgorithmConfig) -> tuple[float, float]:
    """How far below and above 1 the ratio of a token to its sampling may lie before it teaches
    nothing; of a loss that bounds something else, or goes on teaching, none."""
    others = ("cispo", "decoupled", "gspo", "m2po", "opd", "sapo")
    if algorithm.name in others or algorithm.ratio_against != "sampling":
        return NO_BOUNDS
    high = algorithm.epsilon if algorithm.epsilon_high is None else algorithm.epsilon_high
    return algorithm.epsilon, high


def loss_weights_of(algorithm: AlgorithmConfig, max_tokens: int) -> LossWeights:
    aggregation = Aggregation(algorithm.aggregation)
    is_fixed = aggregation is Aggregation.FIXED_CONSTANT
    return LossWeights(aggregation=aggregation, constant_length=max_tokens if is_fixed else 0)
