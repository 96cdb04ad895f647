# SPDX-License-Identifier: Apache-2.0
"""Dr.GRPO's advantage."""

from __future__ import annotations

from typing import Literal

from penstock.config.builtin_stages import Axis, stage_function
from penstock.trainer.advantages.baselines import centred_advantages
from penstock.trainer.advantages.own_rewards import Agents
from penstock.trainer.pipeline.comparison import compare
from penstock.trainer.pipeline.layout import Columns, Layout, RowValues


@stage_function(writes={"advantage": Axis.TOKEN}, is_group_relative=True, is_by_group=True)
def centred_advantage(
    layout: Layout, *, reward: RowValues, agents: Literal["parent", "siblings"] = "parent"
) -> Columns:
    """Dr.GRPO: reward minus the group's mean."""
    found = compare(layout, reward, centred_advantages, Agents(agents), is_by_group=True)
    return {"advantage": found}


STAGE = centred_advantage
