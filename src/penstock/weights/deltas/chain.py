# SPDX-License-Identifier: Apache-2.0
"""Graph search over deltas: finds the cheapest chain from an available file to a target. Pure.

Entries are hints and not trusted: the caller verifies the result."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

MAX_BASES = 64
"""Maximum number of base blobs in a request for a chain."""
MAX_STEPS = 32
"""Longer than any chain between anchors; bounds the cost of a forged chain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaEntry:
    base: str
    """Blob of the base file."""
    target: str
    """Blob of the resulting file."""
    blob: str
    """Blob of the delta itself."""
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaChain:
    """Deltas in the order of application; each is fetched as a blob."""

    steps: tuple[DeltaEntry, ...]


def cheapest_chain(
    target: str,
    has_blob: Callable[[str], bool],
    steps_to: Callable[[str], Iterable[DeltaEntry]],
    *,
    below: int,
) -> tuple[DeltaEntry, ...]:
    """Deltas from an available file to the target, in order of application; empty if no chain takes
    fewer bytes than `below`."""
    waiting: list[tuple[int, int, str, tuple[DeltaEntry, ...]]] = [(0, 0, target, ())]
    done: set[str] = set()
    while waiting:
        cost, num_steps, file, chain = heapq.heappop(waiting)
        if chain and has_blob(file):
            return chain
        if file in done or num_steps == MAX_STEPS:
            continue
        done.add(file)
        for step in steps_to(file):
            if cost + step.bytes < below:
                found = (cost + step.bytes, num_steps + 1, step.base, (step, *chain))
                heapq.heappush(waiting, found)
    return ()


def is_valid_chain(
    target: str, steps: Sequence[DeltaEntry], have: Collection[str], *, below: int
) -> bool:
    """Check an untrusted chain: starts at a blob we have, ends at the target, is smaller than the
    full file."""
    if not 0 < len(steps) <= MAX_STEPS or steps[0].base not in have or steps[-1].target != target:
        return False
    is_joined = all(one.target == next_one.base for one, next_one in pairwise(steps))
    return (
        is_joined
        and all(step.bytes > 0 for step in steps)
        and sum(step.bytes for step in steps) < below
    )
