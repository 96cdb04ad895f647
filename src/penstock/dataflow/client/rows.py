# SPDX-License-Identifier: Apache-2.0
"""Client of the row service: put and get rows by key, and readers that stream rows and add columns.

    async with RowsClient(url, token) as client:
        scorer = await client.reader("scorer", reads=["turns"], writes=["score"])
        async for row in scorer.stream():
            await row.write(score=judge(row["turns"]))

Moving on to the next row acknowledges the previous one; `break` may end the loop. If a worker
crashes, its rows are delivered again to any worker of that reader; columns are write-once, so
processing a row twice is harmless.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeGuard, TypeVar
from urllib.parse import quote

from penstock.dataflow.client.blobs import INLINE_BYTES, get_blob, put_blob
from penstock.dataflow.client.row_stream import ColumnValue, FetchedRow, RowReader
from penstock.dataflow.columns.cells import MAX_WRITES
from penstock.dataflow.columns.row_leases import ReaderRequest, RowTrigger
from penstock.dataflow.columns.values import (
    BlobRef,
    ColumnStatus,
    FailedColumn,
    RowValues,
    WireValue,
)
from penstock.dataflow.core.leasing import DeliveryStatus
from penstock.dataflow.service.messages import Ack
from penstock.dataflow.service.rows.messages import (
    GetAnswer,
    GetRequest,
    PutAnswer,
    PutRequest,
    PutRow,
    QuotaRequest,
    ReaderState,
)
from penstock.errors import BadRequest, Conflict, NotFound, TooLarge
from penstock.types import RowId
from penstock.wire.client import RETRY_DEADLINE_S, AsyncServiceClient
from penstock.wire.held_token import Token

T = TypeVar("T")
ROWS_PER_CALL = 256
CALL_BYTES = 2 << 20
CALL_CELLS = MAX_WRITES // 2
"""The last row of a call may have as many columns as a row can have."""
MAX_CONCURRENT_CALLS = 4
"""Concurrent calls of one put or get; they may arrive out of order."""


class RowsClient:
    """Rows, spaces and blobs of one dataflow service."""

    def __init__(self, url: str, token: Token, *, patience_s: float = RETRY_DEADLINE_S) -> None:
        """`patience_s`: how long to retry during an outage or while a space is full."""
        self._caller = AsyncServiceClient(url, token)
        self._patience_s = patience_s
        self._readers: list[RowReader] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Return the rows that streams still hold, then disconnect."""
        try:
            for reader in self._readers:
                await reader.leave()
        finally:
            await self._caller.close()

    # --- spaces -------------------------------------------------------------------------------

    async def put(
        self, space: str, rows: Mapping[str, Mapping[str, ColumnValue]]
    ) -> list[ColumnStatus]:
        """Store rows by key; durable on return. Putting the same values again changes nothing. If a
        column already exists with another value, all other columns are stored, then Conflict is
        raised. Returns the columns that already existed."""
        calls = (self._put(space, part) for part in _parts(rows))
        rejected = [outcome for found in await _gather_bounded(calls) for outcome in found]
        conflicts = [one for one in rejected if one.status is DeliveryStatus.CONFLICT]
        if conflicts:
            raise Conflict(f"{len(conflicts)} columns were not stored: {conflicts[0].detail}")
        return rejected

    async def _put(self, space: str, part: Sequence[_NewRow]) -> Sequence[ColumnStatus]:
        made = [
            PutRow(key=RowId(key), columns=await self.pack(row) if is_long else row)
            for key, row, is_long in part
        ]
        body = PutRequest(rows=tuple(made))
        try:
            return (await self.call("POST", _space(space, "/rows"), body, PutAnswer)).rejected
        except TooLarge:  # they exist, each in another bundle
            if len(part) == 1:
                raise
        middle = len(part) // 2
        first = await self._put(space, part[:middle])
        return [*first, *await self._put(space, part[middle:])]

    async def get(
        self, space: str, keys: Sequence[str], columns: Sequence[str] = ()
    ) -> dict[str, FetchedRow]:
        """Read these rows; empty `columns` selects all. Unknown keys are absent from the result."""
        keys = [*dict.fromkeys(keys)]  # the service refuses a key that appears twice in one call
        parts = (keys[n : n + ROWS_PER_CALL] for n in range(0, len(keys), ROWS_PER_CALL))
        calls = (self._get(space, part, tuple(columns)) for part in parts)
        return {row.key: row for found in await _gather_bounded(calls) for row in found}

    async def _get(
        self, space: str, keys: Sequence[str], columns: tuple[str, ...]
    ) -> list[FetchedRow]:
        found: list[FetchedRow] = []
        num_answered = 0
        while num_answered < len(keys):  # a response may cover only some of the keys
            remaining = tuple([RowId(key) for key in keys[num_answered:]])
            body = GetRequest(keys=remaining, columns=columns)
            answer = await self.call("POST", _space(space, "/get"), body, GetAnswer)
            num_answered += len(answer.rows)
            for row in answer.rows:
                if row.exists:
                    values = row.columns
                    if _has_no_blob(values):
                        found.append(FetchedRow(key=row.key, columns=values, failed=row.failed))
                    else:
                        found.append(await self._unpack(row))
        return found

    async def clear(self, space: str) -> None:
        """Remove every row of this space."""
        await self.call("DELETE", _space(space), None, Ack)

    async def set_quota(self, space: str, quota_bytes: int) -> None:
        """Limit the bytes of this space; a put above it is refused."""
        await self.call("PUT", _space(space), QuotaRequest(quota_bytes=quota_bytes), Ack)

    # --- blobs --------------------------------------------------------------------------------

    async def put_blob(self, data: bytes) -> BlobRef:
        """Upload bytes under their digest; resumes an earlier upload of the same bytes."""
        return await put_blob(self._caller, data, deadline_s=self._patience_s)

    async def get_blob(self, ref: BlobRef) -> bytes:
        """The bytes of a blob, checked against their digest."""
        return await get_blob(self._caller, ref, deadline_s=self._patience_s)

    # --- readers ------------------------------------------------------------------------------

    async def reader(
        self,
        name: str,
        *,
        reads: Sequence[str],
        writes: Sequence[str] = (),
        space: str = "train",
        on: RowTrigger = RowTrigger.DELIVERED,
        deadline_s: float = 0.0,
        ttl_s: float = 12.0,
        max_attempts: int = 3,
    ) -> RowReader:
        """Declare a reader, or resume the existing reader of this name."""
        body = ReaderRequest(
            reads=tuple(reads),
            writes=tuple(writes),
            space=space,
            on=on,
            deadline_s=deadline_s,
            ttl_s=ttl_s,
            max_attempts=max_attempts,
        )
        state = await self.call("PUT", f"/v1/readers/{quote(name, safe='')}", body, ReaderState)
        self._readers.append(RowReader(self, state))
        return self._readers[-1]

    # --- used by readers ----------------------------------------------------------------------

    async def call(
        self,
        method: str,
        path: str,
        body: object,
        kind: type[T],
        *,
        patience_s: float | None = None,
        timeout_s: float = 60.0,
    ) -> T:
        """Make one call of the service, with retries; for readers."""
        deadline_s = self._patience_s if patience_s is None else patience_s
        return await self._caller.call(
            method, path, body, kind, deadline_s=deadline_s, timeout_s=timeout_s
        )

    async def pack(self, columns: Mapping[str, ColumnValue]) -> dict[str, WireValue]:
        """Prepare values for sending; long ones are uploaded as blobs."""
        packed: dict[str, WireValue] = {}
        for name, value in columns.items():
            if isinstance(value, bytes) and len(value) > INLINE_BYTES:
                packed[name] = await self.put_blob(value)
            else:
                packed[name] = value
        return packed

    async def _unpack(self, row: RowValues) -> FetchedRow:
        """A blob that is damaged fails its column, and no other."""
        columns: dict[str, ColumnValue] = {}
        failed = dict(row.failed)
        for name, value in row.columns.items():
            if not isinstance(value, BlobRef):
                columns[name] = value
                continue
            try:
                columns[name] = await self.get_blob(value)
            except (BadRequest, NotFound, TooLarge) as error:
                failed[name] = FailedColumn(kind="damaged", detail=str(error))
        return FetchedRow(key=row.key, columns=columns, failed=failed)


