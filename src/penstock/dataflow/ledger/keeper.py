# SPDX-License-Identifier: Apache-2.0
"""Holds the payload that is kept for reading within its bound, and gives it up on a short disk.

Measures rarely, so that a large ledger costs little. Deletes nothing: it moves the limits of what
is kept, and compaction acts on them.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace

import msgspec
import structlog

from penstock.dataflow.ledger.keeping import KEPT_BY_TIME, KEPT_KEY, KeepSpec, Kept, kept_bytes
from penstock.dataflow.ledger.store import Ledger
from penstock.dataflow.records import MetaRecord

log = structlog.get_logger(__name__)

MEASURE_SHARE = 0.02
"""At most this share of the time is spent on measuring."""
PRESSURE = 1.25
"""Kept payload is released while the disk has this multiple of the space below which work stops."""
AFTER_PRESSURE = 0.25
"""Share of the kept bytes that stay when the disk gets short: segments this empty are copied out
and deleted."""
WINDOW_TARGET = 0.9
"""A full window releases a little more than it must, so that it is rarely measured by time."""


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
            released_mb=round((before - self.kept_bytes) / (1 << 20), 1),
            kept_mb=round(self.kept_bytes / (1 << 20), 1),
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
