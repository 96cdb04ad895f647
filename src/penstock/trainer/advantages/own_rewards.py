# SPDX-License-Identifier: Apache-2.0
"""Credit where roles, turns or sub-agents have their own rewards. Pure NumPy in float64.

Owns what is compared with what. A reward is compared only with rewards of the same kind:
- a turn without its own reward: its role's reward, over the group's rows in which the role acted;
- the k-th turn of a role that has its own: the same turn of that role in the group's other rows;
- turns of a sub-agent that have their own: as `Agents` says.

R = rows of the manifest, G = groups, Q = turns of all rows, row after row, P = roles,
X = sub-agents with a reward, E = what they are compared with, set after set.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from penstock.trainer.advantages.baselines import Credit
from penstock.trainer.advantages.credit import Turns, by_role
from penstock.trainer.arrays import Bools, Floats, Ints
from penstock.trainer.samples import ranges


class Agents(StrEnum):
    """What the reward of a sub-agent is compared with."""

    PARENT = "parent"
    """The baseline of the workflow that began the tree: the rewards of the group's other rows, its
    own in the place of its row's."""
    SIBLINGS = "siblings"
    """The rewards of the agents with the same parent in the same row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRewards:
    """What each turn earned, and who made it."""

    roles_Q: Ints
    own_Q: Floats
    """Its own reward; NaN for none."""
    agents_Q: Ints
    """Number of its agent in its row; 0 for the workflow itself."""
    spawners_Q: Ints
    """Number of the agent that spawned its agent."""


def turn_credits(
    rewards_RP: Floats,
    rewards_R: Floats,
    groups_R: Ints,
    turns: Turns,
    earned: TurnRewards,
    fn: Credit,
    agents: Agents = Agents.PARENT,
    *,
    is_by_group: bool = False,
) -> Floats:
    """The credit of each turn. `rewards_RP`: of each role, NaN where it had no part; `rewards_R`:
    of the rows themselves. A row without a reward (NaN) counts in nothing, and its turns get 0.
    `is_by_group`: `fn` compares inside groups, whatever else is in the batch."""
    rows_Q = turns.rows_Q
    credits_Q = by_role(rewards_RP, groups_R, earned.roles_Q, turns, fn)
    is_own_Q = np.isfinite(earned.own_Q)
    values_Q = np.where(is_own_Q, earned.own_Q, rewards_RP[rows_Q, earned.roles_Q])
    values_Q[~np.isfinite(rewards_R)[rows_Q]] = np.nan
    is_top_Q = earned.agents_Q == 0
    if (is_own_Q & is_top_Q).any():
        found = _SameTurns.of(earned.roles_Q, is_own_Q, is_top_Q, rows_Q, groups_R)
        credits_Q[found.turns_K] = found.credits(values_Q, fn, is_by_group=is_by_group)
    if (is_agents_Q := is_own_Q & ~is_top_Q).any():
        found = _OwnAgents.of(values_Q, rows_Q, earned, is_agents_Q)
        if agents is Agents.SIBLINGS:
            credits_X = found.by_siblings(fn)
        else:
            credits_X = found.by_parent(rewards_R, groups_R, fn)
        credits_Q[is_agents_Q] = credits_X[found.of_Q]
    return credits_Q


def _places(rows_Q: Ints, roles_Q: Ints, is_counted_Q: Bools) -> Ints:
    """Index of each counted turn among its role's turns in its row; -1 for the others."""
    places_Q = np.full(rows_Q.size, -1)
    counted_K = np.flatnonzero(is_counted_Q)
    key_K = rows_Q[counted_K] * (int(roles_Q.max(initial=0)) + 1) + roles_Q[counted_K]
    order_K = np.argsort(key_K, kind="stable")
    _, firsts, sizes = np.unique(key_K[order_K], return_index=True, return_counts=True)
    places_Q[counted_K[order_K]] = np.arange(counted_K.size) - np.repeat(firsts, sizes)
    return places_Q


