# SPDX-License-Identifier: Apache-2.0
"""Credit of a trajectory, by comparison inside its group or its batch. Pure NumPy in float64.

Groups are complete, with the rewards of every row of the manifest; a row whose tokens are missing
still counts in its group's statistics. A row without a reward (NaN, or not finite) counts in none,
and its advantage is 0.

R = rows of the manifest, G = groups, T = tokens of all samples, S = samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from penstock.trainer.arrays import Bools, Floats, Ints

EPSILON = 1e-5
"""Keeps the division finite; far below any spread that counts as one."""
MIN_SPREAD = 1e-6
"""A group whose best and worst reward differ by no more has no spread, and no advantage."""

Credit = Callable[[Floats, Ints], Floats]
"""Rewards and groups of all rows of a batch to their advantages. Groups are numbered 0, 1, …"""


def group_advantages(
    rewards_R: Floats, groups_R: Ints, *, std_ddof: int = 1, epsilon: float = EPSILON
) -> Floats:
    """GRPO: (reward - group mean) / (group std + ε); a group of one, or without spread, gets zeros.

    `std_ddof` 1 is the unbiased std, 0 the population's: 7 % apart in groups of 8.
    """
    groups = _compare(rewards_R, groups_R)
    squares_G = np.bincount(groups_R, groups.centred_R**2, groups.sizes_G.size)
    stds_G = np.sqrt(squares_G / np.maximum(groups.sizes_G - std_ddof, 1))
    return groups.centred_R / (stds_G[groups_R] + epsilon)


def centred_advantages(rewards_R: Floats, groups_R: Ints) -> Floats:
    """Dr.GRPO: reward - group mean. Meant for the aggregation `fixed-constant`."""
    return _compare(rewards_R, groups_R).centred_R


def leave_one_out_advantages(rewards_R: Floats, groups_R: Ints) -> Floats:
    """RLOO: reward - mean of the group's other members; a group of one gets zero."""
    groups = _compare(rewards_R, groups_R)
    factor_G = groups.sizes_G / np.maximum(groups.sizes_G - 1, 1)
    return groups.centred_R * factor_G[groups_R]


def batch_advantages(rewards_R: Floats, groups_R: Ints) -> Floats:
    """REINFORCE with the batch as its baseline: (reward - mean) / (std + ε) over all rows, whatever
    their groups; for groups of one."""
    return group_advantages(rewards_R, np.zeros_like(groups_R))


def group_then_batch_advantages(rewards_R: Floats, groups_R: Ints) -> Floats:
    """REINFORCE++ with a baseline: reward - group mean, then (· - mean) / (std + ε) over all rows.
    Not the same as dividing by the batch's std of rewards."""
    centred_R = np.where(np.isfinite(rewards_R), centred_advantages(rewards_R, groups_R), np.nan)
    return group_advantages(centred_R, np.zeros_like(groups_R))


def returns_to_go(rewards_T: Floats, mask_T: Bools, starts_S: Ints, ends_S: Ints) -> Floats:
    """Sum of a sample's rewards from each trained token on; 0 elsewhere. Undiscounted.

    REINFORCE++ without groups is this over `final_rewards` less β·k1, then `normalised`. A sample
    without a reward has none from any token on: NaN.
    """
    counted_T = np.where(mask_T, rewards_T, 0.0)
    out_T = np.zeros_like(counted_T)
    for start, end in zip(starts_S, ends_S, strict=True):
        out_T[start:end] = counted_T[start:end][::-1].cumsum()[::-1]
    return np.where(mask_T, out_T, 0.0)


def final_rewards(
    rewards_R: Floats, mask_T: Bools, starts_S: Ints, ends_S: Ints, rows_S: Ints
) -> Floats:
    """Each row's reward on the last trained token of each of its samples, 0 on all others: never on
    padding, context or a tool's output. A row without a reward gives NaN."""
    last_S = last_trained(mask_T, starts_S, ends_S)
    has_one_S = last_S >= 0
    out_T = np.zeros(mask_T.size)
    rewards_S = rewards_R[rows_S[has_one_S]]
    out_T[last_S[has_one_S]] = np.where(np.isfinite(rewards_S), rewards_S, np.nan)
    return out_T


