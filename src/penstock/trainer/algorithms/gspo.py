# SPDX-License-Identifier: Apache-2.0
"""GSPO: one ratio per sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.config.algorithms import CLIP_KEYS, Algorithm
from penstock.options import Contradiction
from penstock.trainer.losses.clipped import clip_bounds
from penstock.trainer.losses.ratios import RatioAgainst, clip_loss, policy_log_ratio, sequence_means
from penstock.trainer.losses.tokens import TokenLoss, Tokens

if TYPE_CHECKING:
    from penstock.config import AlgorithmConfig

MAX_CLIP = 0.01
"""A wider clip has no effect: the mean ratio of a sequence never moves that far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GspoLoss:
    """One ratio per sequence: the geometric mean of its tokens' ratios. This is the token form,
    with GSPO's value and gradient where a sequence has one advantage. For `seq-mean-token-mean`.

    K = trained tokens of a micro-batch."""

    epsilon: float = 3e-4
    epsilon_high: float = 4e-4
    ratio_against: RatioAgainst = RatioAgainst.SAMPLING

    def __call__(self, tokens: Tokens) -> TokenLoss:
        log_ratio_K = policy_log_ratio(tokens, self.ratio_against)
        mean_K = sequence_means(log_ratio_K.detach(), tokens.sequences_K)[tokens.sequences_K]
        ratio_K = (mean_K + log_ratio_K - log_ratio_K.detach()).exp()
        return clip_loss(tokens, ratio_K, self.epsilon, self.epsilon_high)


def _loss(config: AlgorithmConfig) -> GspoLoss:
    epsilon, epsilon_high = clip_bounds(config)
    against = RatioAgainst(config.ratio_against)
    return GspoLoss(epsilon=epsilon, epsilon_high=epsilon_high, ratio_against=against)


def _check(config: AlgorithmConfig) -> Iterator[Contradiction]:
    if max(config.epsilon, config.epsilon_high or 0) > MAX_CLIP:
        yield Contradiction(
            text="gspo clips the mean ratio of a sequence, which never moves that far; "
            f"set epsilon and epsilon_high <= {MAX_CLIP} (3e-4 and 4e-4 are usual)",
            keys=(("epsilon",), ("epsilon_high",), ("name",)),
        )


ALGORITHM = Algorithm(
    loss=_loss,
    keys=CLIP_KEYS | {"ratio_against", "correction"},
    preset={"epsilon": 3e-4, "epsilon_high": 4e-4, "aggregation": "seq-mean-token-mean"},
    check=_check,
)
