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
from penstock.trainer.pipeline.layout import Layout, Sum, as_it_is

Floats = npt.NDArray[np.float64]
Columns = Mapping[str, Floats]
Call = Callable[[Batch], Columns | Stats]
"""What a stage does with a batch: columns to add, or what it learned."""

Move = Callable[[Batch], Batch]
"""From the rows that this rank held at the stage before to those that it holds at this one."""

ACTOR = "actor"
"""The role whose training makes a version; what it tells stands without a prefix."""


def stay(batch: Batch) -> Batch:
    """All ranks have their rows already."""
    return batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage of the plan, ready to be called."""

    id: str
    role: str
    writes: tuple[str, ...]
    call: Call
    move: Move = stay
    """Brings the batch's rows to where this stage's model needs them."""

    def __call__(self, batch: Batch) -> Columns | Stats:
        result = self.call(batch)
        if isinstance(result, Stats):
            return result
        if {*result} != {*self.writes}:
            raise ConfigError(
                f"stage {self.id} is to write {', '.join(self.writes)} and gave "
                f"{', '.join(map(str, result)) or 'nothing'}; return exactly what it writes"
            )
        return {name: _checked(self.id, name, values) for name, values in result.items()}


class Pipeline:
    """One gang's chain of stages."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = tuple(stages)

    def run(self, batch: Batch) -> Stats:
        """Every stage in the planned order; a train stage sees all columns written before it."""
        told: list[tuple[Stage, Stats]] = []
        seconds: dict[str, float] = {}
        for stage in self.stages:
            started = time.perf_counter()
            batch = stage.move(batch)
            result = stage(batch)
            if isinstance(result, Stats):
                told.append((stage, result))
            else:
                batch = batch.with_columns(result)
            seconds[f"seconds/stage/{stage.id}"] = time.perf_counter() - started
        return merge(told, seconds)


def merge(told: Sequence[tuple[Stage, Stats]], more: Mapping[str, float]) -> Stats:
    """What all train stages tell, and `more`. The batch made a version if the actor learned."""
    actor = next((stats for stage, stats in told if stage.role == ACTOR), None)
    if actor is None:
        raise ConfigError("no stage of this pipeline trains the actor, so no batch is ever trained")
    values = dict(actor.values)
    for stage, stats in told:
        if stage.role != ACTOR:
            values |= {f"{stage.role}/{name}": value for name, value in stats.values.items()}
    return replace(actor, values={**values, **more})


def bind(
    stage: PipelineStageConfig,
    runner: Call | None = None,
    *,
    sum_over_ranks: Sum = as_it_is,
    move: Move = stay,
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
    return Stage(id=stage.id, role=stage.role, writes=stage.writes, call=call, move=move)


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


def _checked(stage: str, name: str, values: Any) -> Floats:
    try:
        return np.asarray(values, np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"stage {stage}: column {name} holds no numbers ({error}); return a NumPy array"
        ) from None
