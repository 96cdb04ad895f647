# SPDX-License-Identifier: Apache-2.0
"""Credit per turn from the outcome and step scores."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from penstock.config.builtin_stages import Axis, stage_function
from penstock.trainer.advantages.baselines import group_advantages
from penstock.trainer.advantages.credit import Combine, combine_returns, compare_turns
from penstock.trainer.pipeline.comparison import compare
from penstock.trainer.pipeline.layout import Columns, Layout, RowValues, TokenValues, TrainedTurns


@stage_function(writes={"advantage": Axis.TOKEN}, is_by_group=True)
def step_advantage(
    layout: Layout,
    *,
    reward: RowValues,
    step_scores: TokenValues,
    how: Literal["weighted", "return", "shaping", "min", "outcome"] = "weighted",
    share: Annotated[float, Field(ge=0)] = 0.5,
    discount: Annotated[float, Field(ge=0, le=1)] = 1.0,
    by_depth: bool = False,
) -> Columns:
    """Combine outcome and process scores as `Combine` describes, then compare each turn with the
    turns of its group, or only with turns of the same depth (`by_depth`). `share` weighs the
    outcome, `discount` what comes a turn later. The score of a turn is the one on its last trained
    token. A row whose payload is gone has no scores and is not compared. The outcome alone (how:
    outcome, or weighted with share: 1) gives the bits of GRPO: trajectories are compared."""
    is_outcome_only = how == "outcome" or (how == "weighted" and share == 1)
    if is_outcome_only and not by_depth:
        return {"advantage": compare(layout, reward, group_advantages)}
    trained = TrainedTurns.of(layout)
    turns = trained.over_ranks(layout)
    [scores_Q] = trained.gather(layout, turns, step_scores[None, trained.last_Q])
    returns_Q = combine_returns(
        reward, scores_Q, turns, Combine(how), share=share, discount=discount
    )
    credits_Q = compare_turns(returns_Q, layout.groups_R, turns, is_by_depth=by_depth)
    return {"advantage": trained.by_token(layout, turns, credits_Q)}


STAGE = step_advantage
