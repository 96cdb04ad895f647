# SPDX-License-Identifier: Apache-2.0
"""Divides rows so that all ranks finish together: Karmarkar–Karp, k-way largest differencing.

Owns which part gets which row. Does not know ranks, models or payloads. Deterministic: every
rank computes the same parts from the manifest, without communication.

R = rows, P = parts.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from penstock.trainer.arrays import Floats, Ints
from penstock.trainer.pass_cost import PassCost
from penstock.types import Manifest


def manifest_costs(manifest: Manifest, cost: PassCost) -> Floats:
    """Cost of each row of a sealed batch, for its consumer. A batch may pass through stages with
    different models, and is divided the same way for all of them: by the cost of the trained one.
    """
    work_R3 = np.array(
        [(*manifest.compute_cost(row), manifest.tokens(row)) for row in manifest.rows], np.float64
    ).reshape(-1, 3)
    return cost.rows(*work_R3.T)


def balance_parts(costs_R: Floats, num_parts: int) -> list[Ints]:
    """Rows of each part, ascending; the most expensive part is at most 4/3 of the optimum."""
    order = np.argsort(-costs_R, kind="stable")
    empty = [_Part(cost=0.0, rows=())] * num_parts
    heap = [
        _entry(age, [_Part(cost=float(costs_R[row]), rows=(int(row),)), *empty[1:]])
        for age, row in enumerate(order)
    ]
    heapq.heapify(heap)
    num_splits = len(heap)
    while len(heap) > 1:
        _, _, widest = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        num_splits += 1
        heapq.heappush(heap, _entry(num_splits, _merge(widest, second)))
    parts = heap[0][2] if heap else empty
    return [np.array(sorted(part.rows), np.int64) for part in parts]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    cost: float
    rows: tuple[int, ...]


_Split = list[_Part]
"""Some of the rows in P parts, most expensive first."""
_Entry = tuple[float, int, _Split]
"""Widest split first; among equals the older, so that the order is deterministic."""


def _entry(age: int, split: _Split) -> _Entry:
    return split[-1].cost - split[0].cost, age, split


def _merge(one: _Split, other: _Split) -> _Split:
    """The most expensive part of one with the cheapest of the other, and so on."""
    merged = [
        _Part(cost=dear.cost + cheap.cost, rows=dear.rows + cheap.rows)
        for dear, cheap in zip(one, reversed(other), strict=True)
    ]
    return sorted(merged, key=lambda part: (-part.cost, -len(part.rows)))
