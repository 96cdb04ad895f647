# SPDX-License-Identifier: Apache-2.0
"""Stage functions as a user writes them: nothing of penstock but its types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.config.builtin_stages import Axis, stage_function
from penstock.trainer.pipeline.layout import Layout, RowColumn, TokenColumn
from penstock.types import Trajectory

Floats = npt.NDArray[np.float64]


def shape(layout: Layout, *, reward: Floats, bonus: float = 0.1) -> Mapping[str, Floats]:
    """A bonus for rows whose answers are short."""
    lengths_R = np.bincount(layout.rows_T[layout.mask_T], minlength=layout.groups_R.size)
    return {"shaped_reward": reward + bonus * (lengths_R <= 2)}


def plain_loss(tokens: Any, *, scale: float) -> Any:
    """A loss of one's own; never called here."""
    raise AssertionError(scale)


def score(trajectory: Trajectory, *, factor: float = 1.0) -> dict[str, float]:
    """A scripted scorer."""
    return {"score": factor * len(trajectory.turns[0].sampled_ids) / 4}


async def score_late(trajectory: Trajectory) -> dict[str, float]:
    return score(trajectory)


def reference(trajectory: Trajectory) -> dict[str, bytes]:
    """A scripted reference: log-probs a little below those of the engine."""
    values = np.frombuffer(trajectory.turns[0].logprobs, "<f4") - 0.125
    return {"reference_logprobs": values.astype("<f4").tobytes()}


def reward_of_length(trajectory: Trajectory) -> dict[str, float]:
    """A scripted reward model."""
    return {"reward": len(trajectory.turns[0].sampled_ids) / 4}


def step_scores(trajectory: Trajectory, *, reward: float) -> dict[str, bytes]:
    """A scripted process reward model that reads what the reward model wrote: a number for each
    sampled token, smaller in later turns and slots."""
    lengths = [len(turn.sampled_ids) // 4 for turn in trajectory.turns]
    first = 2 + trajectory.slot
    scores = np.repeat([reward / (first + index) for index, _ in enumerate(lengths)], lengths)
    return {"step_scores": scores.astype("<f4").tobytes()}


def broken(trajectory: Trajectory) -> dict[str, float]:
    raise RuntimeError("the scorer is broken")


def other_column(layout: Layout, *, reward: Floats) -> Mapping[str, Floats]:
    return {"advantages": reward}


def by_row(layout: Layout, *, reward: Floats) -> Mapping[str, Floats]:
    return {"advantage": reward - reward.mean()}


def all_compared(layout: Layout, *, reward: Floats) -> Mapping[str, Floats]:
    """Takes no notice of rows without a reward."""
    return {"advantage": layout.by_token(reward - np.nanmean(reward))}


def returns(layout: Layout, *, reward: Floats) -> Mapping[str, Floats]:
    """What a critic is to say, without an advantage beside it."""
    return {"returns": layout.by_token(np.nan_to_num(reward))}


def unannotated(layout: Layout, *, reward: Floats):
    return {"advantage": reward}


def needy(layout: Layout, *, reward: Floats, strength: float) -> Mapping[str, Floats]:
    return {"advantage": strength * reward}


def no_layout(*, reward: Floats) -> Mapping[str, Floats]:
    return {"advantage": reward}


def plain_bonus(layout: Layout, *, reward: Floats) -> Mapping[str, Floats]:
    return {"bonus": np.full_like(reward, 2.0)}


def typed_rows(layout: Layout, *, reward: Floats) -> Mapping[str, RowColumn]:
    return {"bonus": RowColumn(np.full_like(reward, 2.0))}


def typed_tokens(layout: Layout, *, reward: Floats) -> Mapping[str, TokenColumn]:
    return {"bonus": TokenColumn(np.full(layout.ids_T.size, 2.0))}


@stage_function(writes={"bonus": Axis.ROW})
def declared_rows(layout: Layout, *, reward: Floats) -> Mapping[str, Floats]:
    return {"bonus": np.full_like(reward, 2.0)}


@stage_function(writes={"bonus": Axis.TOKEN})
def declared_tokens(layout: Layout, *, reward: Floats) -> Mapping[str, Floats]:
    return {"bonus": np.full(layout.ids_T.size, 2.0)}


def row_advantage(layout: Layout, *, reward: Floats) -> Mapping[str, RowColumn]:
    return {"advantage": RowColumn(reward)}


NOT_A_FUNCTION = 3
