# SPDX-License-Identifier: Apache-2.0
"""Credit of a trajectory, by comparison inside its group or its batch. Pure NumPy in float64.

Groups come whole, with the rewards of every row of the manifest; a row whose tokens are gone still
counts in its group's statistics.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

EPSILON = 1e-5
"""Keeps the division finite; far below any spread that counts as one."""
MIN_SPREAD = 1e-6
"""A group whose best and worst reward differ by no more has no spread, and no advantage."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Credit = Callable[[Floats, Ints], Floats]
"""Rewards and groups of all rows of a batch to their advantages."""


def group_advantages(rewards_R: Floats, groups_R: Ints) -> Floats:
    """GRPO: (reward - group mean) / (group std + ε), the unbiased std. R = rows.

    `groups_R` numbers the groups 0, 1, …; a group of one, or without spread, gets zeros.
    """
    if rewards_R.size == 0:
        return np.zeros(0)
    sizes_G = np.bincount(groups_R)
    means_G = np.bincount(groups_R, rewards_R) / np.maximum(sizes_G, 1)
    centred_R = rewards_R - means_G[groups_R]
    squares_G = np.bincount(groups_R, centred_R**2)
    stds_G = np.sqrt(squares_G / np.maximum(sizes_G - 1, 1))
    has_spread_G = _spread(rewards_R, groups_R, sizes_G.size) > MIN_SPREAD
    return np.where(has_spread_G[groups_R], centred_R / (stds_G[groups_R] + EPSILON), 0.0)


def batch_advantages(rewards_R: Floats, groups_R: Ints) -> Floats:
    """REINFORCE with the batch as its baseline: (reward - mean) / (std + ε) over all rows, whatever
    their groups; for groups of one."""
    return group_advantages(rewards_R, np.zeros_like(groups_R))


def _spread(rewards_R: Floats, groups_R: Ints, num_groups: int) -> Floats:
    best_G = np.full(num_groups, -np.inf)
    worst_G = np.full(num_groups, np.inf)
    np.maximum.at(best_G, groups_R, rewards_R)
    np.minimum.at(worst_G, groups_R, rewards_R)
    return best_G - worst_G
