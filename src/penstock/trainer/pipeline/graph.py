# SPDX-License-Identifier: Apache-2.0
"""The order in which stages run: edges by column and by `after`, earliest in the list first.

Owns the order, and the refusal of lists that have none. Edges and drawn paths come from
`config.stage_graph`, which the run file's checks use too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeVar

from penstock.config.stage_graph import (
    Edge,
    GraphStage,
    draw_arrow,
    draw_path,
    find_cycle,
    find_edges,
)
from penstock.errors import ConfigError

V = TypeVar("V", bound=GraphStage)


def topological_order(stages: Sequence[V], given_columns: Collection[str]) -> tuple[V, ...]:
    """The stages, each after all it depends on; ties go to the first in the list."""
    check_graph(stages, given_columns)
    waits = {stage.id: set[str]() for stage in stages}
    for edge in find_edges(stages):
        waits[edge.target].add(edge.source)
    done: list[V] = []
    while len(done) < len(stages):
        ready = (stage for stage in stages if stage not in done and not waits[stage.id])
        chosen = next(ready)
        done.append(chosen)
        for sources in waits.values():
            sources.discard(chosen.id)
    return tuple(done)


def depths(stages: Sequence[GraphStage]) -> dict[str, int]:
    """Number of stages before each one on the longest path to it."""
    found: dict[str, int] = {}
    by_target: dict[str, list[Edge]] = {}
    for edge in find_edges(stages):
        by_target.setdefault(edge.target, []).append(edge)
    given_columns = {column for stage in stages for column in stage.reads}
    for stage in topological_order(stages, given_columns):
        before = [found[edge.source] for edge in by_target.get(stage.id, ())]
        found[stage.id] = max(before, default=-1) + 1
    return found


def check_graph(stages: Sequence[GraphStage], given_columns: Collection[str]) -> None:
    """ConfigError for two writers, unknown names, columns without a writer, and cycles."""
    writers: dict[str, str] = {}
    known = [stage.id for stage in stages]
    for stage in stages:
        if known.count(stage.id) > 1:
            raise ConfigError(f"two stages have the id {stage.id}; give each its own")
        for column in stage.writes:
            if column in writers:
                other = writers[column]
                raise ConfigError(
                    f"stages {other} and {stage.id} both write {column}: {other} "
                    f"{draw_arrow([column])} ◄─[{column}]─ {stage.id}; rename one of them"
                )
            writers[column] = stage.id
    for stage in stages:
        for column in stage.reads:
            if column not in writers and column not in given_columns:
                raise ConfigError(
                    f"stage {stage.id} reads {column}, which no stage writes: ? "
                    f"{draw_arrow([column])} "
                    f"{stage.id}; add a stage that writes it"
                )
        for name in stage.after:
            if name not in known:
                raise ConfigError(
                    f"stage {stage.id} waits for {name}, which does not exist: {name}? ─► "
                    f"{stage.id}; use one of {', '.join(known)}"
                )
    if way := find_cycle(find_edges(stages)):
        raise ConfigError(f"cycle of stages: {draw_path(way)}: none can ever start; remove an edge")
