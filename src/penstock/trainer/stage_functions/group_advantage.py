# SPDX-License-Identifier: Apache-2.0
"""GRPO's advantage."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from penstock.config.builtin_stages import Axis, stage_function
from penstock.trainer.advantages.baselines import group_advantages
from penstock.trainer.pipeline.layout import Columns, Layout, RowValues


@stage_function(
    writes={"advantage": Axis.TOKEN},
    is_group_relative=True,
    is_by_group=True,
    default_role="advantage",
)
def group_advantage(
    layout: Layout, *, reward: RowValues, std_ddof: Annotated[int, Field(ge=0, le=1)] = 1
) -> Columns:
    """GRPO: reward minus the group's mean, divided by its standard deviation. `std_ddof` 1 is the
    unbiased one, 0 the population's."""
    values_R = group_advantages(reward, layout.groups_R, std_ddof=std_ddof)
    return {"advantage": layout.by_token(values_R)}


STAGE = group_advantage
