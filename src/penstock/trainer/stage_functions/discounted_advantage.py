# SPDX-License-Identifier: Apache-2.0
"""GRPO's advantage, discounted over turns."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from penstock.config.builtin_stages import Axis, stage_function
from penstock.trainer.advantages.baselines import group_advantages
from penstock.trainer.advantages.credit import discounted, last_turn
from penstock.trainer.pipeline.layout import Columns, Layout, RowValues, TrainedTurns


@stage_function(writes={"advantage": Axis.TOKEN}, is_group_relative=True, is_by_group=True)
def discounted_advantage(
    layout: Layout, *, reward: RowValues, discount: Annotated[float, Field(ge=0, le=1)]
) -> Columns:
    """GRPO: the trajectory's last trained turn gets all of it, each earlier turn `discount` times
    the credit of the next."""
    trained = TrainedTurns.of(layout)
    last_Q = last_turn(group_advantages(reward, layout.groups_R), trained.turns)
    credits_Q = discounted(last_Q, trained.turns, discount)
    return {"advantage": trained.by_token(layout, trained.turns, credits_Q)}


STAGE = discounted_advantage
