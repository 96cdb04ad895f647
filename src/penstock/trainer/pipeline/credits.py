# SPDX-License-Identifier: Apache-2.0
"""The shipped compute stages: how a batch's rewards become credit by token.

Each is a stage function: a layout, the columns it reads as keywords, its options, and a mapping of
what it writes. They only join columns to the pure functions of `advantages/`.

R = rows of the manifest, T = tokens of all samples.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from penstock.trainer.advantages.baselines import (
    Credit,
    Moments,
    batch_advantages,
    centred_advantages,
    final_rewards,
    group_advantages,
    group_then_batch_advantages,
    leave_one_out_advantages,
    moments,
    normalised,
)
from penstock.trainer.advantages.credit import Turns, last_turn, on_tokens
from penstock.trainer.advantages.overlong import Overlong, OverlongRule
from penstock.trainer.pipeline.layout import Floats, Layout

Columns = Mapping[str, Floats]


def group_advantage(layout: Layout, *, reward: Floats, std_ddof: int = 1) -> Columns:
    """GRPO: against the group, in units of its spread."""
    values_R = group_advantages(reward, layout.groups_R, std_ddof=std_ddof)
    return {"advantage": layout.by_token(values_R)}


def centred_advantage(layout: Layout, *, reward: Floats) -> Columns:
    """Dr.GRPO: against the group's mean."""
    return _credited(layout, reward, centred_advantages)


def leave_one_out_advantage(layout: Layout, *, reward: Floats) -> Columns:
    """RLOO: against the mean of the group's other members."""
    return _credited(layout, reward, leave_one_out_advantages)


def batch_advantage(layout: Layout, *, reward: Floats) -> Columns:
    """REINFORCE with the batch as its baseline; for groups of one."""
    return _credited(layout, reward, batch_advantages)


def group_then_batch_advantage(layout: Layout, *, reward: Floats) -> Columns:
    """REINFORCE++ with a baseline: against the group, in units of the batch's spread."""
    return _credited(layout, reward, group_then_batch_advantages)


def last_turn_advantage(layout: Layout, *, reward: Floats) -> Columns:
    """GRPO, on the tokens of each trajectory's last turn only."""
    advantages_R = group_advantages(reward, layout.groups_R)
    nums_R = np.zeros(layout.groups_R.size, np.int64)
    np.maximum.at(nums_R, layout.rows_T, layout.turns_T.astype(np.int64) + 1)
    turns = Turns(nums_R=nums_R)
    credits_Q = last_turn(advantages_R, turns)
    values_T = on_tokens(
        credits_Q, turns, layout.rows_T, layout.turns_T.astype(np.int64), layout.mask_T
    )
    return {"advantage": values_T}


def no_advantage(layout: Layout) -> Columns:
    """1 on every trained token, for losses that take their credit from elsewhere (a teacher)."""
    return {"advantage": layout.mask_T.astype(np.float64)}


def overlong(
    layout: Layout,
    *,
    reward: Floats,
    length: Floats,
    truncated: Floats,
    max_length: int,
    margin: int,
    how: str = "both",
) -> Columns:
    """DAPO: long answers lose reward, and truncated ones are set aside."""
    rule = OverlongRule(how=Overlong(how), max_length=max_length, margin=margin)
    shaped_R, is_aside_R = rule(reward, length.astype(np.int64), truncated > 0)
    return {"shaped_reward": shaped_R, "excluded": is_aside_R.astype(np.float64)}


def gae(
    layout: Layout,
    *,
    reward: Floats,
    values: Floats,
    gamma: float = 1.0,
    lam: float = 1.0,
    normalise: bool = False,
) -> Columns:
    """PPO: each row's reward on its samples' last trained tokens, credited through the values.
    `normalise` takes the advantages, not the returns, over the whole batch's mean and spread."""
    from penstock.trainer.advantages.gae import Gae  # brings torch, which a plan does without

    rewards_T = final_rewards(reward, layout.mask_T, layout.starts_S, layout.ends_S, layout.rows_S)
    found = Gae(discount=gamma, trace=lam)(rewards_T, values, layout.mask_T, layout.ends_S)
    advantages_T = found.advantages_T
    if normalise:
        advantages_T = _normalised(layout, reward, advantages_T)
    return {"advantage": advantages_T, "returns": found.returns_T}


def _normalised(layout: Layout, reward: Floats, advantages_T: Floats) -> Floats:
    """Over the tokens of all ranks; those of rows without a reward count nowhere, and stay 0."""
    counts_T = layout.mask_T & np.isfinite(reward[layout.rows_T])
    own = moments(advantages_T, counts_T)
    sums = layout.sum_over_ranks(np.array([own.num_tokens, own.total, own.square], np.float64))
    num_tokens, total, square = sums.tolist()
    of_batch = Moments(num_tokens=int(num_tokens), total=total, square=square)
    return normalised(advantages_T, counts_T, of_batch)


def _credited(layout: Layout, reward_R: Floats, credit: Credit) -> Columns:
    return {"advantage": layout.by_token(credit(reward_R, layout.groups_R))}
