# SPDX-License-Identifier: Apache-2.0
"""Policy losses by token: clipped, decoupled, sequence-level, soft, and distillation.

Each is a frozen record of its few numbers that, called with `Tokens`, gives one loss per token. It
knows nothing of denominators (aggregation.py), of a reference (divergence.py) or of the engine's
numerics (mismatch.py). M2PO, whose trust region spans a whole update, is in m2po.py.

Against the sampling log-probs a ratio bounds the distance from what was sampled, staleness and
engine mismatch included; against the proximal ones it bounds the distance gone in this step.

K = trained tokens of a micro-batch, S = its sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor

from penstock.trainer.losses.logprobs import behaviour_kl, log_ratio
from penstock.trainer.losses.tokens import BudgetedObjective, Objective, TokenLoss, Tokens

_WIDEST_SEQUENCE_CLIP = 0.01


class RatioAgainst(StrEnum):
    """Whose log-probs a ratio has below it."""

    SAMPLING = "sampling"
    """The engine's, recorded when it sampled. Costs no forward pass."""
    PROXIMAL = "proximal"
    """The trainer's, under the weights at the start of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedLoss:
    """PPO's clipped objective; GRPO, Dr.GRPO, RLOO and DAPO differ in their advantages, their
    bounds and their denominators only."""

    epsilon: float = 0.2
    """No gain from a ratio below 1 - epsilon."""
    epsilon_high: float = 0.2
    """No gain from a ratio above 1 + epsilon_high."""
    delta: float = math.inf
    """Dual clip: a bad token's ratio counts as no more than this, so that no loss is unbounded."""
    ratio_against: RatioAgainst = RatioAgainst.SAMPLING

    def __post_init__(self) -> None:
        if self.delta < 1 + self.epsilon_high:
            raise ValueError(
                f"delta {self.delta} must not be below 1 + epsilon_high ({1 + self.epsilon_high}): "
                "it bounds what the ordinary clip leaves open; 3 is usual"
            )

    def __call__(self, tokens: Tokens) -> TokenLoss:
        log_ratio_K = _log_ratio(tokens, self.ratio_against)
        ratio_K = log_ratio_K.exp().clamp(max=self.delta)
        loss_K = _clipped(ratio_K, tokens.advantages_K, self.epsilon, self.epsilon_high)
        low_K, high_K = _has_no_gradient(log_ratio_K.exp(), tokens.advantages_K, self)
        return TokenLoss(loss_K=loss_K, metrics=_ratio_metrics(tokens, low_K, high_K))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoupledLoss:
    """Decoupled PPO: the trust region lies around the proximal policy, and a detached weight
    corrects for the policy that sampled. The weight holds the engine mismatch already."""

    epsilon: float = 0.2
    epsilon_high: float = 0.2
    max_weight: float = 5.0

    def __call__(self, tokens: Tokens) -> TokenLoss:
        proximal_K = require_proximal(tokens, "decoupled PPO")
        weight_K = log_ratio(proximal_K, tokens.sampling_K).exp().clamp(max=self.max_weight)
        weight_K = weight_K.detach()
        ratio_K = log_ratio(tokens.logprobs_K, proximal_K).exp()
        loss_K = _clipped(ratio_K, tokens.advantages_K, self.epsilon, self.epsilon_high)
        region = ClippedLoss(epsilon=self.epsilon, epsilon_high=self.epsilon_high)
        low_K, high_K = _has_no_gradient(ratio_K, tokens.advantages_K, region)
        metrics = _ratio_metrics(tokens, low_K, high_K)
        metrics["weight"] = weight_K
        metrics["weight/at_bound"] = (weight_K >= self.max_weight).to(weight_K.dtype)
        return TokenLoss(loss_K=weight_K * loss_K, metrics=metrics)


