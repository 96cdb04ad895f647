# SPDX-License-Identifier: Apache-2.0
"""Runs the planned chain: a batch in, columns added by each stage, statistics out.

Owns the order of one step, the axis of every column that a stage writes, and the merged statistics.
Does not know models: infer and train stages are callables, given by the code that holds the models.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from penstock.config.builtin_stages import Axis, BuiltinStage, declaration_of, known_axis
from penstock.config.pipeline import PipelineStageConfig
from penstock.errors import ConfigError
from penstock.trainer.arrays import Floats
from penstock.trainer.batches import Batch
from penstock.trainer.learner import Stats
from penstock.trainer.pipeline.functions import find_function, keywords
from penstock.trainer.pipeline.layout import (
    Columns,
    Layout,
    RowColumn,
    Sum,
    TokenColumn,
    no_reduction,
)

Call = Callable[[Batch], Columns | Stats]
"""What a stage does with a batch: returns columns to add, or the statistics of an update."""

MoveRows = Callable[[Batch], Batch]
"""Moves rows between ranks: from where the previous stage had them to where this one needs them."""

ACTOR = "actor"
"""The role whose training makes a version; its metrics have no prefix."""


OWN_REWARD_COLUMNS = frozenset({"reward", "shaped_reward", "less_kl_reward"})
"""The row's reward, as delivered or as built-in stages change it: rewards of roles and turns apply.
A stage that compares another column compares that one, for every turn."""


def keep_rows(batch: Batch) -> Batch:
    """All ranks have their rows already."""
    return batch


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """A stage of the plan, ready to be called."""

    id: str
    role: str
    writes: Mapping[str, Axis | None]
    """Columns it writes. None: a custom column whose axis only the returned type says."""
    call: Call
    move_rows: MoveRows = keep_rows
    """Brings the batch's rows to the ranks that hold this stage's model."""
    is_user_function: bool = False
    """Whether it runs a function by name. The columns of such a function must be finite on trained
    tokens; a diverged model may write others, and its updates are skipped."""

    def __call__(self, batch: Batch) -> Batch | Stats:
        """The batch with this stage's columns, or the statistics of its update."""
        result = self.call(batch)
        if isinstance(result, Stats):
            return result
        if {*result} != {*self.writes}:
            raise ConfigError(
                f"stage {self.id} must write {', '.join(self.writes)} and returned "
                f"{', '.join(map(str, result)) or 'nothing'}; return exactly the columns it writes"
            )
        written: dict[Axis, dict[str, Floats]] = {axis: {} for axis in Axis}
        for name, returned in result.items():
            axis, values = self._typed(name, returned)
            written[axis][name] = self._checked(name, axis, values, batch)
        return batch.with_columns(row_columns=written[Axis.ROW], token_columns=written[Axis.TOKEN])

    def _typed(self, name: str, returned: Any) -> tuple[Axis, Any]:
        """(axis, values) of a returned column: by its type, else by its declaration."""
        declared = self.writes[name]
        axis, values = declared, returned
        if isinstance(returned, RowColumn):
            axis, values = Axis.ROW, returned.values_R
        elif isinstance(returned, TokenColumn):
            axis, values = Axis.TOKEN, returned.values_T
        if axis is None:
            raise ConfigError(
                f"stage {self.id}: column {name} is a plain array, and nothing declares its axis; "
                f"return {{{name!r}: penstock.RowColumn(values)}} or "
                "penstock.TokenColumn(values)"
            )
        if declared not in (None, axis):
            raise ConfigError(
                f"stage {self.id}: column {name} is a {declared} column and was returned as a "
                f"{axis} column; return one number per {declared}"
            )
        return axis, values

    def _checked(self, name: str, axis: Axis, given: Any, batch: Batch) -> Floats:
        try:
            values = np.asarray(given, np.float64)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"stage {self.id}: column {name} is not numeric ({error}); return a numeric NumPy "
                "array"
            ) from None
        why = _shape_error(axis, values, batch)
        if self.is_user_function and not why and axis is Axis.TOKEN:
            why = _value_error(name, values, batch)
        if why:
            raise ConfigError(f"stage {self.id}: column {name} {why}")
        return values


class Pipeline:
    """The chain of stages of one policy's trainer."""

    def __init__(self, stages: Sequence[PlannedStage]) -> None:
        self.stages = tuple(stages)

    def run(self, batch: Batch) -> Stats:
        """Run every stage in the planned order; a train stage sees all columns written before."""
        results: list[tuple[PlannedStage, Stats]] = []
        seconds: dict[str, float] = {}
        for stage in self.stages:
            started = time.perf_counter()
            batch = stage.move_rows(batch)
            result = stage(batch)
            if isinstance(result, Stats):
                results.append((stage, result))
            else:
                batch = result
            seconds[f"seconds/stage/{stage.id}"] = time.perf_counter() - started
        return merge_stats(results, seconds)

    def add_columns(self, batch: Batch, seconds: dict[str, float]) -> Batch:
        """The batch with the columns of every stage, none of which trains; their time is added to
        `seconds`."""
        for stage in self.stages:
            started = time.perf_counter()
            result = stage(batch)
            assert isinstance(result, Batch), f"stage {stage.id} trains"
            batch, name = result, f"seconds/stage/{stage.id}"
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - started
        return batch


