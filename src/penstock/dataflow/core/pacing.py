# SPDX-License-Identifier: Apache-2.0
"""How much work may start: pure arithmetic on levels, which corrects itself after skips, rewinds,
filters and restarts.

AReaL's formula counts totals since the start, so one skipped batch or one rewind corrupts it
permanently. Levels cannot drift.
"""

from __future__ import annotations

from dataclasses import dataclass

YIELD_FLOOR = 0.1
YIELD_WEIGHT = 0.05
"""Weight of one judged group in the moving average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """Counts of one policy's groups between issue and commit."""

    issued: int
    """Issued and not yet judged."""
    admitted: int
    """Admitted and not yet sealed."""
    sealed: int
    """In sealed batches that are not committed yet."""


def room(levels: Levels, *, fresh: int, max_staleness: int, expected_yield: float) -> float:
    """How many groups may still start; complete groups are issued while this is above 0. `fresh` is
    the number of groups in the next batch that do not come from replay."""
    budget = (max_staleness + 1) * fresh
    return budget - (levels.admitted + levels.sealed + expected_yield * levels.issued)


def room_to_end(
    levels: Levels, *, groups_per_batch: int, batches_left: int, expected_yield: float
) -> float:
    """How many groups the rest of the run can still use; `batches_left` counts from the last
    commit."""
    return batches_left * groups_per_batch - (
        levels.admitted + levels.sealed + expected_yield * levels.issued
    )


def next_yield(expected_yield: float, *, passed: bool) -> float:
    """Moving average of the share of judged groups that pass the rules and have enough members.

    Groups dropped as outpaced, stale or for missing columns are never counted: a dead scorer would
    multiply the issue rate.
    """
    return max(YIELD_FLOOR, (1 - YIELD_WEIGHT) * expected_yield + YIELD_WEIGHT * passed)


def is_outpaced(levels: Levels, *, groups_per_batch: int, max_staleness: int) -> bool:
    """Should a closed group be declined? Running work does not count, or two slow policies would
    starve each other."""
    return levels.admitted + levels.sealed >= (max_staleness + 1) * groups_per_batch


def due_number(levels: Levels, *, committed: int, groups_per_batch: int) -> int:
    """The version that a group issued now will be trained from, if all groups before it are
    used."""
    ahead = levels.issued + levels.admitted + levels.sealed
    return committed + ahead // groups_per_batch


def oldest_useful(due: int, *, committed: int, max_staleness: int) -> int:
    """Oldest version a node may serve and still lease this group without wasting its work.

    Never above the committed version: the newest committed version is always published eventually,
    so a node that waits for it waits only for the trainer.
    """
    return min(committed, max(due, committed) - max_staleness)
