# SPDX-License-Identifier: Apache-2.0
"""Rows as trainers fetch them: payload and additional columns from any store, streamed in pieces.

Damage is limited to its record: that row is unavailable, every rank masks it, and all others are
sent. The record's checksum proves that it is intact, and the row id in its trajectory that it is
the right row. A digest over the payload would cost more than everything else here; readers compare
it with the manifest's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import structlog

from penstock.dataflow.column_records import STORED_COLUMNS_SQL, ColumnRecord
from penstock.dataflow.ledger.blobs import MAX_BLOB_BYTES, BlobStore
from penstock.dataflow.ledger.payloads import SegmentPayloads
from penstock.dataflow.ledger.segments import Location
from penstock.dataflow.ledger.store import Ledger, location_of
from penstock.dataflow.service.trainers.messages import RowsAnswer
from penstock.errors import NotFound, StoreError
from penstock.types import RowId, RowPayload
from penstock.wire.codec import decode, encode

log = structlog.get_logger(__name__)

KEYS_PER_QUERY = 500
"""Row ids per query."""
PIECE_BYTES = 2 << 20
"""Bytes read, checked and sent together."""
MIN_INLINE_BYTES = 64
"""Smallest payload whose place can hold a notice that the row is unavailable; no trajectory is
shorter."""
MSGPACK_BIN32 = b"\xc6"
"""Msgpack prefix of a byte string: this marker, the length in four bytes, then the bytes."""
LOCATIONS_SQL = 'SELECT row_id, blob, segment, "offset", length FROM rows WHERE row_id IN :ids'


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsQuery:
    """Requested rows, in this order."""

    row_ids: Sequence[RowId]
    columns: Sequence[str] = ()
    """Additional columns, by name."""
    remote_urls: Mapping[RowId, str] = field(default_factory=dict[RowId, str])
    """URL of rows in other partitions; empty: the row is lost."""


@dataclass(slots=True, kw_only=True)
class _LocatedRow:
    """Where the parts of a row are."""

    row_id: RowId
    frame: bytes
    """Its RowPayload as msgpack, up to the payload bytes."""
    place: Location | None = None
    """None: unavailable, or in another partition."""
    blob: str = ""
    columns: tuple[ColumnRecord, ...] = ()
    num_bytes: int = 0
    """Bytes of its payload and columns."""
    is_inline: bool = True
    """The row is only a payload in the payload store, which is read directly into the send
    buffer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedPayloads:
    """Located rows, to be sent in this order."""

    head: bytes
    rows: Sequence[_LocatedRow]

    @property
    def num_bytes(self) -> int | None:
        """Size of the response; None when it is only known at the end."""
        if not all(row.is_inline for row in self.rows):
            return None
        return len(self.head) + sum(len(row.frame) + row.num_bytes for row in self.rows)


