# SPDX-License-Identifier: Apache-2.0
"""Stages: workers that lease rows and add columns to them.

Owns which columns a row is born with, and the contradictions between stages. Knows nothing of
what a stage computes or where it runs."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveInt

from penstock.config.base import (
    COLUMN,
    NAME,
    Contradiction,
    KeyPath,
    Section,
    did_you_mean,
    matching,
    non_empty,
    one_of,
    quoted,
)

INITIAL_COLUMNS = ("turns", "reward")
"""Columns a row has when it is delivered; `reward` only while no stage writes it."""

Column = Annotated[
    str, AfterValidator(matching(COLUMN, "use up to 64 letters, digits, _ - . or @"))
]
Columns = Annotated[tuple[Column, ...], Field(strict=False), non_empty()]


class StageConfig(Section):
    """One stage: what it reads, what it writes, and how long a row may wait for it."""

    name: Annotated[str, AfterValidator(matching(NAME, "use up to 64 letters, digits, _ or -"))]
    """Names the consumer its workers lease rows for."""
    reads: Columns
    """Columns a row must have before the stage gets it."""
    writes: Columns
    """Columns it adds, each once and for ever."""
    on: Annotated[Literal["delivered", "admitted"], one_of("delivered", "admitted")] = "delivered"
    """Which rows it works on: all that were delivered, or only those of admitted groups."""
    deadline_s: float = Field(default=600.0, gt=0)
    """Seconds a row waits for its columns; then they are failed(overdue)."""
    ttl_s: float = Field(default=12.0, gt=0)
    """Seconds a worker may hold a row without a heartbeat."""
    max_attempts: PositiveInt = 3
    """Attempts at one row before its columns are failed."""
    required: bool = True
    """Trainers wait for its columns; false for a stage whose columns are for other readers."""


def stage_contradictions(stages: Sequence[StageConfig]) -> Iterator[Contradiction]:
    """What cannot work whatever the rest of the file says."""
    writer = {column: stage for stage in reversed(stages) for column in stage.writes}
    for index, stage in enumerate(stages):
        at: KeyPath = ("stages", index)
        if stage.name in [other.name for other in stages[:index]]:
            text = f"a stage named {quoted(stage.name)} stands above; give each its own name"
            yield Contradiction(text=text, keys=((*at, "name"),))
            continue
        for position, column in enumerate(stage.writes):
            if text := _write_problem(column, stage, writer[column]):
                yield Contradiction(text=text, keys=((*at, "writes", position), (*at, "writes")))
        for position, column in enumerate(stage.reads):
            if text := _read_problem(column, stage, writer.get(column), tuple(writer)):
                yield Contradiction(text=text, keys=((*at, "reads", position), (*at, "reads")))
    yield from _cycles(stages)


def _write_problem(column: str, stage: StageConfig, first: StageConfig) -> str:
    if column == "turns":
        return "every row is born with turns, and a column is written once; give it another name"
    if column == "reward" and stage.on == "admitted":
        return "reward decides what is admitted, so it must come before; set on: delivered"
    if first is not stage:
        return (
            f"stage {first.name} writes {column} too, and a column is written once; "
            "rename one of them"
        )
    return ""


def _read_problem(
    column: str, stage: StageConfig, writer: StageConfig | None, written: tuple[str, ...]
) -> str:
    if writer is None and column not in INITIAL_COLUMNS:
        closest = did_you_mean(column, (*INITIAL_COLUMNS, *written))
        fix = f'did you mean "{closest}"?' if closest else "add a stage that writes it"
        return f"no row is born with {column} and no stage writes it; {fix}"
    if writer is not None and writer.on == "admitted" and stage.on == "delivered":
        return (
            f"stage {writer.name} writes {column} on admitted groups only, so this stage cannot "
            "work on delivered ones; set on: admitted"
        )
    return ""


def _cycles(stages: Sequence[StageConfig]) -> Iterator[Contradiction]:
    """Stages that wait for each other: those left when all that can run have run."""
    left = dict(enumerate(stages))
    while runnable := [
        index for index, stage in left.items() if not _written(left.values()) & {*stage.reads}
    ]:
        for index in runnable:
            del left[index]
    if left:
        names = ", ".join(stage.name for stage in left.values())
        index = next(iter(left))
        yield Contradiction(
            text=f"circle of stages {names}: none can ever start; take one column out of reads",
            keys=(("stages", index, "reads"), ("stages", index)),
        )


def _written(stages: Iterable[StageConfig]) -> set[str]:
    return {column for stage in stages for column in stage.writes} - {"turns"}
