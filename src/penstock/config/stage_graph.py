# SPDX-License-Identifier: Apache-2.0
"""Edges between stages: who writes what another reads, and who only waits.

Owns what follows from the columns alone: edges, circles, and a path drawn in one line of text.
Knows nothing of what a stage does, where it runs, or in which order it is planned."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class GraphStage(Protocol):
    """What an edge can be drawn from."""

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
    """What flows; empty where `after` alone orders the two."""


def find_edges(stages: Sequence[GraphStage]) -> tuple[Edge, ...]:
    """Every edge once, in the order of the stages that wait."""
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
    """The shortest way from a stage back to itself; empty when there is none."""
    outgoing: dict[str, list[Edge]] = {}
    for edge in found:
        outgoing.setdefault(edge.source, []).append(edge)
    paths = [_shortest_cycle(start, outgoing) for start in outgoing]
    return min(filter(None, paths), key=len, default=())


def _shortest_cycle(start: str, outgoing: Mapping[str, Collection[Edge]]) -> tuple[Edge, ...]:
    """Breadth first, so that the first way found is a shortest one."""
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


def draw_path(path: Sequence[Edge]) -> str:
    """`a ─[x]─► b ─► c`: a path as one line of text."""
    if not path:
        return ""
    return path[0].source + "".join(f" {draw_arrow(edge.columns)} {edge.target}" for edge in path)


def draw_arrow(columns: Sequence[str]) -> str:
    """`─[x, y]─►`, or `─►` where nothing flows."""
    return f"─[{', '.join(columns)}]─►" if columns else "─►"