class RowPayloads:
    def __init__(self, ledger: Ledger, blobs: BlobStore) -> None:
        self._ledger = ledger
        self._blobs = blobs

    async def answer(self, wanted: RowsQuery) -> RowsAnswer:
        """All rows in memory: for callers that cannot stream."""
        found = await self.find(wanted)
        return decode(b"".join([piece async for piece in self.pieces(found)]), RowsAnswer)

    async def find(self, wanted: RowsQuery) -> LocatedPayloads:
        rows: list[_LocatedRow] = []
        for start in range(0, len(wanted.row_ids), KEYS_PER_QUERY):
            rows += self._find(wanted.row_ids[start : start + KEYS_PER_QUERY], wanted)
            await asyncio.sleep(0)  # let other tasks run in between
        num_rows = msgspec.Raw(b"\xdd" + len(rows).to_bytes(4, "big"))
        return LocatedPayloads(
            head=encode({"columns": wanted.columns, "rows": num_rows}), rows=rows
        )

    async def pieces(self, found: LocatedPayloads) -> AsyncGenerator[bytes | memoryview]:
        """A RowsAnswer as msgpack. Payload in the page cache is read inline, since a thread would
        cost more than the read; the rest is read in a thread."""
        yield found.head
        for rows in _in_pieces(found.rows):
            try:
                piece = self._encode(rows, may_block=False)
            except BlockingIOError:
                piece = await asyncio.to_thread(self._encode, rows, may_block=True)
            yield piece

    def _find(self, row_ids: Sequence[RowId], wanted: RowsQuery) -> list[_LocatedRow]:
        remote, tables = wanted.remote_urls, self._ledger.tables
        local = [str(row_id) for row_id in row_ids if row_id not in remote]
        found: dict[str, _LocatedRow] = {}
        for row_id, blob, segment, offset, length in tables.rows(LOCATIONS_SQL, ids=local):
            if not 0 <= length <= MAX_BLOB_BYTES:
                log.error(
                    "row unavailable", row=row_id, reason=f"invalid payload size of {length} bytes"
                )
                continue
            found[row_id] = _LocatedRow(
                row_id=row_id,
                frame=_frame(
                    row_id, payload=msgspec.Raw(MSGPACK_BIN32 + length.to_bytes(4, "big"))
                ),
                place=Location(segment=segment, offset=offset, length=length),
                blob=blob,
                num_bytes=length,
                is_inline=not blob and length >= MIN_INLINE_BYTES,
            )
        for column in self._columns(local, wanted.columns):
            row = found.get(column.row_id)
            if row is not None:
                row.columns, row.is_inline = (*row.columns, column), False
                row.num_bytes += column.length
        return [
            found.get(row_id)
            or _LocatedRow(
                row_id=row_id, frame=_frame(row_id, at=remote.get(row_id, ""), payload=None)
            )
            for row_id in row_ids
        ]

    def _columns(self, row_ids: list[str], names: Sequence[str]) -> list[ColumnRecord]:
        if not names:
            return []
        return self._ledger.tables.read(
            ColumnRecord, STORED_COLUMNS_SQL, ids=row_ids, names=list(names)
        )

    def _encode(self, rows: Sequence[_LocatedRow], *, may_block: bool) -> bytes | memoryview:
        if rows[0].is_inline:
            return self._encode_inline(rows, may_block=may_block)
        if not may_block:
            raise BlockingIOError
        return b"".join(encode(self._payload(row)) for row in rows)

    def _encode_inline(self, rows: Sequence[_LocatedRow], *, may_block: bool) -> memoryview:
        data = bytearray(sum(len(row.frame) + row.num_bytes for row in rows))
        piece, end = memoryview(data), 0
        for row in rows:
            start, middle = end, end + len(row.frame)
            end = middle + row.num_bytes
            piece[start:middle] = row.frame
            if row.place is None:
                continue
            try:
                self._read_into(row.row_id, row.place, piece[middle:end], may_block=may_block)
                if data.find(row.row_id.encode(), middle, end) < 0:
                    raise _wrong_row(row.row_id)
            except StoreError as error:
                piece[start:end] = _missing_row(row.row_id, error, end - start)
        return piece

    def _read_into(
        self, row_id: RowId, place: Location, payload: memoryview, *, may_block: bool
    ) -> None:
        store = self._ledger.payloads
        if isinstance(store, SegmentPayloads):
            try:
                return store.read_into(place, payload, may_block=may_block)
            except StoreError:
                if not may_block:
                    raise BlockingIOError from None  # a second lookup blocks
        elif not may_block:
            raise BlockingIOError
        payload[:] = self._read(row_id, place)

    def _read(self, row_id: RowId, place: Location) -> bytes:
        try:
            return self._ledger.payloads.read(place)
        except StoreError:
            row = self._ledger.row(row_id)
            if row is None or location_of(row) == place or row.length != place.length:
                raise
            return self._ledger.payloads.read(location_of(row))  # compaction moved it meanwhile

    def _payload(self, row: _LocatedRow) -> RowPayload:
        try:
            assert row.place is not None, "an unavailable row is inline"
            blob, place = row.blob, row.place
            payload = self._blobs.read(blob) if blob else self._read(row.row_id, place)
            if row.row_id.encode() not in payload:
                raise _wrong_row(row.row_id)
            columns = {column.name: self._value(column) for column in row.columns}
            return RowPayload(row_id=row.row_id, payload=payload, columns=columns)
        except (StoreError, NotFound) as error:
            log.error("row unavailable", row=row.row_id, reason=str(error))
            return RowPayload(row_id=row.row_id, payload=None)

    def _value(self, column: ColumnRecord) -> bytes:
        if column.blob:
            return self._blobs.read(column.blob)
        return self._ledger.read_payload(column)


def _in_pieces(found: Sequence[_LocatedRow]) -> Iterator[list[_LocatedRow]]:
    """In order; inline rows and others are never in one piece."""
    rows: list[_LocatedRow] = []
    size = 0
    for row in found:
        if rows and (size >= PIECE_BYTES or row.is_inline is not rows[0].is_inline):
            yield rows
            rows, size = [], 0
        rows.append(row)
        size += row.num_bytes
    if rows:
        yield rows


def _frame(row_id: RowId, *, at: str = "", **last: msgspec.Raw | None) -> bytes:
    return encode({"row_id": row_id, "at": at, "columns": {}, **last})


def _wrong_row(row_id: RowId) -> StoreError:
    return StoreError(f"row {row_id} is damaged: its location holds other bytes")


def _missing_row(row_id: RowId, error: Exception, size: int) -> bytes:
    """A RowPayload without payload, padded to the announced size."""
    log.error("row unavailable", row=row_id, reason=str(error))
    empty = len(_frame(row_id, payload=None, filler=msgspec.Raw(MSGPACK_BIN32 + bytes(4))))
    filler = msgspec.Raw(MSGPACK_BIN32 + (size - empty).to_bytes(4, "big") + bytes(size - empty))
    return _frame(row_id, payload=None, filler=filler)
