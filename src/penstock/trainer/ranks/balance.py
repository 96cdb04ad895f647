# SPDX-License-Identifier: Apache-2.0
"""Divides rows so that all ranks finish together: Karmarkar–Karp, k-way largest differencing.

Owns what a row costs and which part gets it. Does not know ranks or payloads. Deterministic: every
rank computes the same parts from the manifest, without communication.

R = rows, P = parts.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from penstock.trainer.arrays import Floats, Ints
from penstock.types import Manifest

PER_SQUARE = 1 / 16384
"""Cost of attention per L², where the cost of all matrices is 1 per token: a forward pass costs
24·d² per token and layer in the matrices of a model of width d and 2·d·L in causal attention, which
meet at L = 12·d. This is d = 1,365, a model of some billion parameters. One number for all models,
because a batch may pass through stages with different ones and must be divided the same way."""


def row_costs(tokens_R: Floats, squares_R: Floats) -> Floats:
    """Cost of rows with this many tokens in their samples, and this sum of squared lengths."""
    # A row without computation has a cost too: it is fetched and read.
    return 1 + tokens_R + PER_SQUARE * squares_R


def manifest_costs(manifest: Manifest) -> Floats:
    """Cost of each row of a sealed batch, for its consumer."""
    work_R2 = np.array([manifest.compute_cost(row) for row in manifest.rows], np.float64).reshape(
        -1, 2
    )
    return row_costs(work_R2[:, 0], work_R2[:, 1])


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
