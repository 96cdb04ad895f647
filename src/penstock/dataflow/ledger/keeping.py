# SPDX-License-Identifier: Apache-2.0
"""Which trajectories stay on disk for people to read, after training needs them no longer.

A group is kept by its number alone, so the kept ones are spread evenly over the whole run and no
commit has to choose. The choice has two limits, which only ever move towards keeping less: a share
of the groups, and a time before which all are released. They are one record of the ledger. Never
touches what training or a reader still needs, and deletes nothing itself: compaction does.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
import structlog

from penstock.dataflow.ledger.tables import Tables
from penstock.dataflow.records import FORGOTTEN_PREFIX, MetaRecord

if TYPE_CHECKING:
    from penstock.dataflow.ledger.store import Ledger

log = structlog.get_logger(__name__)

KEPT_KEY = "kept"
"""Key of the ledger's record of what is kept."""
RANKS = 1 << 32
RANK = f"((g.issue % {1 << 31}) * 2654435761 % {RANKS})"
"""Rank of group `g`. Multiplying by the golden ratio spreads consecutive numbers evenly, also over
the groups of each source; SQLite and PostgreSQL compute the same."""
FORGOTTEN = f"EXISTS (SELECT 1 FROM meta m WHERE m.key = '{FORGOTTEN_PREFIX}' || rows.row_id)"
RELEASED = (
    "EXISTS (SELECT 1 FROM freed f LEFT JOIN groups g ON g.group_id = f.group_id "
    "WHERE f.group_id = rows.group_id AND (g.issue IS NULL OR f.at < :since "
    f"OR {RANK} >= :limit OR {FORGOTTEN}))"
)
"""Condition on a row of `rows`: training does not need it, and it is not kept for reading."""
KEPT = (
    "FROM freed f JOIN groups g ON g.group_id = f.group_id JOIN rows ON rows.group_id = f.group_id "
    f"{{columns}} WHERE f.at >= :since AND {RANK} < :limit"
)
COLUMNS = "JOIN columns c ON c.space = rows.space AND c.row_id = rows.row_id"
KEPT_ROW_BYTES = f"SELECT coalesce(sum(rows.length), 0) {KEPT.format(columns='')}"
KEPT_COLUMN_BYTES = f"SELECT coalesce(sum(c.length), 0) {KEPT.format(columns=COLUMNS)}"
KEPT_BY_TIME = (
    f"SELECT f.at, sum(rows.length) {KEPT.format(columns='')} GROUP BY f.at ORDER BY f.at"
)
MEASURE_SHARE = 0.02
"""At most this share of the time is spent on measuring."""
PRESSURE = 1.25
"""Kept payload is released while the disk has this multiple of the space below which work stops."""
AFTER_PRESSURE = 0.25
"""Share of the kept bytes that stay when the disk gets short: segments this empty are copied out
and deleted."""
WINDOW_TARGET = 0.9
"""A full window releases a little more than it must, so that it is rarely measured by time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepSpec:
    """What a run wants to keep for reading, in one ledger."""

    max_bytes: int
    share: float = 1.0
    """Of the groups."""
    is_window: bool = False
    """Above `max_bytes`, release the oldest groups; otherwise half of the share."""
    min_free_bytes: int = 0
    """Free disk below which work is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The groups that are kept after they were freed."""

    limit: int
    """Those with a rank below it, of RANKS."""
    since: float = 0.0
    """Those freed at or after this time."""

    @property
    def share(self) -> float:
        return self.limit / RANKS


NOTHING = Kept(limit=0)
"""Freed payload may be deleted at once."""


def read_kept(tables: Tables) -> Kept:
    """What this ledger has kept so far; all, if it never released a group early."""
    value = tables.scalar("SELECT value FROM meta WHERE key = :key", key=KEPT_KEY)
    return Kept(limit=RANKS) if value is None else msgspec.json.decode(value, type=Kept)


def current_kept(tables: Tables, spec: KeepSpec | None) -> Kept:
    """What is kept from now on: never more than before."""
    if spec is None:
        return NOTHING
    saved = read_kept(tables)
    return replace(saved, limit=min(saved.limit, round(spec.share * RANKS)))


def kept_bytes(tables: Tables, kept: Kept) -> int:
    """Payload of freed groups that is kept. Reads every kept row, so call it from a thread."""
    values = {"since": kept.since, "limit": kept.limit}
    return sum(int(tables.scalar(q, **values)) for q in (KEPT_ROW_BYTES, KEPT_COLUMN_BYTES))


class Keeper:
    """Holds the kept payload of one ledger within its bound. Runs on the service's event loop,
    before each sweep of compaction."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.kept_bytes = 0
        self._next_at = 0.0
        self._sweeps_left = 0
        """Until compaction has acted on the last release for a short disk."""

    async def look(self, num_sweeps: int) -> None:
        """Release payload if there is too much of it, or too little disk. num_sweeps: how many
        sweeps see every segment."""
        spec = self._ledger.keep
        if spec is None or not self._ledger.kept.limit:
            return
        self._sweeps_left = max(0, self._sweeps_left - 1)
        is_short = not self._sweeps_left and (
            self._ledger.usage().free_bytes < PRESSURE * spec.min_free_bytes
        )
        if time.monotonic() < self._next_at and not is_short:
            return
        await self._measure()
        if self.kept_bytes > spec.max_bytes:
            target = spec.max_bytes * (WINDOW_TARGET if spec.is_window else 1.0)
            await self._release(spec, target, "over dataflow.keep_mb")
        elif is_short and self.kept_bytes:
            await self._release(spec, self.kept_bytes * AFTER_PRESSURE, "the disk is nearly full")
            self._sweeps_left = num_sweeps + 1

    async def _measure(self) -> None:
        started_at = time.monotonic()
        found = await asyncio.to_thread(kept_bytes, self._ledger.tables, self._ledger.kept)
        self.kept_bytes = found
        ended_at = time.monotonic()
        self._next_at = ended_at + (ended_at - started_at) / MEASURE_SHARE

    async def _release(self, spec: KeepSpec, target: float, why: str) -> None:
        kept = self._ledger.kept
        if spec.is_window:
            kept = await asyncio.to_thread(self._younger, kept, target)
        else:
            halvings = math.ceil(math.log2(self.kept_bytes / max(target, 1)))
            kept = replace(kept, limit=kept.limit >> halvings)
        value = msgspec.json.encode(kept).decode()
        await self._ledger.write([MetaRecord(key=KEPT_KEY, value=value)])
        self._ledger.kept = kept
        before = self.kept_bytes
        await self._measure()
        log.info(
            "kept trajectories released",
            why=why,
            released_mb=(before - self.kept_bytes) >> 20,
            kept_mb=self.kept_bytes >> 20,
            share=round(kept.share, 6),
        )

    def _younger(self, kept: Kept, target: float) -> Kept:
        """Move the start of the window until at most `target` bytes are left."""
        values = {"since": kept.since, "limit": kept.limit}
        left = self.kept_bytes
        since = kept.since
        for at, num_bytes in self._ledger.tables.rows(KEPT_BY_TIME, **values):
            if left <= target:
                break
            left -= int(num_bytes)
            since = math.nextafter(float(at), math.inf)
        return replace(kept, since=since)
