# SPDX-License-Identifier: Apache-2.0
"""Rows, columns, readers and spaces as a service without HTTP: each command runs the core, makes
its records durable, then answers.

Runs on the event loop that owns the core; hashing and reading of values happen in threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TypeVar

from penstock.bounds import MAX_FINITE
from penstock.dataflow.column_records import ColumnRecord
from penstock.dataflow.columns.bundles import BlobLike, BundleDraft, drafts
from penstock.dataflow.columns.cells import (
    MAX_WRITES,
    Cell,
    blob_cell,
    bytes_cell,
    check_column,
    failed_cell,
    number_cell,
    require_finite,
)
from penstock.dataflow.columns.column_store import Columns
from penstock.dataflow.columns.pages import load_saved_readers
from penstock.dataflow.columns.readers import Readers, StoredColumns, check_interval_s
from penstock.dataflow.columns.reading import RowStoreReader
from penstock.dataflow.columns.row_leases import ReaderSpec
from penstock.dataflow.columns.row_window import RowWindow
from penstock.dataflow.columns.spaces import Spaces
from penstock.dataflow.columns.values import BlobRef, WireValue
from penstock.dataflow.ledger.blobs import BlobStore
from penstock.dataflow.ledger.compaction import IS_STAGED
from penstock.dataflow.ledger.keeping import RELEASED
from penstock.dataflow.records import RowRecord
from penstock.dataflow.service.process import IsDisconnected, Process, never_disconnected
from penstock.dataflow.service.rows.messages import (
    MAX_CELLS,
    MAX_ROWS,
    ExtendAnswer,
    ExtendRequest,
    GetAnswer,
    GetRequest,
    PutAnswer,
    PutRequest,
    PutRow,
    ReaderState,
    ResultsAnswer,
    ResultsRequest,
    RowLeaseAnswer,
    RowLeaseRequest,
    RowResult,
    RowResultStatus,
    SpaceState,
    WriteStatus,
)
from penstock.dataflow.service.rows.reader_rights import ReaderRights
from penstock.dataflow.service.rows.upload_quotas import UploadQuotas
from penstock.errors import BadRequest

T = TypeVar("T")
THREAD_BYTES = 1 << 20
THREAD_CELLS = 8_192
"""Values above these are hashed in a thread."""


class RowService:
    def __init__(
        self, process: Process, blobs: BlobStore, stages: Mapping[str, Collection[str]]
    ) -> None:
        """`stages`: of the run file, by name, with the columns that each writes."""
        self.rights = ReaderRights(stages)
        ledger, journal = process.ledger, process.journal
        self.columns = Columns(ledger.tables, journal, ledger.place)
        self.row_window = RowWindow(self.columns, ledger.tables, journal, stages=[*stages])
        self.readers = Readers(self.row_window, journal)
        self.spaces = Spaces(self.row_window, self.columns, journal)
        self.blobs = blobs
        self.upload_quotas = UploadQuotas(blobs.uploads())
        self._process = process
        self._ledger = ledger
        self._clock = process.clock
        self._store_reader = RowStoreReader(ledger, self.columns.has_single_columns)
        self._news: dict[str, asyncio.Event] = {}
        """By reader with open polls; set when there may be rows for it."""
        self._delete_lock = asyncio.Lock()
        """Held while rows or a reader are deleted: they must not be created again before that is
        durable, since a commit deletes after writing all records of its group."""
        self._tick_lock = asyncio.Lock()

    def restore(self) -> None:
        """Restore the state from the ledger; call this first."""
        self.spaces.restore(self._ledger.tables)  # windows load rows with the columns of spaces
        self.row_window.restore(load_saved_readers(self._ledger.tables), self._clock())

    async def tick(self) -> None:
        """Expire leases and deadlines; returns when all earlier decisions are in the tables."""
        async with self._tick_lock:
            self.readers.tick(self._clock())
            self.columns.cut()
            upto = self.row_window.last_arrival
            await self._process.make_all_durable()
            self.columns.release()
            self.row_window.durable_through = upto
        self._process.wake()

    def require_room(self, num_bytes: int) -> None:
        self._process.require_room(num_bytes)

    # --- readers ------------------------------------------------------------------------------

    async def declare(self, terms: ReaderSpec) -> ReaderState:
        async with self._delete_lock:
            self.readers.declare(terms, self._clock())
        await self._process.make_all_durable()
        return self.state(terms.name)

    async def remove(self, name: str) -> None:
        async with self._delete_lock:
            self.readers.remove(name)
            await self._process.make_all_durable()

    def state(self, name: str) -> ReaderState:
        reader = self.readers.reader(name)
        return ReaderState(
            **asdict(reader.terms),
            cursor=reader.advance(),
            num_loaded=len(reader.window),
            num_leased=len(reader.leased),
            has_worker=self.readers.has_worker(name, self._clock()),
        )

    async def lease(
        self, name: str, body: RowLeaseRequest, is_disconnected: IsDisconnected = never_disconnected
    ) -> RowLeaseAnswer:
        _check_lease(body)
        reader = self.readers.reader(name)
        ttl_s = reader.terms.ttl_s
        give_up_at = self._process.poll_deadline(body.wait_s)
        while True:
            news, now = self._news.setdefault(name, asyncio.Event()), self._clock()
            grants = self.readers.lease(name, body.worker, body.request_id, body.max_rows, now)
            if grants:
                await self._process.make_all_durable()
            if grants or now >= give_up_at:
                return RowLeaseAnswer(rows=tuple(grants), ttl_s=ttl_s)
            # Checks again from time to time: a waiting worker counts as live.
            await self._process.wait_for(news, min(give_up_at, now + check_interval_s(reader)))
            if await is_disconnected():  # the caller hung up; a grant would have no holder
                return RowLeaseAnswer(rows=(), ttl_s=ttl_s)

    def on_wake(self) -> None:
        """Wake the polls of readers that may get rows, and of those that are gone."""
        for name in [*self._news]:
            reader = self.row_window.readers.get(name)
            if reader is None or self.row_window.may_have_rows(reader):
                self._news.pop(name).set()

    async def extend(self, name: str, body: ExtendRequest) -> ExtendAnswer:
        return ExtendAnswer(lost=tuple(self.readers.extend(name, body.claims, self._clock())))

    async def record(self, body: ResultsRequest) -> ResultsAnswer:
        """Write the columns first, then end each lease."""
        columns = [(*result.columns, *result.failed) for result in body.results]
        _check_count(len(columns), sum(map(len, columns)), MAX_WRITES)
        for names in columns:
            self.readers.require_writes(body.reader, names)
        cells = await self._in_thread(
            lambda: [self._result_cells(result) for result in body.results],
            [result.columns for result in body.results],
        )
        now = self._clock()
        claims = (result.claim for result in body.results)
        stored = self.readers.stored(body.reader, zip(claims, columns, strict=True))
        outcomes = [
            self._record_one(body, result, row_cells, stored, now)
            for result, row_cells in zip(body.results, cells, strict=True)
        ]
        await self._process.make_all_durable()
        return ResultsAnswer(outcomes=tuple(outcomes))

    def _record_one(
        self,
        body: ResultsRequest,
        result: RowResult,
        cells: Sequence[Cell],
        stored: StoredColumns,
        now: float,
    ) -> RowResultStatus:
        claim = result.claim
        statuses = self.readers.write(body.reader, claim, cells, body.worker, now, stored)
        columns = {
            cell.name: WriteStatus(status=status, detail=detail)
            for cell, (status, detail) in zip(cells, statuses, strict=True)
        }
        status, detail = self.readers.end(body.reader, claim, result.end, now, result.error)
        end = WriteStatus(status=status, detail=detail)
        return RowResultStatus(row_id=claim.row_id, columns=columns, end=end)

    # --- values -------------------------------------------------------------------------------

    async def _in_thread(self, make: Callable[[], T], rows: Sequence[Mapping[str, WireValue]]) -> T:
        """Prepare values for storage, off the event loop when they are large or many. Raises 429 or
        507 first when there is no room for them."""
        sizes = [len(v) for values in rows for v in values.values() if isinstance(v, bytes)]
        num_bytes = sum(sizes)
        self.require_room(num_bytes)
        is_long = num_bytes > THREAD_BYTES or sum(map(len, rows)) > THREAD_CELLS
        return await asyncio.to_thread(make) if is_long else make()

    def _result_cells(self, result: RowResult) -> list[Cell]:
        for name in (*result.columns, *result.failed):
            check_column(name)
        cells = [self._cell(name, value) for name, value in result.columns.items()]
        for name, kind in result.failed.items():
            if not (0 < len(kind) <= 64 and name not in result.columns):
                raise BadRequest(f"column {name!r}: the failure kind must have 1 to 64 characters")
            cells.append(failed_cell(name, kind, result.error))
        return cells

    def _cell(self, name: str, value: WireValue) -> Cell:
        if isinstance(value, bytes):
            return bytes_cell(name, value)
        if isinstance(value, BlobRef):
            return self._blob_cell(name, value)
        return number_cell(name, require_finite(name, value, MAX_FINITE))

    def _blob_cell(self, name: str, blob: BlobLike) -> Cell:
        size = self.blobs.claim(blob.digest)
        if size != blob.size:
            raise BadRequest(f"blob {blob.digest} has {size} bytes, not {blob.size}")
        return blob_cell(name, blob.digest, size)

    # --- spaces -------------------------------------------------------------------------------

    async def put(self, space: str, body: PutRequest, writer: str) -> PutAnswer:
        _check_count(len(body.rows), sum([len(row.columns) for row in body.rows]))
        made = await self._in_thread(
            lambda: self._drafts(body.rows), [row.columns for row in body.rows]
        )
        async with self._delete_lock:
            refused = self.spaces.put(space, made, writer, self._clock())
        await self._process.make_all_durable()
        return PutAnswer(rejected=tuple(refused))

    def _drafts(self, rows: Iterable[PutRow]) -> list[BundleDraft]:
        return [*drafts([(row.key, row.columns) for row in rows], self._blob_cell)]

    async def get(
        self, space: str, body: GetRequest, pack: Callable[[GetAnswer], T] = lambda answer: answer
    ) -> T:
        """pack: encodes the answer, off the event loop because it may be large."""
        _check_count(len(body.keys))
        if len(set(body.keys)) != len(body.keys):
            raise BadRequest("a key appears twice in one call; ask for each row once")
        found = self._store_reader.read_from_tables(space, body.keys, body.columns)
        if found is not None:
            return pack(GetAnswer(rows=tuple(found)))

        def read() -> T:
            rows = self._store_reader.read(space, body.keys, body.columns)
            return pack(GetAnswer(rows=tuple(rows)))

        return await asyncio.to_thread(read)

    async def set_quota(self, space: str, quota_bytes: int) -> None:
        self.spaces.set_quota(space, quota_bytes, self._clock())
        await self._process.make_all_durable()

    async def clear(self, space: str) -> None:
        async with self._delete_lock:
            self.spaces.clear(space)
            await self._process.make_all_durable()

    def space_states(self) -> tuple[SpaceState, ...]:
        return tuple(
            SpaceState(
                name=name,
                used_bytes=self.columns.used_bytes.get(name, 0),
                quota_bytes=record.quota_bytes,
            )
            for name, record in sorted(self.spaces.records.items())
        )

    async def sweep_blobs(self) -> int:
        """Delete abandoned uploads and unreferenced blobs; called about once an hour."""
        return await asyncio.to_thread(self.blobs.sweep, self._referenced_blobs)

    def _referenced_blobs(self, digests: list[str]) -> set[str]:
        tables, kept = self._ledger.tables, self._ledger.kept
        where = "blob IN :digests"
        named = {column.blob for column in tables.read(ColumnRecord, where, digests=digests)}
        where += f" AND (NOT {RELEASED} OR {IS_STAGED})"
        values = {"digests": digests, "since": kept.since, "limit": kept.limit}
        values["stages"] = [*self._ledger.stages]
        return named | {row.blob for row in tables.read(RowRecord, where, **values)}


def _check_lease(body: RowLeaseRequest) -> None:
    if not 0 < len(body.request_id) <= 128 or not 0 < len(body.worker) <= 128:
        raise BadRequest("request_id and worker must each be 1 to 128 characters long")
    if not 0 < body.max_rows <= MAX_ROWS:
        raise BadRequest(f"max_rows must be 1 to {MAX_ROWS}")


def _check_count(num: int, num_cells: int = 0, max_cells: int = MAX_CELLS) -> None:
    if num > MAX_ROWS:
        raise BadRequest(f"{num} rows in one call; at most {MAX_ROWS} are allowed")
    if num_cells > max_cells:
        raise BadRequest(
            f"{num_cells} columns of {num} rows in one call; at most {max_cells} together are "
            "allowed: send fewer rows in each call"
        )
