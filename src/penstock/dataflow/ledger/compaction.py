# SPDX-License-Identifier: Apache-2.0
"""Reclaims the space of freed payload while the service runs.

Segments without live payload are deleted; those less than half live are copied out first: their
live records get a new place, and their rows point to it in the commit that makes the copy durable.
The old segment is deleted only after that, so a crash at any point leaves each record readable
where its row says. Does not decide which payload is free: the `freed` table and `keeping` do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog

from penstock.dataflow.ledger.codec import BundleMove, ColumnMove, RowMove
from penstock.dataflow.ledger.keeper import Keeper
from penstock.dataflow.ledger.keeping import FORGOTTEN, NOTHING, RELEASED, Kept
from penstock.dataflow.ledger.segments import Location
from penstock.dataflow.ledger.store import Ledger
from penstock.dataflow.ledger.tables import Tables
from penstock.dataflow.records import FORGOTTEN_PREFIX, Record
from penstock.errors import StoreError

log = structlog.get_logger(__name__)

COPY_BATCH_BYTES = 1 << 20
"""Bytes copied in one commit: small, so that a delivery in the same commit group hardly waits."""
SEGMENTS_PER_SWEEP = 16
"""Segments checked per sweep, so that a large ledger costs no more than a small one."""
MIN_LIVE_FRACTION = 0.5

IS_STAGED = (
    "(EXISTS (SELECT 1 FROM readers WHERE readers.name IN :stages "
    f"AND readers.space = rows.space AND readers.cursor < rows.arrival) AND NOT {FORGOTTEN})"
)
"""A stage of the run file has not finished this row. Nothing waits for other readers: any token can
declare one and leave it there."""
LIVE_ROWS = (
    "FROM rows WHERE segment = :segment AND blob = '' AND length > 0 "
    f"AND (NOT {RELEASED} OR {IS_STAGED})"
)
LIVE_COLUMNS = (
    "FROM columns WHERE segment = :segment AND length > 0 AND NOT EXISTS "
    "(SELECT 1 FROM rows WHERE rows.space = columns.space AND rows.row_id = columns.row_id "
    f"AND {RELEASED} AND NOT {IS_STAGED})"
)
LIVE_BUNDLES = "FROM bundles WHERE segment = :segment AND length > 0"
NUM_FORGOTTEN = "SELECT count(*) FROM meta WHERE key LIKE :keys"
HAS_FORGOTTEN = (
    "SELECT count(*) FROM rows WHERE segment = :segment AND length > 0 AND blob = '' AND EXISTS "
    f"(SELECT 1 FROM freed WHERE freed.group_id = rows.group_id) AND {FORGOTTEN}"
)
"""Payload that an operator wants erased and that training needs no longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _LivePayload:
    """One payload that is still needed."""

    name: str
    """Name of its record, for log lines."""
    location: Location
    move: Callable[..., Record]
    """Builds the record move to `to_segment` and `to_offset`."""

    def moved(self, to: Location) -> Record:
        return self.move(to_segment=to.segment, to_offset=to.offset)


def live_bytes(
    tables: Tables, segment: int, kept: Kept = NOTHING, stages: Sequence[str] = ()
) -> int:
    """Bytes of payload in this segment that a record references and that may not be deleted."""
    values = _values(segment, kept, stages)
    found = (
        tables.scalar(f"SELECT coalesce(sum(length), 0) {live}", **values)
        for live in (LIVE_ROWS, LIVE_COLUMNS, LIVE_BUNDLES)
    )
    return sum(map(int, found))


_PAYLOAD_TABLES: tuple[tuple[type[Any], str, tuple[str, ...]], ...] = (
    (RowMove, LIVE_ROWS, ("row_id",)),
    (ColumnMove, LIVE_COLUMNS, ("space", "row_id", "name")),
    (BundleMove, LIVE_BUNDLES, ("space", "arrival")),
)
"""Tables whose records reference payload, with their key columns."""


def _values(segment: int, kept: Kept, stages: Sequence[str]) -> dict[str, Any]:
    return {"segment": segment, "since": kept.since, "limit": kept.limit, "stages": [*stages]}


def _live_payloads(
    tables: Tables, segment: int, kept: Kept, stages: Sequence[str]
) -> list[_LivePayload]:
    """Ordered by offset, so that copying reads sequentially."""
    values = _values(segment, kept, stages)
    found: list[_LivePayload] = []
    for move, live, keys in _PAYLOAD_TABLES:
        query = f'SELECT "offset", length, {", ".join(keys)} {live}'
        for offset, length, *key in tables.rows(query, **values):
            old = {"segment": segment, "offset": int(offset)}
            found.append(
                _LivePayload(
                    name="/".join(map(str, key)),
                    location=Location(segment=segment, offset=int(offset), length=int(length)),
                    move=partial(move, **dict(zip(keys, key, strict=True)), **old),
                )
            )
    return sorted(found, key=lambda live: live.location.offset)