def _has_no_blob(columns: Mapping[str, WireValue]) -> TypeGuard[Mapping[str, ColumnValue]]:
    return BlobRef not in map(type, columns.values())


async def _gather_bounded(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order, with up to MAX_CONCURRENT_CALLS calls in flight."""
    running: deque[asyncio.Task[T]] = deque()
    answers: list[T] = []
    try:
        for call in calls:
            running.append(asyncio.create_task(call))
            if len(running) >= MAX_CONCURRENT_CALLS:
                answers.append(await running.popleft())
        while running:
            answers.append(await running.popleft())
        return answers
    finally:
        for task in running:
            task.cancel()


def _space(name: str, what: str = "") -> str:
    return f"/v1/spaces/{quote(name, safe='')}{what}"


_NewRow = tuple[str, Mapping[str, ColumnValue], bool]
"""Key, columns, and whether any of them must be uploaded as a blob."""


def _parts(rows: Mapping[str, Mapping[str, ColumnValue]]) -> Iterable[list[_NewRow]]:
    """Split rows into calls that are small enough not to delay others."""
    part: list[_NewRow] = []
    size = num_cells = 0
    for key, columns in rows.items():
        sizes = [len(value) for value in columns.values() if isinstance(value, bytes)]
        size += sum(sizes)
        num_cells += len(columns)
        part.append((key, columns, max(sizes, default=0) > INLINE_BYTES))
        if len(part) >= ROWS_PER_CALL or size >= CALL_BYTES or num_cells >= CALL_CELLS:
            yield part
            part, size, num_cells = [], 0, 0
    if part:
        yield part