def last_trained(mask_T: Bools, starts_S: Ints, ends_S: Ints) -> Ints:
    """The last trained token of each sample; -1 where it has none."""
    upto_T = np.maximum.accumulate(np.where(mask_T, np.arange(mask_T.size), -1))
    last_S = upto_T[ends_S - 1] if ends_S.size else np.zeros(0, np.int64)
    return np.where(last_S >= starts_S, last_S, -1)


def token_kl(logprobs_T: Floats, reference_T: Floats) -> Floats:
    """k1 by token, log now - log reference, bounded: to be taken off the reward."""
    return np.clip(logprobs_T - reference_T, -20.0, 20.0)


def subtract_kl(
    rewards_R: Floats, kl_T: Floats, mask_T: Bools, rows_T: Ints, *, coef: float
) -> Floats:
    """Rewards less the KL summed over a row's trained tokens, as RLOO takes it in."""
    return rewards_R - coef * np.bincount(rows_T[mask_T], kl_T[mask_T], rewards_R.size)


@dataclass(frozen=True, slots=True)
class Moments:
    """Of the advantages of trained tokens; added over ranks before anybody normalises."""

    num_tokens: float
    total: float
    square: float

    @property
    def mean(self) -> float:
        """Worth watching: with groups without spread left out, it shifts what counts as good."""
        return self.total / max(self.num_tokens, 1)

    @property
    def std(self) -> float:
        return float(np.sqrt(max(self.square / max(self.num_tokens, 1) - self.mean**2, 0.0)))


def moments(advantages_T: Floats, mask_T: Bools) -> Moments:
    trained = advantages_T[mask_T & np.isfinite(advantages_T)]
    return Moments(
        num_tokens=trained.size, total=float(trained.sum()), square=float((trained**2).sum())
    )


def normalised(advantages_T: Floats, mask_T: Bools, of_batch: Moments) -> Floats:
    """(advantage - mean) / (std + ε) over the trained tokens of the batch; 0 elsewhere, and where
    the advantage is NaN."""
    if of_batch.std <= MIN_SPREAD:
        return np.zeros_like(advantages_T)
    counts_T = mask_T & np.isfinite(advantages_T)
    return np.where(counts_T, (advantages_T - of_batch.mean) / (of_batch.std + EPSILON), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Groups:
    sizes_G: Ints
    """Rows that have a reward."""
    centred_R: Floats
    """Reward - group mean; 0 without a reward or without spread."""


def _compare(rewards_R: Floats, groups_R: Ints) -> _Groups:
    has_reward_R = np.isfinite(rewards_R)
    known_R = np.where(has_reward_R, rewards_R, 0.0)
    sizes_G = np.bincount(groups_R, has_reward_R).astype(np.int64)
    means_G = np.bincount(groups_R, known_R) / np.maximum(sizes_G, 1)
    counts_R = has_reward_R & has_spread(rewards_R, groups_R)
    return _Groups(sizes_G=sizes_G, centred_R=np.where(counts_R, known_R - means_G[groups_R], 0.0))


def has_spread(values: Floats, groups: Ints) -> Bools:
    """Whether the group of each value, those not finite left out, has more than `MIN_SPREAD`."""
    is_known = np.isfinite(values)
    num_groups = int(groups.max(initial=-1)) + 1
    best_G = np.full(num_groups, -np.inf)
    worst_G = np.full(num_groups, np.inf)
    np.maximum.at(best_G, groups[is_known], values[is_known])
    np.minimum.at(worst_G, groups[is_known], values[is_known])
    return (best_G - worst_G > MIN_SPREAD)[groups]
