# SPDX-License-Identifier: Apache-2.0
"""Deltas as steps from one file to another, and the cheapest way along them to a wanted one. Pure.

A step is a hint and proves nothing: whoever follows it digests what he gets."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

MAX_STEPS = 32
"""More than any anchor leaves; bounds what a made-up chain can cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaEntry:
    base: str
    """Blob of the file it starts from."""
    target: str
    """Blob of the file it leads to."""
    blob: str
    """The delta itself, a blob like any other."""
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaChain:
    """Deltas in the order they are applied; each is fetched as a blob."""

    steps: tuple[DeltaEntry, ...]


def cheapest_chain(
    target: str,
    has_blob: Callable[[str], bool],
    steps_to: Callable[[str], Iterable[DeltaEntry]],
    *,
    below: int,
) -> tuple[DeltaEntry, ...]:
    """Steps from a file that is there to the target, in the order they are applied; none when no
    way takes fewer bytes than `below`."""
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
    """Does what somebody calls a way begin at a file one has, end at the target, and pay?"""
    if not 0 < len(steps) <= MAX_STEPS or steps[0].base not in have or steps[-1].target != target:
        return False
    is_joined = all(one.target == next_one.base for one, next_one in pairwise(steps))
    return (
        is_joined
        and all(step.bytes > 0 for step in steps)
        and sum(step.bytes for step in steps) < below
    )
