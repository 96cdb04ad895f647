# SPDX-License-Identifier: Apache-2.0
"""DAPO's treatment of answers that are too long: masked, penalised, or both.

Comes before any comparison: a penalty shifts the group's mean, and a masked row has no reward
(NaN), so it counts in no statistics, and its tokens are not trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, Literal

import numpy as np
from pydantic import PositiveInt

from penstock.config.builtin_stages import Axis, stage_function
from penstock.options import Contradiction
from penstock.trainer.arrays import Bools, Floats, Ints
from penstock.trainer.pipeline.layout import Columns, Layout, RowValues


class Overlong(StrEnum):
    MASK = "mask"
    """Truncated answers are masked."""
    PUNISH = "punish"
    """Answers near the limit, or over it, lose reward."""
    BOTH = "both"
    """Truncated answers are masked; others near the limit lose reward."""


def shape_overlong(
    rewards_R: Floats,
    lengths_R: Ints,
    is_truncated_R: Bools,
    *,
    how: Overlong,
    max_length: int,
    margin: int,
) -> tuple[Floats, Bools]:
    """(rewards to compare, rows whose tokens are masked). An answer may have `max_length` tokens,
    margin included; over the last `margin` of them the penalty grows from 0 to -1."""
    is_excluded_R = is_truncated_R & (how is not Overlong.PUNISH)
    if how is not Overlong.MASK:
        rewards_R = rewards_R + overlong_penalty(lengths_R, max_length, margin)
    return np.where(is_excluded_R, np.nan, rewards_R), is_excluded_R


def overlong_penalty(lengths_R: Ints, max_length: int, margin: int) -> Floats:
    """0 up to the margin, then falling evenly to -1 at the limit, and -1 beyond."""
    return np.clip((max_length - margin - lengths_R) / margin, -1.0, 0.0)


def _check(options: Mapping[str, Any]) -> Iterator[Contradiction]:
    margin, max_length = options["margin"], options["max_length"]
    if margin > max_length:
        text = f"the margin of {margin} tokens must be within the {max_length} that an answer may "
        yield Contradiction(text=f"{text}have; lower it", keys=(("margin",),))


@stage_function(
    writes={"shaped_reward": Axis.ROW, "excluded": Axis.ROW},
    is_by_group=True,
    default_role="overlong",
    check=_check,
)
def overlong(
    layout: Layout,
    *,
    reward: RowValues,
    truncated: RowValues,
    max_length: PositiveInt,
    margin: PositiveInt,
    how: Literal["mask", "punish", "both"] = "both",
    length: RowValues | None = None,
) -> Columns:
    """DAPO: long answers lose reward, and truncated ones are masked.

    `max_length` is the most tokens of one turn, margin included; over the last `margin` tokens the
    penalty grows from 0 to -1. A row is as long as its longest turn; a stage that reads `length`
    compares the total of all turns instead."""
    lengths_R = layout.longest_R if length is None else length.astype(np.int64)
    shaped_R, is_excluded_R = shape_overlong(
        reward,
        lengths_R,
        truncated > 0,
        how=Overlong(how),
        max_length=max_length,
        margin=margin,
    )
    return {"shaped_reward": shaped_R, "excluded": is_excluded_R.astype(np.float64)}


STAGE = overlong
