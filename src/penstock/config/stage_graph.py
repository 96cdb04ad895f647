# SPDX-License-Identifier: Apache-2.0
"""The graph of stages: its edges, why stages cannot be ordered, and paths drawn as text.

Owns everything that follows from ids, columns and `after` alone, for stages of the dataflow and of
pipelines, in the run file and in the trainer. Does not know what a stage does."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.options import Contradiction, KeyPath
from penstock.plugins import quoted, suggest


class GraphStage(Protocol):
    """What the graph knows of a stage."""

    @property
    def id(self) -> str: ...
    @property
    def reads(self) -> tuple[str, ...]: ...
    @property
    def writes(self) -> tuple[str, ...]: ...
    @property
    def after(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """`target` runs after `source`."""

    source: str
    target: str
    columns: tuple[str, ...]
    """Columns that flow; empty where only `after` orders the two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphProblem:
    """One reason why stages cannot be ordered."""

    index: int
    """Position of the stage in the list."""
    key: KeyPath
    """The key of the stage that is wrong, such as ("reads", 0)."""
    text: str
    """What is wrong and how to fix it."""

    def at(self, place: KeyPath) -> Contradiction:
        """The same as a contradiction of the section that has this stage at `place`."""
        keys = ((*place, *self.key), (*place, self.key[0]), place)
        return Contradiction(text=self.text, keys=keys)


def find_edges(stages: Sequence[GraphStage]) -> tuple[Edge, ...]:
    """Every edge once, in the order of the waiting stages."""
    writers = {column: stage.id for stage in reversed(stages) for column in stage.writes}
    known = {stage.id for stage in stages}
    found: list[Edge] = []
    for stage in stages:
        flows: dict[str, list[str]] = {}
        for column in stage.reads:
            if column in writers:
                flows.setdefault(writers[column], []).append(column)
        for earlier in stage.after:
            if earlier in known:
                flows.setdefault(earlier, [])
        found += [
            Edge(source=source, target=stage.id, columns=tuple(columns))
            for source, columns in flows.items()
        ]
    return tuple(found)


def find_cycle(found: Sequence[Edge]) -> tuple[Edge, ...]:
    """The shortest path from a stage back to itself; empty if there is none."""
    outgoing: dict[str, list[Edge]] = {}
    for edge in found:
        outgoing.setdefault(edge.source, []).append(edge)
    paths = [_shortest_cycle(start, outgoing) for start in outgoing]
    return min(filter(None, paths), key=len, default=())


def _shortest_cycle(start: str, outgoing: Mapping[str, Collection[Edge]]) -> tuple[Edge, ...]:
    """Breadth first, so the first path found is a shortest one."""
    paths: list[tuple[Edge, ...]] = [(edge,) for edge in outgoing[start]]
    seen: set[str] = set()
    for path in paths:
        end = path[-1].target
        if end == start:
            return path
        if end not in seen:
            seen.add(end)
            paths += [(*path, edge) for edge in outgoing.get(end, ())]
    return ()


def duplicate_ids(stages: Sequence[GraphStage]) -> Iterator[GraphProblem]:
    """Ids that an earlier stage has."""
    ids = [stage.id for stage in stages]
    for index, name in enumerate(ids):
        if name in ids[:index]:
            text = f"duplicate stage {quoted(name)}; names of stages must be unique"
            yield GraphProblem(index=index, key=("id",), text=text)


def duplicate_writers(stages: Sequence[GraphStage]) -> Iterator[GraphProblem]:
    """Columns that an earlier stage writes."""
    first: dict[str, str] = {}
    for index, stage in enumerate(stages):
        for position, column in enumerate(stage.writes):
            other = first.setdefault(column, stage.id)
            if other != stage.id:
                drawing = f"{other} ─[{column}]─► ◄─[{column}]─ {stage.id}"
                text = f"stages {other} and {stage.id} both write {column}: {drawing}; a column "
                text += "is written once: rename one of them"
                yield GraphProblem(index=index, key=("writes", position), text=text)


def unknown_reads(
    stages: Sequence[GraphStage], given_columns: Collection[str]
) -> Iterator[GraphProblem]:
    """Columns that are read, not given, and not written by any of the stages."""
    known = {*given_columns, *(column for stage in stages for column in stage.writes)}
    for index, stage in enumerate(stages):
        for position, column in enumerate(stage.reads):
            if column not in known:
                fix = suggest(column, sorted(known), "add a stage that writes it")
                drawing = draw_path((Edge(source="?", target=stage.id, columns=(column,)),))
                text = f"stage {stage.id} reads {column}, which no stage writes: {drawing}; {fix}"
                yield GraphProblem(index=index, key=("reads", position), text=text)


def unknown_after(stages: Sequence[GraphStage]) -> Iterator[GraphProblem]:
    """Stages to wait for that do not exist."""
    known = [stage.id for stage in stages]
    for index, stage in enumerate(stages):
        for position, name in enumerate(stage.after):
            if name not in known:
                fix = suggest(name, known, f"use {' | '.join(known)}")
                text = f"stage {stage.id} waits for the unknown stage {quoted(name)} "
                text += f"({name}? ─► {stage.id}); {fix}"
                yield GraphProblem(index=index, key=("after", position), text=text)


def cycles(stages: Sequence[GraphStage]) -> Iterator[GraphProblem]:
    """The shortest cycle, if there is any."""
    if path := find_cycle(find_edges(stages)):
        index = next(i for i, stage in enumerate(stages) if stage.id == path[0].target)
        text = f"stages form a cycle: {draw_path(path)}; remove one of these columns from reads, "
        yield GraphProblem(index=index, key=("reads",), text=f"{text}or a stage from after")


def draw_path(path: Sequence[Edge]) -> str:
    """`a ─[x]─► b ─► c`: a path as one line of text."""
    return path[0].source + "".join(f" {draw_arrow(edge.columns)} {edge.target}" for edge in path)


def draw_arrow(columns: Sequence[str]) -> str:
    """`─[x, y]─►`, or `─►` without columns."""
    return f"─[{', '.join(columns)}]─►" if columns else "─►"
