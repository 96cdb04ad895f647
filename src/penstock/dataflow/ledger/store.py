# SPDX-License-Identifier: Apache-2.0
"""The durable state: records in SQL, payload in a store, one writer thread, group commit.

A write is acknowledged after the payload store's append and the SQL commit (segments with fdatasync
and SQLite WAL with `synchronous=FULL`: class D1). The next group forms while the current one
commits, so there is no timer and no delay. On a full disk the writer waits: nothing is acknowledged
meanwhile, and the same group is written once there is room. Any other storage error, an fsync error
in particular, is final: the service stops acknowledging and exits, and the next process starts from
the state on disk.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from blake3 import blake3

from penstock.dataflow.column_records import BundleRecord, ColumnRecord
from penstock.dataflow.ledger.bounds import RESERVE_BYTES, DiskReserve, Usage
from penstock.dataflow.ledger.keeping import KeepSpec, current_kept
from penstock.dataflow.ledger.payloads import Durability, PayloadStore, SegmentPayloads
from penstock.dataflow.ledger.segments import DiskFull, Location, PlacedPayload
from penstock.dataflow.ledger.tables import open_tables
from penstock.dataflow.records import Deletion, MetaRecord, Record, RowRecord
from penstock.errors import StoreError
from penstock.types import RowId

PayloadRecord = RowRecord | ColumnRecord | BundleRecord
"""A record that holds the location of its payload."""


@dataclass(slots=True)
class _PendingWrite:
    records: Sequence[Record | Deletion]
    chunks: list[PlacedPayload]
    done: asyncio.Future[None]


RETRY_S = 0.1
"""Seconds between two checks of a full disk."""
SQLITE_FULL_CODES = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE)
"""SQLite error codes for a full disk after which the transaction was rolled back."""


class _ClosedWhileFull(Exception):
    """The ledger was closed while its disk was full; pending writes were not acknowledged."""


OnFailure = Callable[[StoreError], None]
"""Called on the event loop after a final storage error."""


def ignore_failure(error: StoreError) -> None:
    """For callers that get the error from their own write."""


class Ledger:
    """Opened by one process at a time; a second one is refused."""

    def __init__(
        self,
        folder: Path,
        payloads: PayloadStore | None = None,
        *,
        store: str = "sqlite",
        name: str = "penstock",
        reserve_bytes: int = RESERVE_BYTES,
        keep: KeepSpec | None = None,
        stages: Sequence[str] = (),
        on_failure: OnFailure = ignore_failure,
    ) -> None:
        """`store` is `sqlite` or a PostgreSQL URL; `name` identifies this ledger in it. `keep`: the
        freed payload that stays for reading; None for nothing. `stages`: readers for which freed
        payload stays until they have finished its rows."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._lock = _lock(folder)
        self.segments_folder = folder / "segments"
        try:
            self.tables = open_tables(folder, store, name=name)
        except BaseException:
            os.close(self._lock)
            raise
        self.keep = keep
        self.stages = stages
        self.kept = current_kept(self.tables, keep)
        """The freed groups whose payload stays for now; the Keeper moves it."""
        self.payloads = SegmentPayloads(self.segments_folder) if payloads is None else payloads
        self._reserve = DiskReserve(folder, reserve_bytes)
        self._reserve.allocate_if_room()
        self.on_failure = on_failure
        self._placed: list[PlacedPayload] = []
        self._queued_bytes = 0
        self._queue: queue.SimpleQueue[_PendingWrite | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._writer = threading.Thread(target=self._write_groups, name="ledger", daemon=True)
        self._writer.start()

    # --- writing ------------------------------------------------------------------------------

    @property
    def durability(self) -> Durability:
        """Durability class of an acknowledged delivery, given by the payload store."""
        return self.payloads.durability

    def place(self, payload: bytes | memoryview) -> Location:
        """Assign this payload its location. It goes to disk with the next write of any caller, so
        no record can point at bytes that were not written."""
        chunk = self.payloads.place(payload)
        self._placed.append(chunk)
        self._queued_bytes += chunk.location.length
        return chunk.location

    def write(self, records: Sequence[Record | Deletion]) -> asyncio.Future[None]:
        """Durable when the future is done, with all payload placed before. Written in call
        order."""
        chunks, self._placed = self._placed, []
        return self._put(records, chunks)

    def flush(self) -> asyncio.Future[None]:
        """Done when every write made so far is durable: for answers that repeat an earlier
        decision."""
        return self._put((), [])

    def _put(
        self, records: Sequence[Record | Deletion], chunks: list[PlacedPayload]
    ) -> asyncio.Future[None]:
        done = asyncio.get_running_loop().create_future()
        self._queue.put(_PendingWrite(records, chunks, done))
        return done

    def usage(self) -> Usage:
        """Queued bytes and free disk space, for `StorageLimits`."""
        return Usage(queued_bytes=self._queued_bytes, free_bytes=self._reserve.cached_free_bytes())

    def _write_groups(self) -> None:
        """consumes: writes of all callers · produces: one fsynced group at a time
        waits for: the first write · woken by: `write()`"""
        while True:
            group = self._next_group()
            if not group:
                return
            try:
                self._write_group(group)
                self._reserve.allocate_if_room()
            except _ClosedWhileFull:
                return
            except Exception as error:
                self._fail(group, error)
                return
            self._resolve(group)

    def _write_group(self, group: list[_PendingWrite]) -> None:
        chunks = [chunk for write in group for chunk in write.chunks]
        if chunks:
            self._retry_until_space(lambda: self.payloads.append(chunks))
        for records in _transactions(group):
            self._retry_until_space(partial(self.tables.commit, records))

    def _retry_until_space(self, step: Callable[[], None]) -> None:
        """Run `step`; on a full disk release the reserve, then retry until there is room."""
        while True:
            try:
                return step()
            except Exception as error:
                if not _is_full(error):
                    raise
            if not self._reserve.release() and self._closing.wait(RETRY_S):
                raise _ClosedWhileFull

    def _next_group(self) -> list[_PendingWrite]:
        group: list[_PendingWrite] = []
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

    def _fail(self, group: list[_PendingWrite], error: Exception) -> None:
        failure = StoreError(f"the ledger cannot be written: {type(error).__name__}: {error}")
        failure.__cause__ = error
        loop = group[0].done.get_loop()

        def notify() -> None:
            for write in group:
                if not write.done.done():
                    write.done.set_exception(failure)
            self.on_failure(failure)

        loop.call_soon_threadsafe(notify)

    def _resolve(self, group: list[_PendingWrite]) -> None:
        written = sum(chunk.location.length for write in group for chunk in write.chunks)

        def notify() -> None:
            self._queued_bytes -= written
            for write in group:
                if not write.done.done():
                    write.done.set_result(None)

        group[0].done.get_loop().call_soon_threadsafe(notify)

    def close(self) -> None:
        self._closing.set()
        self._queue.put(None)
        self._writer.join()
        self._reserve.release()
        if isinstance(self.payloads, SegmentPayloads):
            self.payloads.close()
        self.tables.close()
        os.close(self._lock)

    # --- reading ------------------------------------------------------------------------------

    def row(self, row_id: RowId) -> RowRecord | None:
        found = self.tables.read(RowRecord, "row_id = :row_id", row_id=row_id)
        return found[0] if found else None

    def payload(self, row: RowRecord) -> bytes:
        """The bytes as delivered, or StoreError naming this record. Blocks; for any thread."""
        payload = self.read_payload(row)
        if blake3(payload).hexdigest() != row.summary.digest:
            raise StoreError(f"row {row.row_id} is damaged: its location holds other bytes")
        return payload

    def read_payload(self, record: PayloadRecord) -> bytes:
        """As `payload`, for any record and without the check of its digest."""
        location = location_of(record)
        try:
            return self.payloads.read(location)
        except StoreError:  # compaction may have moved it since the caller read its record
            key = {name: getattr(record, name) for name in record.KEY}
            where = " AND ".join(f"{name} = :{name}" for name in key)
            found = self.tables.read(type(record), where, **key)
            if not found or location_of(found[0]) == location:
                raise
            return self.payloads.read(location_of(found[0]))

    def next_epoch(self) -> MetaRecord:
        """The service epoch of this start, to be written before anything else."""
        last = self.tables.scalar("SELECT value FROM meta WHERE key = 'service_epoch'")
        return MetaRecord(key="service_epoch", value=str(int(last or 0) + 1))


def _transactions(group: list[_PendingWrite]) -> list[list[Record | Deletion]]:
    """One transaction for the group, split after each write that deletes: within a transaction
    deletes come last and would also remove records that a later write added again."""
    transactions: list[list[Record | Deletion]] = [[]]
    for write in group:
        transactions[-1] += write.records
        if Deletion in map(type, write.records):
            transactions.append([])
    return [records for records in transactions if records]


def _is_full(error: Exception) -> bool:
    """The disk is full and the write was rolled back. Never true for an fsync error."""
    code = getattr(error, "sqlite_errorcode", None)
    return isinstance(error, DiskFull) or code in SQLITE_FULL_CODES


def location_of(record: PayloadRecord) -> Location:
    return Location(segment=record.segment, offset=record.offset, length=record.length)


def _lock(folder: Path) -> int:
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise StoreError(
            f"ledger {folder} is already open in another dataflow service; stop that one first "
            "(a ledger can have only one writer)"
        ) from None
    return descriptor