@dataclass(frozen=True, slots=True, kw_only=True)
class _SameTurns:
    """The k-th turns of a role, set after set, in the groups in which one of them has its own
    reward."""

    turns_K: Ints
    sets_K: Ints
    groups_K: Ints
    """Groups of different sets differ."""

    @classmethod
    def of(
        cls, roles_Q: Ints, is_own_Q: Bools, is_top_Q: Bools, rows_Q: Ints, groups_R: Ints
    ) -> _SameTurns:
        turns_K = np.flatnonzero(is_top_Q)
        places_K = _places(rows_Q, roles_Q, is_top_Q)[turns_K]
        _, sets_K = np.unique(
            roles_Q[turns_K] * (int(places_K.max()) + 1) + places_K, return_inverse=True
        )
        order_K = np.argsort(sets_K, kind="stable")
        turns_K, sets_K = turns_K[order_K], sets_K[order_K]
        key_K = sets_K * (int(groups_R.max()) + 1) + groups_R[rows_Q[turns_K]]
        _, groups_K = np.unique(key_K, return_inverse=True)
        is_in_K = np.bincount(groups_K, is_own_Q[turns_K])[groups_K] > 0
        return cls(turns_K=turns_K[is_in_K], sets_K=sets_K[is_in_K], groups_K=groups_K[is_in_K])

    def credits(self, values_Q: Floats, fn: Credit, *, is_by_group: bool) -> Floats:
        """Each set is a separate batch; a function that looks at groups only takes all sets at
        once."""
        starts = [] if is_by_group else np.flatnonzero(np.diff(self.sets_K)) + 1
        found: list[Floats] = []
        for turns, groups in zip(
            np.split(self.turns_K, starts), np.split(self.groups_K, starts), strict=True
        ):
            _, numbered = np.unique(groups, return_inverse=True)
            found.append(fn(values_Q[turns], numbered))
        return np.concatenate(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OwnAgents:
    """Sub-agents that have a reward; it is the mean of their turns' rewards."""

    rows_X: Ints
    spawners_X: Ints
    values_X: Floats
    of_Q: Ints
    """The agent of each turn that has its own reward and is of a sub-agent."""

    @classmethod
    def of(
        cls, values_Q: Floats, rows_Q: Ints, earned: TurnRewards, is_agents_Q: Bools
    ) -> _OwnAgents:
        width = int(earned.agents_Q.max()) + 1
        key_K = rows_Q[is_agents_Q] * width + earned.agents_Q[is_agents_Q]
        found_X, first_X, of_K = np.unique(key_K, return_index=True, return_inverse=True)
        return cls(
            rows_X=found_X // width,
            spawners_X=earned.spawners_Q[is_agents_Q][first_X],
            values_X=np.bincount(of_K, values_Q[is_agents_Q]) / np.bincount(of_K),
            of_Q=of_K,
        )

    def by_siblings(self, fn: Credit) -> Floats:
        """Compared with the agents that the same agent of the same row spawned."""
        width = int(self.spawners_X.max()) + 1
        _, sets_X = np.unique(self.rows_X * width + self.spawners_X, return_inverse=True)
        return fn(self.values_X, sets_X)

    def by_parent(self, rewards_R: Floats, groups_R: Ints, fn: Credit) -> Floats:
        """Compared with the other rows of the group, as the workflow of its own row is."""
        firsts_G = np.searchsorted(groups_R, np.arange(int(groups_R[-1]) + 1))
        sizes_X = np.bincount(groups_R)[groups_R[self.rows_X]]
        rows_E = ranges(firsts_G[groups_R[self.rows_X]], sizes_X)
        own_X = np.cumsum(sizes_X) - sizes_X + self.rows_X - firsts_G[groups_R[self.rows_X]]
        values_E = rewards_R[rows_E]
        values_E[own_X] = self.values_X
        return fn(values_E, np.repeat(np.arange(sizes_X.size), sizes_X))[own_X]
