# SPDX-License-Identifier: Apache-2.0
"""RLOO's advantage."""

from __future__ import annotations

from typing import Literal

from penstock.config.builtin_stages import Axis, stage_function
from penstock.trainer.advantages.baselines import leave_one_out_advantages
from penstock.trainer.advantages.own_rewards import Agents
from penstock.trainer.pipeline.comparison import compare
from penstock.trainer.pipeline.layout import Columns, Layout, RowValues


@stage_function(writes={"advantage": Axis.TOKEN}, is_group_relative=True, is_by_group=True)
def leave_one_out_advantage(
    layout: Layout, *, reward: RowValues, agents: Literal["parent", "siblings"] = "parent"
) -> Columns:
    """RLOO: reward minus the mean of the group's other members."""
    found = compare(layout, reward, leave_one_out_advantages, Agents(agents), is_by_group=True)
    return {"advantage": found}


STAGE = leave_one_out_advantage
