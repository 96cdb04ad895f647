# SPDX-License-Identifier: Apache-2.0
"""REINFORCE's advantage over the batch."""

from __future__ import annotations

from penstock.config.builtin_stages import Axis, stage_function
from penstock.trainer.advantages.baselines import batch_advantages
from penstock.trainer.pipeline.comparison import compare
from penstock.trainer.pipeline.layout import Columns, Layout, RowValues


@stage_function(writes={"advantage": Axis.TOKEN})
def batch_advantage(layout: Layout, *, reward: RowValues) -> Columns:
    """REINFORCE with the batch as its baseline; for groups of one."""
    return {"advantage": compare(layout, reward, batch_advantages)}


STAGE = batch_advantage
