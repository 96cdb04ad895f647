# SPDX-License-Identifier: Apache-2.0
"""REINFORCE++ without groups."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from penstock.config.builtin_stages import Axis, stage_function
from penstock.trainer.advantages.baselines import final_rewards, returns_to_go, token_kl
from penstock.trainer.pipeline.layout import (
    Columns,
    Layout,
    RowValues,
    TokenValues,
    normalised_over_batch,
)


@stage_function(writes={"advantage": Axis.TOKEN})
def to_go_advantage(
    layout: Layout,
    *,
    reward: RowValues,
    reference_logprobs: TokenValues,
    sampling_logprobs: TokenValues,
    coef: Annotated[float, Field(ge=0)],
) -> Columns:
    """REINFORCE++ without groups: for each token, the final reward minus `coef` times the KL of the
    tokens up to the end, normalised over the batch."""
    rewards_T = final_rewards(reward, layout.mask_T, layout.starts_S, layout.ends_S, layout.rows_S)
    rewards_T -= coef * token_kl(sampling_logprobs, reference_logprobs)
    returns_T = returns_to_go(rewards_T, layout.mask_T, layout.starts_S, layout.ends_S)
    return {"advantage": normalised_over_batch(layout, reward, returns_T)}


STAGE = to_go_advantage
