# SPDX-License-Identifier: Apache-2.0
"""SAPO: a soft gate in place of the clip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.config.algorithms import Algorithm
from penstock.trainer.losses.ratios import RatioAgainst, policy_log_ratio, ratio_metrics
from penstock.trainer.losses.tokens import TokenLoss, Tokens

if TYPE_CHECKING:
    from penstock.config import AlgorithmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SapoLoss:
    """A soft gate in place of the clip. Its slope at ratio 1 is 1 at every temperature, so the
    learning rate has the same meaning as elsewhere.

    K = trained tokens of a micro-batch."""

    temperature_good: float = 1.0
    temperature_bad: float = 1.05
    ratio_against: RatioAgainst = RatioAgainst.SAMPLING

    def __call__(self, tokens: Tokens) -> TokenLoss:
        ratio_K = policy_log_ratio(tokens, self.ratio_against).exp()
        is_good_K = tokens.advantages_K > 0
        good, bad = ratio_K.new_tensor([self.temperature_good, self.temperature_bad])
        temperature_K = good.where(is_good_K, bad)
        gate_K = 4 / temperature_K * (temperature_K * (ratio_K - 1)).sigmoid()
        nowhere_K = is_good_K.new_zeros(is_good_K.shape)
        metrics = ratio_metrics(tokens, nowhere_K, nowhere_K)
        return TokenLoss(loss_K=-gate_K * tokens.advantages_K, metrics=metrics)


def _loss(config: AlgorithmConfig) -> SapoLoss:
    return SapoLoss(ratio_against=RatioAgainst(config.ratio_against))


ALGORITHM = Algorithm(
    loss=_loss,
    keys=frozenset({"ratio_against", "correction"}),
    instead_of_clip="a soft gate in place of the clip",
)
