# SPDX-License-Identifier: Apache-2.0
"""REINFORCE++'s advantage with a group baseline."""

from __future__ import annotations

from penstock.config.builtin_stages import Axis, stage_function
from penstock.trainer.advantages.baselines import group_then_batch_advantages
from penstock.trainer.pipeline.comparison import compare
from penstock.trainer.pipeline.layout import Columns, Layout, RowValues


@stage_function(writes={"advantage": Axis.TOKEN}, is_group_relative=True)
def group_then_batch_advantage(layout: Layout, *, reward: RowValues) -> Columns:
    """REINFORCE++ with a baseline: reward minus the group's mean, divided by the batch's spread."""
    return {"advantage": compare(layout, reward, group_then_batch_advantages)}


STAGE = group_then_batch_advantage
