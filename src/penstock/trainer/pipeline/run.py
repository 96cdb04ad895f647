# SPDX-License-Identifier: Apache-2.0
"""The planned chain at work: a batch in, each stage adding columns to it, statistics out.

Owns the order of one step and the joining of what its stages tell. Knows nothing of models: infer
and train stages are given as callables by whoever holds the models.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.config.pipeline import PipelineStageConfig
from penstock.errors import ConfigError
from penstock.trainer.batches import Batch
from penstock.trainer.learner import Stats
from penstock.trainer.pipeline.functions import find_function, keywords
from penstock.trainer.pipeline.layout import Layout, Sum, no_reduction

Floats = npt.NDArray[np.float64]
Columns = Mapping[str, Floats]
Call = Callable[[Batch], Columns | Stats]
"""What a stage does with a batch: columns to add, or what it learned."""

MoveRows = Callable[[Batch], Batch]
"""From the rows that this rank held at the stage before to those that it holds at this one."""

BY_TOKEN = (
    "advantage",
    "returns",
    "values",
    "proximal_logprobs",
    "reference_logprobs",
    "teacher_logprobs",
)
"""Columns that losses take token by token."""
BY_ROW = ("excluded",)
"""Columns that are asked of whole rows."""

ACTOR = "actor"
"""The role whose training makes a version; what it tells stands without a prefix."""


def keep_rows(batch: Batch) -> Batch:
    """All ranks have their rows already."""
    return batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage of the plan, ready to be called."""

    id: str
    role: str
    writes: tuple[str, ...]
    call: Call
    move: MoveRows = keep_rows
    """Brings the batch's rows to where this stage's model needs them."""
    is_user_function: bool = False
    """Whether it runs a function by name. Columns of such a one must be finite where they train; a
    model that has diverged gives others, and its updates are skipped."""

    def __call__(self, batch: Batch) -> Columns | Stats:
        result = self.call(batch)
        if isinstance(result, Stats):
            return result
        if {*result} != {*self.writes}:
            raise ConfigError(
                f"stage {self.id} is to write {', '.join(self.writes)} and gave "
                f"{', '.join(map(str, result)) or 'nothing'}; return exactly what it writes"
            )
        return {name: self._checked(name, values, batch) for name, values in result.items()}

    def _checked(self, name: str, given: Any, batch: Batch) -> Floats:
        try:
            values = np.asarray(given, np.float64)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"stage {self.id}: column {name} holds no numbers ({error}); return a NumPy array"
            ) from None
        why = _shape_error(name, values, batch)
        if self.is_user_function and not why:
            why = _value_error(name, values, batch)
        if why:
            raise ConfigError(f"stage {self.id}: column {name} {why}")
        return values


class Pipeline:
    """One gang's chain of stages."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = tuple(stages)

    def run(self, batch: Batch) -> Stats:
        """Every stage in the planned order; a train stage sees all columns written before it."""
        results: list[tuple[Stage, Stats]] = []
        seconds: dict[str, float] = {}
        for stage in self.stages:
            started = time.perf_counter()
            batch = stage.move(batch)
            result = stage(batch)
            if isinstance(result, Stats):
                results.append((stage, result))
            else:
                batch = batch.with_columns(result)
            seconds[f"seconds/stage/{stage.id}"] = time.perf_counter() - started
        return merge_stats(results, seconds)


def merge_stats(results: Sequence[tuple[Stage, Stats]], more: Mapping[str, float]) -> Stats:
    """What all train stages tell, and `more`. The batch made a version if the actor learned."""
    actor = next((stats for stage, stats in results if stage.role == ACTOR), None)
    if actor is None:
        raise ConfigError("no stage of this pipeline trains the actor, so no batch is ever trained")
    values = dict(actor.values)
    others = [(stage, stats) for stage, stats in results if stage.role != ACTOR]
    for stage, stats in others:
        values |= {f"{stage.role}/{name}": value for name, value in stats.values.items()}
    other_models_updated = any(stats.skipped is None for _, stats in others)
    return replace(actor, values={**values, **more}, other_models_updated=other_models_updated)


def bind(
    stage: PipelineStageConfig,
    runner: Call | None = None,
    *,
    sum_over_ranks: Sum = no_reduction,
    move: MoveRows = keep_rows,
) -> Stage:
    """The stage with its function, or with what runs its model."""
    call = runner
    if call is None:
        function = find_function(stage)
        if function is None or stage.type == "train":
            raise ConfigError(
                f"stage {stage.id}: nothing here runs the model of a {stage.role} ({stage.type})"
            )
        call = partial(_compute, function, stage, sum_over_ranks)
    return Stage(
        id=stage.id,
        role=stage.role,
        writes=stage.writes,
        call=call,
        move=move,
        is_user_function=stage.fn is not None,
    )


def _compute(
    function: Callable[..., Any], stage: PipelineStageConfig, sum_over_ranks: Sum, batch: Batch
) -> Columns:
    given = {name: column_of(batch, column, stage.id) for name, column in keywords(stage).items()}
    return function(Layout.of(batch, sum_over_ranks), **given, **stage.options)


def column_of(batch: Batch, name: str, reader: str) -> Floats:
    """A column of this batch, by row or by token."""
    if name in batch.columns:
        return batch.columns[name]
    if name == "sampling_logprobs":
        return batch.samples.logprobs_T.astype(np.float64)
    raise ConfigError(
        f"stage {reader} reads {name}, and batch {batch.seq} has only "
        f"{', '.join(sorted(batch.columns))}; check which stage writes it"
    )


def _shape_error(name: str, values: Floats, batch: Batch) -> str:
    """Why a column of this shape is none of this batch; empty where it is one."""
    num_rows, num_tokens = batch.groups_R.size, batch.samples.ids_T.size
    if values.shape not in ((num_rows,), (num_tokens,)):
        return (
            f"has shape {values.shape}: it is neither by row ({num_rows}) nor by token "
            f"({num_tokens}); return one number for each row, or for each token, of the layout"
        )
    if name in BY_TOKEN and values.size != num_tokens:
        return (
            f"is by row ({num_rows}), and losses take it by token ({num_tokens}); return "
            "layout.by_token(values_R)"
        )
    if name in BY_ROW and values.size != num_rows:
        return (
            f"is by token ({num_tokens}), and rows are asked for it ({num_rows}); return one "
            "number for each row of the layout"
        )
    return ""


def _value_error(name: str, values: Floats, batch: Batch) -> str:
    """Why these numbers cannot train; empty where they can. Rows may lack a reward, and their
    tokens then have no credit (0); what is set aside is not asked."""
    is_by_token = values.shape == batch.samples.ids_T.shape
    if not is_by_token or not (name in BY_TOKEN or name.endswith("_logprobs")):
        return ""
    excluded_R = batch.columns.get("excluded")
    trained = batch if excluded_R is None else batch.without(excluded_R > 0)
    values_K = values[trained.samples.mask_T]
    num_broken = int(np.count_nonzero(~np.isfinite(values_K)))
    if not num_broken:
        return ""
    return (
        f"is NaN or infinite on {num_broken} of {values_K.size} trained tokens; give 0 to the "
        "tokens of rows without a reward (NaN), and look for divisions by 0"
    )
