# SPDX-License-Identifier: Apache-2.0
"""Advantages from a critic's values (GAE), and the loss that trains the critic.

The next step of a trained token is the next trained token of its sample: prompts, tool output and
other policies' tokens are neither steps nor discounted. Values are those that the critic gave
before the step; normalising advantages (baselines.py) comes after the returns are made. A sample
without a reward (NaN) has no advantage, and its values as returns.

T = tokens of all samples, S = samples, K = trained tokens of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from penstock.trainer.arrays import Bools, Floats, Ints
from penstock.trainer.losses.tokens import TokenLoss, Tokens


def estimate_advantages(
    rewards_T: Floats,
    values_T: Floats,
    mask_T: Bools,
    ends_S: Ints,
    bootstrap_S: Floats | None = None,
    *,
    discount: float = 1.0,
    lam: float = 1.0,
) -> tuple[Floats, Floats]:
    """(advantages, returns) by token, 0 where it is not trained. Returns are what the critic is to
    learn: advantage + value.

    `lam` 1 uses full returns, 0 only the next value. `bootstrap_S`: the value after each sample's
    last token, if it was truncated; 0 if the episode ended (None: everywhere). `ends_S` increases,
    and samples hold all trained tokens."""
    tokens_K = np.flatnonzero(mask_T)
    ends_K = np.searchsorted(tokens_K, ends_S)
    lengths_S = np.diff(ends_K, prepend=0)
    values_K, rewards_K = values_T[tokens_K], rewards_T[tokens_K]
    following_K = np.append(values_K[1:], 0.0)
    has_tokens_S = lengths_S > 0
    after_S = np.zeros(ends_S.size) if bootstrap_S is None else bootstrap_S
    following_K[ends_K[has_tokens_S] - 1] = after_S[has_tokens_S]
    errors_K = rewards_K + discount * following_K - values_K
    advantages_K = _discounted_sums(errors_K, lengths_S, ends_K, discount * lam)
    advantages_K = np.where(np.isfinite(advantages_K), advantages_K, 0.0)
    out_T, returns_T = np.zeros(mask_T.size), np.zeros(mask_T.size)
    out_T[tokens_K], returns_T[tokens_K] = advantages_K, advantages_K + values_K
    return out_T, returns_T


def _discounted_sums(errors_K: Floats, lengths_S: Ints, ends_K: Ints, decay: float) -> Floats:
    """a = error + decay · (a of the next token), in all samples together, from their ends."""
    out_K = errors_K.copy()
    order = np.argsort(-lengths_S, kind="stable")
    ends, lengths = ends_K[order], lengths_S[order]
    num_left = lengths.size
    for back in range(2, int(lengths.max(initial=0)) + 1):
        while lengths[num_left - 1] < back:
            num_left -= 1
        tokens = ends[:num_left] - back
        out_K[tokens] += decay * out_K[tokens + 1]
    return out_K


OLD_VALUES, NEW_VALUES, RETURNS = "values", "values_now", "returns"


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss:
    """½ · the larger of the squared errors of the value and of the value kept near the old one."""

    clip: float = 0.2

    def __call__(self, tokens: Tokens) -> TokenLoss:
        columns = tokens.extra_columns or {}
        missing = [name for name in (OLD_VALUES, NEW_VALUES, RETURNS) if name not in columns]
        if missing:
            raise ValueError(
                f"the value loss reads the token columns {OLD_VALUES}, {NEW_VALUES} and {RETURNS}, "
                f"and {missing} are not there; add an infer stage of the critic and a gae stage"
            )
        old_K, now_K = columns[OLD_VALUES].detach(), columns[NEW_VALUES]
        returns_K = columns[RETURNS].detach()
        near_K = old_K + (now_K - old_K).clamp(-self.clip, self.clip)
        error_K, near_error_K = (now_K - returns_K) ** 2, (near_K - returns_K) ** 2
        metrics = {
            "value": now_K.detach(),
            "value/error": error_K.detach(),
            "value/clip_ratio": (near_error_K > error_K).to(error_K.dtype),
        }
        return TokenLoss(loss_K=0.5 * torch.maximum(error_K, near_error_K), metrics=metrics)