class Compactor:
    """Runs on the service's event loop; reads and deletes in threads, writes through the ledger."""

    def __init__(
        self, ledger: Ledger, *, bytes_per_s: float = 16 << 20, period_s: float = 5.0
    ) -> None:
        self._ledger = ledger
        self._keeper = Keeper(ledger)
        self._bytes_per_s = bytes_per_s
        self._period_s = period_s
        self._last_scanned = 0
        """Last segment of the previous sweep; the next sweep continues after it, in a cycle."""
        self._unreadable: set[int] = set()
        """Segments with an unreadable live record: left untouched so they can be repaired."""
        self.settled: set[int] = set()
        """Segments that hold only kept payload, so they change only with what is kept."""
        self._settled_for: tuple[Kept, int] = (ledger.kept, 0)
        """What was kept, and how many rows were forgotten, when they were added."""
        self.deleted_bytes = 0
        self.moved_bytes = 0

    async def run(self) -> None:
        """consumes: freed groups · produces: free space · waits for: its period"""
        while True:
            await asyncio.sleep(self._period_s)
            await self.sweep()

    async def sweep(self) -> None:
        """Check some segments; delete the dead ones and empty those less than half live."""
        sizes = await asyncio.to_thread(self._ledger.payloads.sizes)
        await self._ledger.flush()  # payload placed a moment ago is in the tables now
        # Keep the newest: a start takes the number after it, and no number may be used twice.
        closed = sorted(sizes)[:-1]
        await self._keeper.look(-(-len(closed) // SEGMENTS_PER_SWEEP))
        has_forgotten = await self._recheck_settled()
        sparse: list[tuple[int, int]] = []
        for segment in self._next([one for one in closed if one not in self.settled]):
            live = await asyncio.to_thread(self._live_bytes, segment)
            if live == 0:
                await self._delete(segment, sizes[segment])
            elif segment in self._unreadable:
                continue
            elif live < MIN_LIVE_FRACTION * sizes[segment] or (
                has_forgotten and await self._must_erase(segment)
            ):
                sparse.append((live, segment))
            elif await asyncio.to_thread(self._is_settled, segment):
                self.settled.add(segment)
        for live, segment in sorted(sparse):
            if not self._has_room(live):
                log.warning(
                    "not enough disk space to copy live rows; only segments without live rows are "
                    "deleted until space is freed",
                    bytes=live,
                )
                return
            if await self._move_live(segment):
                await self._delete(segment, sizes[segment])

    async def _recheck_settled(self) -> bool:
        """Look at settled segments again if what is kept changed; True if rows were forgotten."""
        keys = f"{FORGOTTEN_PREFIX}%"
        found = await asyncio.to_thread(self._ledger.tables.scalar, NUM_FORGOTTEN, keys=keys)
        state = (self._ledger.kept, int(found))
        if state != self._settled_for:
            self._settled_for = state
            self.settled.clear()
        return state[1] > 0

    async def _must_erase(self, segment: int) -> bool:
        """It holds payload of a forgotten row; half a live segment could keep it forever."""
        read = self._ledger.tables.scalar
        return bool(await asyncio.to_thread(read, HAS_FORGOTTEN, segment=segment))

    def _live_bytes(self, segment: int) -> int:
        ledger = self._ledger
        return live_bytes(ledger.tables, segment, ledger.kept, ledger.stages)

    def _is_settled(self, segment: int) -> bool:
        ledger = self._ledger
        is_needed = live_bytes(ledger.tables, segment, stages=ledger.stages) > 0
        return ledger.kept.limit > 0 and not is_needed

    def _has_room(self, num_bytes: int) -> bool:
        """The ledger waits while the disk is full, so a copy that does not fit would block it."""
        usage = self._ledger.usage()
        return usage.free_bytes - usage.queued_bytes > num_bytes + COPY_BATCH_BYTES

    def _next(self, closed: list[int]) -> list[int]:
        behind = [segment for segment in closed if segment > self._last_scanned]
        chosen = (behind + closed[: len(closed) - len(behind)])[:SEGMENTS_PER_SWEEP]
        if chosen:
            self._last_scanned = chosen[-1]
        return chosen

    async def _move_live(self, segment: int) -> bool:
        """Copy live payload; True when no record references the segment any more."""
        ledger = self._ledger
        found = await asyncio.to_thread(
            _live_payloads, ledger.tables, segment, ledger.kept, ledger.stages
        )
        for portion in _copy_batches(found):
            payloads = await asyncio.to_thread(self._read, portion)
            size = sum(live.location.length for live, _ in payloads)
            moves = [live.moved(self._ledger.place(payload)) for live, payload in payloads]
            await self._ledger.write(moves)
            self.moved_bytes += size
            await asyncio.sleep(size / self._bytes_per_s)
        if await asyncio.to_thread(self._live_bytes, segment) == 0:
            return True
        self._unreadable.add(segment)
        return False

    def _read(self, portion: Sequence[_LivePayload]) -> list[tuple[_LivePayload, bytes]]:
        found: list[tuple[_LivePayload, bytes]] = []
        for live in portion:
            try:
                found.append((live, self._ledger.payloads.read(live.location)))
            except StoreError as error:  # a reader of the row reports it; other records move
                log.error("record cannot be moved", record=live.name, reason=str(error))
        return found

    async def _delete(self, segment: int, size: int) -> None:
        await asyncio.to_thread(self._ledger.payloads.delete, segment)
        self._unreadable.discard(segment)
        self.deleted_bytes += size
        log.info("segment deleted", segment=segment, bytes=size)


def _copy_batches(found: Sequence[_LivePayload]) -> Iterator[list[_LivePayload]]:
    portion: list[_LivePayload] = []
    size = 0
    for live in found:
        portion.append(live)
        size += live.location.length
        if size >= COPY_BATCH_BYTES:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion
