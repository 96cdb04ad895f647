# SPDX-License-Identifier: Apache-2.0
"""The reward minus a KL penalty."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from penstock.config.builtin_stages import Axis, stage_function
from penstock.trainer.advantages.baselines import subtract_kl, token_kl
from penstock.trainer.pipeline.layout import Columns, Layout, RowValues, TokenValues


@stage_function(writes={"less_kl_reward": Axis.ROW}, is_by_group=True)
def less_kl_reward(
    layout: Layout,
    *,
    reward: RowValues,
    reference_logprobs: TokenValues,
    sampling_logprobs: TokenValues,
    coef: Annotated[float, Field(ge=0)],
) -> Columns:
    """Rewards minus `coef` times the KL to the reference, summed over each row's trained tokens;
    another stage compares them."""
    kl_T = token_kl(sampling_logprobs, reference_logprobs)
    own_R = subtract_kl(np.zeros(reward.size), kl_T, layout.mask_T, layout.rows_T, coef=coef)
    return {"less_kl_reward": reward + layout.sum_over_ranks(own_R)}


STAGE = less_kl_reward
