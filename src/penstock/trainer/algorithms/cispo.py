# SPDX-License-Identifier: Apache-2.0
"""CISPO: the ratio is a clipped, detached weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.config.algorithms import CLIP_KEYS, Algorithm
from penstock.trainer.losses.clipped import clip_bounds
from penstock.trainer.losses.ratios import RatioAgainst, policy_log_ratio, ratio_metrics
from penstock.trainer.losses.tokens import TokenLoss, Tokens

if TYPE_CHECKING:
    from penstock.config import AlgorithmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class CispoLoss:
    """The ratio is clipped and detached, so every token keeps a gradient. Both bounds are distances
    from 1, as in PPO: epsilon_high 4 caps the ratio at 5.

    K = trained tokens of a micro-batch."""

    epsilon: float = 1.0
    epsilon_high: float = 4.0
    ratio_against: RatioAgainst = RatioAgainst.SAMPLING

    def __call__(self, tokens: Tokens) -> TokenLoss:
        ratio_K = policy_log_ratio(tokens, self.ratio_against).detach().exp()
        bounded_K = ratio_K.clamp(1 - self.epsilon, 1 + self.epsilon_high)
        metrics = ratio_metrics(tokens, ratio_K < bounded_K, ratio_K > bounded_K)
        return TokenLoss(
            loss_K=-bounded_K * tokens.advantages_K * tokens.logprobs_K, metrics=metrics
        )


def _loss(config: AlgorithmConfig) -> CispoLoss:
    epsilon, epsilon_high = clip_bounds(config)
    against = RatioAgainst(config.ratio_against)
    return CispoLoss(epsilon=epsilon, epsilon_high=epsilon_high, ratio_against=against)


ALGORITHM = Algorithm(
    loss=_loss,
    keys=CLIP_KEYS | {"ratio_against", "correction"},
    preset={"epsilon": 1.0, "epsilon_high": 4.0},
)
