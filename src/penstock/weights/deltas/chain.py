# SPDX-License-Identifier: Apache-2.0
"""Graph search over deltas: finds the cheapest chain from an available file to a target. Pure.

Entries are hints and not trusted: the caller verifies the result."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from msgspec import Meta

from penstock.bounds import Digest, is_digest

MAX_FILE_BYTES = 1 << 44
"""Maximum size of a blob."""
MAX_BASES = 64
"""Maximum number of base blobs in a request for a chain."""
MAX_STEPS = 32
"""Longer than any chain between anchors; bounds the cost of a forged chain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaEntry:
    base: Digest
    """Blob of the base file."""
    target: Digest
    """Blob of the resulting file."""
    blob: Digest
    """Blob of the delta itself."""
    bytes: Annotated[int, Meta(gt=0, le=MAX_FILE_BYTES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaChain:
    """Deltas in the order of application; each is fetched as a blob."""

    steps: Annotated[tuple[DeltaEntry, ...], Meta(max_length=MAX_STEPS)]


def cheapest_chain(
    target: str,
    has_blob: Callable[[str], bool],
    steps_to: Callable[[str], Iterable[DeltaEntry]],
    *,
    below: int,
) -> tuple[DeltaEntry, ...]:
    """Deltas from an available file to the target, in order of application; empty if no chain takes
    fewer bytes than `below`."""
    waiting: list[tuple[int, int, str, int, tuple[DeltaEntry, ...]]] = [(0, 0, target, 0, ())]
    order = itertools.count(1)  # of equal ones the first found: entries have no order
    done: set[str] = set()
    while waiting:
        cost, num_steps, file, _, chain = heapq.heappop(waiting)
        if chain and has_blob(file):
            return chain
        if file in done or num_steps == MAX_STEPS:
            continue
        done.add(file)
        for step in steps_to(file):
            if cost + step.bytes < below:
                size = cost + step.bytes
                found = (size, num_steps + 1, step.base, next(order), (step, *chain))
                heapq.heappush(waiting, found)
    return ()


def is_valid_chain(
    target: str, steps: Sequence[DeltaEntry], have: Collection[str], *, below: int
) -> bool:
    """Check an untrusted chain: its blobs are digests (they name files), it starts at one that we
    have, ends at the target, and is smaller than the full file."""
    if not all(is_digest(name) for step in steps for name in (step.base, step.target, step.blob)):
        return False
    if not 0 < len(steps) <= MAX_STEPS or steps[0].base not in have or steps[-1].target != target:
        return False
    is_joined = all(one.target == next_one.base for one, next_one in pairwise(steps))
    return (
        is_joined
        and all(step.bytes > 0 for step in steps)
        and sum(step.bytes for step in steps) < below
    )
