# SPDX-License-Identifier: Apache-2.0
"""The order in which stages run: edges by column and by `after`, earliest in the list first.

Owns the order. Edges are in `config.stage_graph`, and so are the reasons why stages cannot be
ordered: a config with such stages was refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from penstock.config.stage_graph import Edge, GraphStage, find_edges

V = TypeVar("V", bound=GraphStage)


def topological_order(stages: Sequence[V]) -> tuple[V, ...]:
    """The stages, each after all it depends on; ties go to the first in the list."""
    waits = {stage.id: set[str]() for stage in stages}
    for edge in find_edges(stages):
        waits[edge.target].add(edge.source)
    done: list[V] = []
    while len(done) < len(stages):
        chosen = next(stage for stage in stages if stage not in done and not waits[stage.id])
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
    for stage in topological_order(stages):
        before = [found[edge.source] for edge in by_target.get(stage.id, ())]
        found[stage.id] = max(before, default=-1) + 1
    return found
