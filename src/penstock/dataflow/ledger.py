# SPDX-License-Identifier: Apache-2.0
"""The durable truth: records in SQL, payload in segments, one writer thread, group commit.

A write is acknowledged after the segment's fdatasync and the SQL commit (SQLite WAL,
`synchronous=FULL`: class D1). The next group forms while the running one commits, so there is no
timer and no wait. Any storage error is final: the service stops acknowledging and ends, and its
next life starts from what is on disk.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.dataflow import segments
from penstock.dataflow.records import FORMAT, MetaRecord, Record, RowRecord
from penstock.dataflow.segments import Chunk, Location, SegmentPlan, SegmentWriter
from penstock.dataflow.tables import open_tables
from penstock.errors import StoreError
from penstock.types import RowId


@dataclass(slots=True)
class _Write:
    records: Sequence[Record]
    chunks: list[Chunk]
    done: asyncio.Future[None]


class Ledger:
    """Opened by one process at a time; a second one is refused."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(folder)
        self.segments_folder = folder / "segments"
        self.tables = open_tables(folder)
        self._check_format()
        self._plan = SegmentPlan(self.segments_folder)
        self._placed: list[Chunk] = []
        self._queue: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write_groups, name="ledger", daemon=True)
        self._writer.start()
        self.on_failure: Callable[[StoreError], None] = lambda error: None
        """Called on the event loop when storage failed for good."""

    def _check_format(self) -> None:
        found = self.tables.scalar("SELECT value FROM meta WHERE key = 'format'")
        if found is not None and int(found) > FORMAT:
            raise StoreError(
                f"this ledger has format {found}, this penstock reads up to {FORMAT}; "
                "run the newer penstock that wrote it"
            )

    # --- writing ------------------------------------------------------------------------------

    def place(self, payload: bytes) -> Location:
        """Where this payload will lie. It goes to disk with the next write, whoever makes it, so
        no record can ever point at bytes that were left out."""
        location, chunk = self._plan.place(payload)
        self._placed.append(chunk)
        return location

    def write(self, records: Sequence[Record]) -> asyncio.Future[None]:
        """Durable when the future is done, with all payload placed before. In order of call."""
        done = asyncio.get_running_loop().create_future()
        chunks, self._placed = self._placed, []
        if not records and not chunks:
            done.set_result(None)
        else:
            self._queue.put(_Write(records, chunks, done))
        return done

    def flush(self) -> asyncio.Future[None]:
        """Done when every write made so far is durable: for answers that repeat an earlier
        decision."""
        done = asyncio.get_running_loop().create_future()
        self._queue.put(_Write((), [], done))
        return done

    def _write_groups(self) -> None:
        """consumes: writes of all callers · produces: one fsynced group at a time
        waits for: the first write · woken by: `write()`"""
        writer = SegmentWriter(self.segments_folder)
        while True:
            group = self._next_group()
            if not group:
                writer.close()
                return
            try:
                chunks = [chunk for write in group for chunk in write.chunks]
                if chunks:
                    writer.append(chunks)
                records = [record for write in group for record in write.records]
                if records:
                    self.tables.commit(records)
            except Exception as error:
                self._fail(group, error)
                return
            _resolve(group)

    def _next_group(self) -> list[_Write]:
        group: list[_Write] = []
        item = self._queue.get()
        while item is not None:
            group.append(item)
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return group
        if group:
            self._queue.put(None)
        return group

    def _fail(self, group: list[_Write], error: Exception) -> None:
        failure = StoreError(f"the ledger cannot be written: {type(error).__name__}: {error}")
        failure.__cause__ = error
        loop = group[0].done.get_loop()

        def tell() -> None:
            for write in group:
                if not write.done.done():
                    write.done.set_exception(failure)
            self.on_failure(failure)

        loop.call_soon_threadsafe(tell)

    def close(self) -> None:
        self._queue.put(None)
        self._writer.join()
        self.tables.close()
        os.close(self._lock)

    # --- reading ------------------------------------------------------------------------------

    def row(self, row_id: RowId) -> RowRecord | None:
        found = self.tables.read(RowRecord, "row_id = :row_id", row_id=row_id)
        return found[0] if found else None

    def payload(self, row: RowRecord) -> bytes:
        location = Location(segment=row.segment, offset=row.offset, length=row.length)
        return segments.read(self.segments_folder, location)

    def stamp(self) -> list[Record]:
        """Format and service epoch for this start, to be written before anything else."""
        epoch = (
            int(self.tables.scalar("SELECT value FROM meta WHERE key = 'service_epoch'") or 0) + 1
        )
        return [
            MetaRecord(key="format", value=str(FORMAT)),
            MetaRecord(key="service_epoch", value=str(epoch)),
        ]


def _resolve(group: list[_Write]) -> None:
    def tell() -> None:
        for write in group:
            if not write.done.done():
                write.done.set_result(None)

    group[0].done.get_loop().call_soon_threadsafe(tell)


def _lock(folder: Path) -> int:
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise StoreError(
            f"another dataflow service has {folder} open; only one may write a ledger"
        ) from None
    return descriptor
