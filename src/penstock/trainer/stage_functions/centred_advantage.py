# SPDX-License-Identifier: Apache-2.0
"""Dr.GRPO's advantage."""

from __future__ import annotations

from penstock.config.builtin_stages import Axis, stage_function
from penstock.trainer.advantages.baselines import centred_advantages
from penstock.trainer.pipeline.layout import Columns, Layout, RowValues


@stage_function(writes={"advantage": Axis.TOKEN}, is_group_relative=True, is_by_group=True)
def centred_advantage(layout: Layout, *, reward: RowValues) -> Columns:
    """Dr.GRPO: reward minus the group's mean."""
    return {"advantage": layout.by_token(centred_advantages(reward, layout.groups_R))}


STAGE = centred_advantage
