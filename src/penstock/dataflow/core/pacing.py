# SPDX-License-Identifier: Apache-2.0
"""How much work may start: pure arithmetic on levels, so skips, rewinds, filters and restarts
correct themselves.

AReaL's form counts totals since the start; one skipped batch or one rewind corrupts it for ever.
Levels cannot drift.
"""

from __future__ import annotations

from dataclasses import dataclass

YIELD_FLOOR = 0.1
YIELD_WEIGHT = 0.05
"""Of one judged group in the moving average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """Groups of one policy between issue and commit."""

    issued: int
    """Out with nodes, not yet judged."""
    admitted: int
    """Judged good, not yet sealed."""
    sealed: int
    """In sealed batches that are not yet committed."""


def room(levels: Levels, *, fresh: int, max_staleness: int, expected_yield: float) -> float:
    """Groups that may still start; whole groups are issued while this is above 0. `fresh` groups
    of the next batch are not served again by a replay rule."""
    budget = (max_staleness + 1) * fresh
    return budget - (levels.admitted + levels.sealed + expected_yield * levels.issued)


def room_to_end(
    levels: Levels, *, groups_per_batch: int, batches_left: int, expected_yield: float
) -> float:
    """Groups the rest of the run can still use; `batches_left` counts from the last commit."""
    return batches_left * groups_per_batch - (
        levels.admitted + levels.sealed + expected_yield * levels.issued
    )


def next_yield(expected_yield: float, *, passed: bool) -> float:
    """Moving share of judged groups that rules and failed slots let through.

    Outpaced, stale and column losses are never fed in: a dead scorer would multiply the issue rate.
    """
    return max(YIELD_FLOOR, (1 - YIELD_WEIGHT) * expected_yield + YIELD_WEIGHT * passed)


def is_outpaced(levels: Levels, *, groups_per_batch: int, max_staleness: int) -> bool:
    """Decline a closed group? Running work never counts, or two slow policies would starve each
    other."""
    return levels.admitted + levels.sealed >= (max_staleness + 1) * groups_per_batch


def due_number(levels: Levels, *, committed: int, groups_per_batch: int) -> int:
    """Number of the version that a group issued now will be trained from, if all before it are
    used."""
    ahead = levels.issued + levels.admitted + levels.sealed
    return committed + ahead // groups_per_batch


def oldest_useful(due: int, *, committed: int, max_staleness: int) -> int:
    """Oldest version a node may serve and still take this group without wasting its work.

    Never above what is committed: the newest committed version is always published in the end, so a
    node that waits for it waits for the trainer and for nothing else.
    """
    return min(committed, max(due, committed) - max_staleness)