def merge_stats(results: Sequence[tuple[PlannedStage, Stats]], more: Mapping[str, float]) -> Stats:
    """Statistics of all train stages, and `more`. The batch made a version if the actor learned."""
    actor = next((stats for stage, stats in results if stage.role == ACTOR), None)
    if actor is None:
        raise ConfigError("the pipeline has no train stage with role actor; add one")
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
    move_rows: MoveRows = keep_rows,
) -> PlannedStage:
    """The stage with its function, or with the callable that runs its model."""
    call, declared = runner, None
    if call is None:
        function = find_function(stage)
        if function is None or stage.type == "train":
            raise ConfigError(
                f"stage {stage.id}: no callable was given to run the model of role {stage.role} "
                f"({stage.type})"
            )
        declared = declaration_of(function)
        call = partial(_compute, function, stage, declared, sum_over_ranks)
    return PlannedStage(
        id=stage.id,
        role=stage.role,
        writes={column: _declared_axis(column, declared) for column in stage.writes},
        call=call,
        move_rows=move_rows,
        is_user_function=stage.fn is not None,
    )


def _declared_axis(column: str, declared: BuiltinStage | None) -> Axis | None:
    """By the function's declaration, else by the name, where it is one that losses read."""
    own = declared.writes.get(column) if declared else None
    return own or known_axis(column)


def _compute(
    function: Callable[..., Any],
    stage: PipelineStageConfig,
    declared: BuiltinStage | None,
    sum_over_ranks: Sum,
    batch: Batch,
) -> Columns:
    given: dict[str, Floats] = {}
    for keyword, column in keywords(stage).items():
        axis, given[keyword] = column_of(batch, column, stage.id)
        required = declared and declared.reads.get(keyword, declared.extra_reads)
        if required not in (None, axis):
            raise ConfigError(
                f"stage {stage.id}: {keyword} must be a {required} column, and {column} is a "
                f"{axis} column; read a column with one number per {required}"
            )
    layout = Layout.of(batch, sum_over_ranks)
    if keywords(stage).get("reward") not in OWN_REWARD_COLUMNS:  # a column of the user's own
        layout = replace(layout, roles=replace(layout.roles, own=None))
    return function(layout, **given, **stage.options)


def column_of(batch: Batch, name: str, reader: str) -> tuple[Axis, Floats]:
    """(axis, values) of a column of this batch."""
    if name in batch.row_columns:
        return Axis.ROW, batch.row_columns[name]
    if name in batch.token_columns:
        return Axis.TOKEN, batch.token_columns[name]
    if name == "sampling_logprobs":
        return Axis.TOKEN, batch.samples.logprobs_T.astype(np.float64)
    raise ConfigError(
        f"stage {reader} reads {name}, and batch {batch.seq} has only "
        f"{', '.join(sorted(batch.column_names))}; check which stage writes it"
    )


def _shape_error(axis: Axis, values: Floats, batch: Batch) -> str:
    """Why a column of this axis cannot have this shape; empty if it can."""
    num_rows, num_tokens = batch.groups_R.size, batch.samples.ids_T.size
    size = num_rows if axis is Axis.ROW else num_tokens
    if values.shape == (size,):
        return ""
    fix = f"return one number per {axis}"
    if axis is Axis.TOKEN and values.shape == (num_rows,):
        fix = "spread row values with layout.by_token(values_R)"
    return f"is a {axis} column and has shape {values.shape} instead of ({size},); {fix}"


def _value_error(name: str, values_T: Floats, batch: Batch) -> str:
    """Why these numbers cannot train; empty if they can. Tokens of rows without a reward must get
    0; masked tokens may hold anything."""
    if known_axis(name) is not Axis.TOKEN:
        return ""
    excluded_R = batch.row_columns.get("excluded")
    trained = batch if excluded_R is None else batch.without(excluded_R > 0)
    values_K = values_T[trained.samples.mask_T]
    num_broken = int(np.count_nonzero(~np.isfinite(values_K)))
    if not num_broken:
        return ""
    return (
        f"is NaN or infinite on {num_broken} of {values_K.size} trained tokens; give 0 to the "
        "tokens of rows without a reward (NaN), and check for divisions by 0"
    )
