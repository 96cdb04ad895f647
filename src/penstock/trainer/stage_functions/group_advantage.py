# SPDX-License-Identifier: Apache-2.0
"""GRPO's advantage."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

from pydantic import Field

from penstock.config.builtin_stages import Axis, stage_function
from penstock.trainer.advantages.baselines import group_advantages
from penstock.trainer.advantages.own_rewards import Agents
from penstock.trainer.pipeline.comparison import compare
from penstock.trainer.pipeline.layout import Columns, Layout, RowValues


@stage_function(
    writes={"advantage": Axis.TOKEN},
    is_group_relative=True,
    is_by_group=True,
    default_role="advantage",
)
def group_advantage(
    layout: Layout,
    *,
    reward: RowValues,
    std_ddof: Annotated[int, Field(ge=0, le=1)] = 1,
    agents: Literal["parent", "siblings"] = "parent",
) -> Columns:
    """GRPO: reward minus the group's mean, divided by its standard deviation. `std_ddof` 1 is the
    unbiased one, 0 the population's. Roles and turns with their own rewards are compared with the
    same role or turn of the group, sub-agents as `agents` says: like the workflow that began the
    tree (`parent`), or with the agents that the same agent spawned (`siblings`)."""
    fn = partial(group_advantages, std_ddof=std_ddof)
    found = compare(layout, reward, fn, Agents(agents), is_by_group=True)
    return {"advantage": found}


STAGE = group_advantage
