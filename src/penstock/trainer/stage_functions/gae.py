# SPDX-License-Identifier: Apache-2.0
"""Generalised advantage estimation (PPO)."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from penstock.config.builtin_stages import Axis, stage_function
from penstock.trainer.advantages.baselines import final_rewards, last_trained
from penstock.trainer.arrays import Floats
from penstock.trainer.pipeline.layout import (
    Columns,
    Layout,
    RowValues,
    TokenValues,
    normalised_over_batch,
)


@stage_function(writes={"advantage": Axis.TOKEN, "returns": Axis.TOKEN}, default_role="critic")
def gae(
    layout: Layout,
    *,
    reward: RowValues,
    values: TokenValues,
    truncated: RowValues | None = None,
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0,
    lam: Annotated[float, Field(ge=0, le=1)] = 1.0,
    normalise: bool = False,
) -> Columns:
    """PPO: each row's reward is on the last trained token of its samples, credited through the
    critic's values. `gamma` discounts later rewards; `lam` 1 uses full returns, 0 only the next
    value. A stage that reads `truncated` bootstraps such rows from their last value instead of 0.
    `normalise` scales the advantages, not the returns, over the batch."""
    # imports torch, which planning does not need
    from penstock.trainer.advantages.gae import estimate_advantages

    rewards_T = final_rewards(reward, layout.mask_T, layout.starts_S, layout.ends_S, layout.rows_S)
    after_S = None if truncated is None else _bootstrap_values(layout, values, truncated)
    advantages_T, returns_T = estimate_advantages(
        rewards_T, values, layout.mask_T, layout.ends_S, after_S, discount=gamma, lam=lam
    )
    if normalise:
        advantages_T = normalised_over_batch(layout, reward, advantages_T)
    return {"advantage": advantages_T, "returns": returns_T}


def _bootstrap_values(layout: Layout, values: Floats, truncated: Floats) -> Floats:
    """The critic's last value of truncated rows, 0 for all others."""
    last_S = last_trained(layout.mask_T, layout.starts_S, layout.ends_S)
    is_cut_S = (truncated[layout.rows_S] > 0) & (last_S >= 0)
    return np.where(is_cut_S, values[last_S], 0.0)


STAGE = gae
