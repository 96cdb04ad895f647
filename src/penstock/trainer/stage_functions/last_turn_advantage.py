# SPDX-License-Identifier: Apache-2.0
"""GRPO's advantage, on the last turn."""

from __future__ import annotations

from penstock.config.builtin_stages import Axis, stage_function
from penstock.trainer.pipeline.layout import Columns, Layout, RowValues
from penstock.trainer.stage_functions.discounted_advantage import discounted_advantage


@stage_function(writes={"advantage": Axis.TOKEN}, is_group_relative=True, is_by_group=True)
def last_turn_advantage(layout: Layout, *, reward: RowValues) -> Columns:
    """GRPO, on the tokens of each trajectory's last trained turn only."""
    return discounted_advantage(layout, reward=reward, discount=0.0)


STAGE = last_turn_advantage
