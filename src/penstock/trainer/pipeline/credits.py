# SPDX-License-Identifier: Apache-2.0
"""The shipped compute stages: how a batch's rewards become credit by token.

Each is a stage function: a layout, the columns it reads as keywords, its options, and a mapping of
what it writes. They only join columns to the pure functions of `advantages/`. A row without a
reward has advantage 0 in all of them.

R = rows of the manifest, S = samples, T = tokens of all samples, Q = turns, row after row,
P = roles.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from penstock.errors import ConfigError
from penstock.trainer.advantages.baselines import (
    Credit,
    Moments,
    batch_advantages,
    centred_advantages,
    final_rewards,
    group_advantages,
    group_then_batch_advantages,
    last_trained,
    leave_one_out_advantages,
    moments,
    normalised,
    returns_to_go,
    subtract_kl,
    token_kl,
)
from penstock.trainer.advantages.credit import (
    Combine,
    Turns,
    by_role,
    combine_returns,
    compare_turns,
    discounted,
    last_turn,
    spread_to_tokens,
)
from penstock.trainer.advantages.overlong import Overlong, OverlongPenalty
from penstock.trainer.pipeline.layout import Floats, Layout, TrainedTurns

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
    """GRPO, on the tokens of each trajectory's last trained turn only."""
    return discounted_advantage(layout, reward=reward, discount=0.0)


def discounted_advantage(layout: Layout, *, reward: Floats, discount: float) -> Columns:
    """GRPO, whole on the trajectory's last trained turn; each turn before it gets `discount` times
    what the next one has."""
    own = TrainedTurns.of(layout)
    last_Q = last_turn(group_advantages(reward, layout.groups_R), own.turns)
    return _by_turn(layout, own, own.turns, discounted(last_Q, own.turns, discount))


def role_advantage(
    layout: Layout, *, reward: Floats, leave_one_out: bool = False, **rewards: Floats
) -> Columns:
    """Each role compared with itself, over those rows of the group in which it had a part: as GRPO
    does, or with the others' mean. A further column that the stage reads (renamed, if need be) is
    the reward of the role of its name, by row; the other roles have the row's."""
    for name, values in rewards.items():
        if np.shape(values) != layout.groups_R.shape:
            raise ConfigError(
                f"{name} is taken for the reward of a role and is no column by row; read one that "
                "is, or take it out of the options"
            )
    rewards_RP = np.full((reward.size, len(layout.roles.names)), np.nan)
    for role, name in enumerate(layout.roles.names):
        had_part = layout.roles.rows_N[layout.roles.roles_N == role]
        rewards_RP[had_part, role] = rewards.get(name, reward)[had_part]
    rewards_RP[~np.isfinite(reward)] = np.nan
    own = TrainedTurns.of(layout)
    roles_Q = layout.roles_T[own.last_Q].astype(np.int64)
    credit = leave_one_out_advantages if leave_one_out else group_advantages
    credits_Q = by_role(rewards_RP, layout.groups_R, roles_Q, own.turns, credit)
    return _by_turn(layout, own, own.turns, credits_Q)


def step_advantage(
    layout: Layout,
    *,
    reward: Floats,
    step_scores: Floats,
    how: str = "weighted",
    share: float = 0.5,
    discount: float = 1.0,
    by_depth: bool = False,
) -> Columns:
    """Outcome and process scores joined as `Combine` says, then each turn compared with the turns
    of its group, or with those as deep. `step_scores` is by token: that of a turn stands on its
    last trained one. A row that is gone has no scores, and is compared with nobody."""
    if step_scores.shape != layout.mask_T.shape:
        raise ConfigError(
            "step_scores is not by token; let the stage that scores steps write a float32 for each "
            "sampled token, or read a number by row as the reward"
        )
    own = TrainedTurns.of(layout)
    turns = Turns(
        nums_R=layout.sum_over_ranks(own.turns.nums_R.astype(np.float64)).astype(np.int64)
    )
    scores_Q = np.zeros(turns.rows_Q.size)
    place_Q = turns.starts_R[own.turns.rows_Q] + own.turns.depths_Q
    scores_Q[place_Q] = step_scores[own.last_Q]
    scores_Q = layout.sum_over_ranks(scores_Q)
    returns_Q = combine_returns(
        reward, scores_Q, turns, Combine(how), share=share, discount=discount
    )
    credits_Q = compare_turns(returns_Q, layout.groups_R, turns, is_by_depth=by_depth)
    return _by_turn(layout, own, turns, credits_Q)