@dataclass(frozen=True, slots=True, kw_only=True)
class GspoLoss:
    """One ratio per sequence: the geometric mean of its tokens'. In the token form, whose value and
    gradient are those of GSPO where a sequence has one advantage. Meant for `seq-mean-token-mean`.
    """

    epsilon: float = 3e-4
    epsilon_high: float = 4e-4
    ratio_against: RatioAgainst = RatioAgainst.SAMPLING
    is_wide_allowed: bool = False

    def __post_init__(self) -> None:
        widest = max(self.epsilon, self.epsilon_high)
        if widest > _WIDEST_SEQUENCE_CLIP and not self.is_wide_allowed:
            raise ValueError(
                f"GSPO with a clip of {widest}: a sequence's mean ratio never moves that far, so "
                f"nothing would be clipped; stay below {_WIDEST_SEQUENCE_CLIP} (3e-4 and 4e-4 are "
                "usual), or allow it on purpose"
            )

    def __call__(self, tokens: Tokens) -> TokenLoss:
        log_ratio_K = _log_ratio(tokens, self.ratio_against)
        mean_K = sequence_means(log_ratio_K.detach(), tokens.sequences_K)[tokens.sequences_K]
        ratio_K = (mean_K + log_ratio_K - log_ratio_K.detach()).exp()
        loss_K = _clipped(ratio_K, tokens.advantages_K, self.epsilon, self.epsilon_high)
        region = ClippedLoss(epsilon=self.epsilon, epsilon_high=self.epsilon_high)
        low_K, high_K = _has_no_gradient(ratio_K, tokens.advantages_K, region)
        return TokenLoss(loss_K=loss_K, metrics=_ratio_metrics(tokens, low_K, high_K))


