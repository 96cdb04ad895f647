# SPDX-License-Identifier: Apache-2.0
"""The order in which stages can run: edges by column and by `after`, earliest in the list first.

Owns the order. Edges, and the reasons why stages cannot be ordered, are in `config.stage_graph`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeVar

from penstock.config.stage_graph import (
    Edge,
    GraphStage,
    cycles,
    duplicate_ids,
    duplicate_writers,
    find_edges,
    unknown_after,
    unknown_reads,
)
from penstock.errors import ConfigError

V = TypeVar("V", bound=GraphStage)


def topological_order(stages: Sequence[V], given_columns: Collection[str]) -> tuple[V, ...]:
    """The stages, each after all it waits for; of those that can run, the first in the list."""
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
    """How many stages stand before each on the longest way to it."""
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
    """Raise ConfigError for stages that cannot be ordered, with the first reason."""
    problems = (
        *duplicate_ids(stages),
        *duplicate_writers(stages),
        *unknown_reads(stages, given_columns),
        *unknown_after(stages),
        *cycles(stages),
    )
    if problems:
        raise ConfigError(problems[0].text)