def to_go_advantage(
    layout: Layout,
    *,
    reward: Floats,
    reference_logprobs: Floats,
    sampling_logprobs: Floats,
    coef: float,
) -> Columns:
    """REINFORCE++ without groups: from each token on, the reward at the end less `coef` times the
    KL on the way, over the whole batch's mean and spread."""
    rewards_T = final_rewards(reward, layout.mask_T, layout.starts_S, layout.ends_S, layout.rows_S)
    rewards_T -= coef * token_kl(sampling_logprobs, reference_logprobs)
    returns_T = returns_to_go(rewards_T, layout.mask_T, layout.starts_S, layout.ends_S)
    return {"advantage": _normalised(layout, reward, returns_T)}


def no_advantage(layout: Layout) -> Columns:
    """1 on every trained token, for losses that take their credit from elsewhere (a teacher)."""
    return {"advantage": layout.mask_T.astype(np.float64)}


def less_kl_reward(
    layout: Layout,
    *,
    reward: Floats,
    reference_logprobs: Floats,
    sampling_logprobs: Floats,
    coef: float,
) -> Columns:
    """Rewards less `coef` times the KL to the reference, summed over each row's trained tokens; to
    be compared by whatever comes after."""
    kl_T = token_kl(sampling_logprobs, reference_logprobs)
    own_R = subtract_kl(np.zeros(reward.size), kl_T, layout.mask_T, layout.rows_T, coef=coef)
    return {"less_kl_reward": reward + layout.sum_over_ranks(own_R)}


def overlong(
    layout: Layout,
    *,
    reward: Floats,
    truncated: Floats,
    max_length: int,
    margin: int,
    how: str = "both",
    length: Floats | None = None,
) -> Columns:
    """DAPO: long answers lose reward, and truncated ones are set aside. `max_length` is of one
    turn, and a row is as long as its longest; a stage that reads `length` holds all of a row's
    turns against it instead."""
    rule = OverlongPenalty(how=Overlong(how), max_length=max_length, margin=margin)
    lengths_R = layout.longest_R if length is None else length.astype(np.int64)
    shaped_R, is_excluded_R = rule(reward, lengths_R, truncated > 0)
    return {"shaped_reward": shaped_R, "excluded": is_excluded_R.astype(np.float64)}


def gae(
    layout: Layout,
    *,
    reward: Floats,
    values: Floats,
    truncated: Floats | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    normalise: bool = False,
) -> Columns:
    """PPO: each row's reward on its samples' last trained tokens, credited through the values.
    Behind the end of a row that was cut short (nobody, where `truncated` is not read) stands the
    value of its last trained token, not 0. `normalise` takes the advantages, not the returns, over
    the whole batch's mean and spread."""
    from penstock.trainer.advantages.gae import Gae  # brings torch, which a plan does without

    rewards_T = final_rewards(reward, layout.mask_T, layout.starts_S, layout.ends_S, layout.rows_S)
    after_S = None if truncated is None else _bootstrap_values(layout, values, truncated)
    found = Gae(discount=gamma, lam=lam)(rewards_T, values, layout.mask_T, layout.ends_S, after_S)
    advantages_T = found.advantages_T
    if normalise:
        advantages_T = _normalised(layout, reward, advantages_T)
    return {"advantage": advantages_T, "returns": found.returns_T}


def _bootstrap_values(layout: Layout, values: Floats, truncated: Floats) -> Floats:
    """What was still to come when a row was cut short, as the critic saw it last."""
    last_S = last_trained(layout.mask_T, layout.starts_S, layout.ends_S)
    is_cut_S = (truncated[layout.rows_S] > 0) & (last_S >= 0)
    return np.where(is_cut_S, values[last_S], 0.0)


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


def _by_turn(layout: Layout, own: TrainedTurns, turns: Turns, credits_Q: Floats) -> Columns:
    """Credit of `turns`, those of all ranks or this one's, on the tokens of this one's."""
    values_T = spread_to_tokens(credits_Q, turns, layout.rows_T, own.depths_T, layout.mask_T)
    return {"advantage": values_T}
