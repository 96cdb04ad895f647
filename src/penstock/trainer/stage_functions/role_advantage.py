# SPDX-License-Identifier: Apache-2.0
"""Each role compared with itself."""

from __future__ import annotations

import numpy as np

from penstock.config.builtin_stages import Axis, stage_function
from penstock.trainer.advantages.baselines import group_advantages, leave_one_out_advantages
from penstock.trainer.advantages.credit import by_role
from penstock.trainer.pipeline.comparison import role_rewards
from penstock.trainer.pipeline.layout import Columns, Layout, RowValues, TrainedTurns


@stage_function(writes={"advantage": Axis.TOKEN}, is_group_relative=True)
def role_advantage(
    layout: Layout, *, reward: RowValues, leave_one_out: bool = False, **rewards: RowValues
) -> Columns:
    """Compare each role with itself, over the rows of the group in which it took part: as GRPO
    does, or with the mean of the others (`leave_one_out`). Any further row column that the stage
    reads is the reward of the role with that name; other roles use their own or the row's."""
    rewards_RP = role_rewards(layout, reward)
    for role, name in enumerate(layout.roles.names):
        if name in rewards:
            rows = layout.roles.rows_N[layout.roles.roles_N == role]
            rewards_RP[rows, role] = np.where(np.isfinite(reward), rewards[name], np.nan)[rows]
    trained = TrainedTurns.of(layout)
    roles_Q = layout.roles_T[trained.last_Q].astype(np.int64)
    credit = leave_one_out_advantages if leave_one_out else group_advantages
    credits_Q = by_role(rewards_RP, layout.groups_R, roles_Q, trained.turns, credit)
    return {"advantage": trained.by_token(layout, trained.turns, credits_Q)}


STAGE = role_advantage
