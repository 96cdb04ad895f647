# SPDX-License-Identifier: Apache-2.0
"""Checks over stages that work on rows of the ledger, wherever the file declares them.

Owns what follows from columns and from when a stage runs. Knows no functions and no trainers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from penstock.config.stage_graph import (
    GraphProblem,
    cycles,
    duplicate_ids,
    duplicate_writers,
    unknown_reads,
)
from penstock.config.stages import INITIAL_COLUMNS, StageConfig


def row_stage_problems(stages: Sequence[StageConfig]) -> Iterator[GraphProblem]:
    """What cannot work whatever the rest of the file says."""
    found = [
        *(replace(problem, key=("name",)) for problem in duplicate_ids(stages)),
        *duplicate_writers(stages),
        *unknown_reads(stages, INITIAL_COLUMNS),
        *_mistimed_columns(stages),
    ]
    yield from found or cycles(stages)  # a column that is wrong itself may look like a cycle


def _mistimed_columns(stages: Sequence[StageConfig]) -> Iterator[GraphProblem]:
    """Columns written too late for those who read them."""
    writers = {column: stage for stage in reversed(stages) for column in stage.writes}
    for index, stage in enumerate(stages):
        for position, column in enumerate(stage.writes):
            if text := _write_problem(column, stage):
                key = ("writes", position)
                yield GraphProblem(index=index, key=key, text=f"stage {stage.name}: {text}")
        for position, column in enumerate(stage.reads):
            writer = writers.get(column)
            if writer is not None and writer.on == "admitted" and stage.on == "delivered":
                text = f"stage {stage.name} works on delivered rows and reads {column}, which "
                text += f"stage {writer.name} writes for admitted groups only; set on: admitted"
                yield GraphProblem(index=index, key=("reads", position), text=text)


def _write_problem(column: str, stage: StageConfig) -> str:
    if column == "turns":
        return "every row has turns on delivery, and a column is written once; rename this one"
    if column == "reward" and stage.on == "admitted":
        return "admission depends on reward, so reward must be written before; set on: delivered"
    return ""