@dataclass(frozen=True, slots=True, kw_only=True)
class CispoLoss:
    """The ratio is clipped and detached, so every token keeps a gradient. Both bounds are distances
    from 1, as in PPO: epsilon_high 4 caps the ratio at 5."""

    epsilon: float = 1.0
    epsilon_high: float = 4.0
    ratio_against: RatioAgainst = RatioAgainst.SAMPLING

    def __call__(self, tokens: Tokens) -> TokenLoss:
        ratio_K = _log_ratio(tokens, self.ratio_against).detach().exp()
        bounded_K = ratio_K.clamp(1 - self.epsilon, 1 + self.epsilon_high)
        metrics = _ratio_metrics(tokens, ratio_K < bounded_K, ratio_K > bounded_K)
        return TokenLoss(
            loss_K=-bounded_K * tokens.advantages_K * tokens.logprobs_K, metrics=metrics
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SapoLoss:
    """A soft gate in place of the clip. Its slope at ratio 1 is 1 whatever the temperature, so the
    learning rate means what it means elsewhere."""

    temperature_good: float = 1.0
    temperature_bad: float = 1.05
    ratio_against: RatioAgainst = RatioAgainst.SAMPLING

    def __post_init__(self) -> None:
        if not 0 < self.temperature_good <= self.temperature_bad:
            raise ValueError(
                f"SAPO temperatures {self.temperature_good} for good and {self.temperature_bad} "
                "for bad tokens: they must be above 0, and bad tokens decay at least as fast as "
                "good ones, or training is unstable; 1.0 and 1.05 are usual"
            )

    def __call__(self, tokens: Tokens) -> TokenLoss:
        ratio_K = _log_ratio(tokens, self.ratio_against).exp()
        is_good_K = tokens.advantages_K > 0
        good, bad = ratio_K.new_tensor([self.temperature_good, self.temperature_bad])
        temperature_K = torch.where(is_good_K, good, bad)
        gate_K = 4 / temperature_K * torch.sigmoid(temperature_K * (ratio_K - 1))
        nowhere_K = torch.zeros_like(is_good_K)
        metrics = _ratio_metrics(tokens, nowhere_K, nowhere_K)
        return TokenLoss(loss_K=-gate_K * tokens.advantages_K, metrics=metrics)


TEACHER = "teacher_logprobs"


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationLoss:
    """On-policy distillation: the advantage of a token is how much likelier the teacher finds it
    than the policy does now, so the policy loss descends the reverse KL to the teacher.

    Advantages of the batch are not looked at: no reward is needed.
    """

    inner: Objective
    """Takes the advantages: its ratio corrects for tokens sampled by older weights."""

    def __call__(self, tokens: Tokens) -> TokenLoss:
        teacher_K = (tokens.extra_columns or {}).get(TEACHER)
        if teacher_K is None:
            raise ValueError(
                f"distillation reads the token column {TEACHER}, and no stage has written it; "
                "add an infer stage of the teacher before this one"
            )
        gap_K = log_ratio(tokens.logprobs_K.detach(), teacher_K)
        out = self.inner(replace(tokens, advantages_K=-gap_K))
        return TokenLoss(loss_K=out.loss_K, metrics={**out.metrics, "teacher_kl": gap_K})


@dataclass(frozen=True, slots=True, kw_only=True)
class WrappedBudget:
    """An objective around one that has a budget: settled first, then wrapped."""

    budget: BudgetedObjective
    wrap: Callable[[Objective], Objective]

    def __post_init__(self) -> None:
        self.with_budget(
            torch.zeros(0)
        )  # what must not be wrapped so is refused before any training

    def budget_terms(self, tokens: Tokens) -> Tensor:
        return self.budget.budget_terms(tokens)

    def with_budget(self, terms: Tensor) -> Objective:
        return self.wrap(self.budget.with_budget(terms))


def require_proximal(tokens: Tokens, reader: str) -> Tensor:
    """The trainer's log-probs at the start of the step, without gradient."""
    if tokens.proximal_K is None:
        raise ValueError(
            f"{reader} reads the token column proximal_logprobs, and no stage has written it; "
            "add an infer stage of the actor before training, or take ratios against sampling"
        )
    return tokens.proximal_K.detach()


def sequence_means(values_K: Tensor, sequences_K: Tensor) -> Tensor:
    """Mean over the tokens of each sequence: by S."""
    return sequence_sums(values_K, sequences_K) / sequence_sums(
        torch.ones_like(values_K), sequences_K
    )


def sequence_sums(values_K: Tensor, sequences_K: Tensor) -> Tensor:
    num_sequences = int(sequences_K[-1]) + 1 if sequences_K.numel() else 0
    return values_K.new_zeros(num_sequences).index_add_(0, sequences_K, values_K)


def _log_ratio(tokens: Tokens, against: RatioAgainst) -> Tensor:
    if against is RatioAgainst.SAMPLING:
        return log_ratio(tokens.logprobs_K, tokens.sampling_K)
    return log_ratio(tokens.logprobs_K, require_proximal(tokens, "a ratio against proximal"))


def _clipped(ratio_K: Tensor, advantages_K: Tensor, low: float, high: float) -> Tensor:
    bounded_K = ratio_K.clamp(1 - low, 1 + high)
    return -torch.minimum(ratio_K * advantages_K, bounded_K * advantages_K)


def _has_no_gradient(
    ratio_K: Tensor, advantages_K: Tensor, region: ClippedLoss
) -> tuple[Tensor, Tensor]:
    """Tokens without a gradient: (too unlikely already, too likely already)."""
    low_K = (ratio_K < 1 - region.epsilon) & (advantages_K < 0)
    high_K = (ratio_K > 1 + region.epsilon_high) & (advantages_K > 0)
    return low_K, high_K | ((ratio_K > region.delta) & (advantages_K < 0))


@torch.no_grad()
def _ratio_metrics(tokens: Tokens, low_K: Tensor, high_K: Tensor) -> dict[str, Tensor]:
    """What every policy loss tells: where its bounds bit, by sign, and how far the weights are from
    those that sampled. Effective sample share = `ratio` mean² / `ratio/square` mean."""
    log_ratio_K = log_ratio(tokens.logprobs_K, tokens.sampling_K)
    ratio_K = log_ratio_K.exp()
    return {
        "clip_ratio/low": low_K.to(ratio_K.dtype),
        "clip_ratio/high": high_K.to(ratio_K.dtype),
        "kl": behaviour_kl(log_ratio_K),
        "ratio": ratio_K,
        "ratio/square": ratio_K**2,
    }
