# SPDX-License-Identifier: Apache-2.0
"""The advantages of a batch: rows compared with rows or, where roles and turns have their own
rewards, each with its like.

Owns how a batch's layout becomes the arrays of `advantages.own_rewards`, over all ranks. In a
batch without such rewards, every turn of a row gets the row's advantage.
"""

from __future__ import annotations

import numpy as np

from penstock.trainer.advantages.baselines import Credit
from penstock.trainer.advantages.credit import by_role
from penstock.trainer.advantages.own_rewards import Agents, TurnRewards, turn_credits
from penstock.trainer.arrays import Floats
from penstock.trainer.pipeline.layout import Layout, TrainedTurns


def compare(
    layout: Layout,
    reward_R: Floats,
    fn: Credit,
    agents: Agents = Agents.PARENT,
    *,
    is_by_group: bool = False,
) -> Floats:
    """Advantages by token. `reward_R` is the column `reward`, as earlier stages changed it.
    `is_by_group`: `fn` compares inside groups, whatever else is in the batch."""
    own = layout.roles.own
    if own is None:
        return layout.by_token(fn(reward_R, layout.groups_R))
    trained = TrainedTurns.of(layout)
    rewards_RP = role_rewards(layout, reward_R)
    if not own.has_turn_rewards:
        roles_Q = layout.roles_T[trained.last_Q].astype(np.int64)
        credits_Q = by_role(rewards_RP, layout.groups_R, roles_Q, trained.turns, fn)
        return trained.by_token(layout, trained.turns, credits_Q)
    turns = trained.over_ranks(layout)
    rewards_Q = layout.rewards_T[trained.last_Q]
    columns = (layout.roles_T, layout.agents_T, layout.spawners_T)
    parts_XQ = [np.isfinite(rewards_Q), np.nan_to_num(rewards_Q)]
    parts_XQ += [column_T[trained.last_Q] for column_T in columns]
    is_own_Q, own_Q, *numbers = trained.gather(layout, turns, np.array(parts_XQ, np.float64))
    roles_Q, agents_Q, spawners_Q = (part_Q.astype(np.int64) for part_Q in numbers)
    shift_R = reward_R - own.rewards_R
    earned = TurnRewards(
        roles_Q=roles_Q,
        own_Q=np.where(is_own_Q > 0, own_Q + shift_R[turns.rows_Q], np.nan),
        agents_Q=agents_Q,
        spawners_Q=spawners_Q,
    )
    credits_Q = turn_credits(
        rewards_RP,
        own.team_R + shift_R,
        layout.groups_R,
        turns,
        earned,
        fn,
        agents,
        is_by_group=is_by_group,
    )
    return trained.by_token(layout, turns, credits_Q)


def role_rewards(layout: Layout, reward_R: Floats) -> Floats:
    """Rewards by row and role: the role's own or else the row's, with what stages changed; NaN
    where a role had no part or the row has no reward."""
    roles = layout.roles
    rewards_RP = np.full((reward_R.size, len(roles.names)), np.nan)
    rewards_N = reward_R[roles.rows_N]
    if roles.own is not None:
        rewards_N = roles.own.rewards_N + (rewards_N - roles.own.rewards_R[roles.rows_N])
    rewards_RP[roles.rows_N, roles.roles_N] = rewards_N
    rewards_RP[~np.isfinite(reward_R)] = np.nan
    return rewards_RP
