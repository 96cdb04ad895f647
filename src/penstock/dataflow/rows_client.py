# SPDX-License-Identifier: Apache-2.0
"""Rows for programs: put and get by key, and readers that stream rows and add columns.

    async with RowsClient(url, token) as client:
        scorer = await client.reader("scorer", reads=["turns"], writes=["score"])
        async for row in scorer.stream():
            await row.write(score=judge(row["turns"]))

Reaching the next row acknowledges the one before. A row whose worker dies comes again, to any
worker of that reader; columns are write-once, so working on it twice changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar
from urllib.parse import quote

from penstock.dataflow.blob_client import INLINE_BYTES, get_blob, put_blob
from penstock.dataflow.protocol import DeliveryStatus, Done
from penstock.dataflow.row_protocol import (
    BlobRef,
    ColumnOutcome,
    FailedColumn,
    GetAnswer,
    GetRequest,
    PutAnswer,
    PutRequest,
    PutRow,
    QuotaRequest,
    ReaderRequest,
    ReaderState,
    RowValues,
    Value,
)
from penstock.dataflow.row_stream import Data, RowReader
from penstock.dataflow.takes import On
from penstock.errors import Conflict
from penstock.types import RowId
from penstock.wire.client import OUTAGE_S, AsyncCaller

T = TypeVar("T")
ROWS_PER_CALL = 256
CALL_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class GotRow:
    key: RowId
    columns: Mapping[str, Data]
    """Those that are there; a column nobody wrote yet is absent."""
    failed: Mapping[str, FailedColumn]


class RowsClient:
    """Rows, spaces and blobs of one dataflow service."""

    def __init__(self, url: str, token: str, *, patience_s: float = OUTAGE_S) -> None:
        """patience_s: how long an outage, or a space that is full, is sat out."""
        self._caller = AsyncCaller(url, token)
        self._patience_s = patience_s

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
        await self._caller.close()

    # --- spaces -------------------------------------------------------------------------------

    async def put(self, space: str, rows: Mapping[str, Mapping[str, Data]]) -> list[ColumnOutcome]:
        """Rows by key, durable when this returns. Putting the same again changes nothing; a
        column that stands with another value raises Conflict, and all others are stored."""
        refused: list[ColumnOutcome] = []
        for part in _parts(rows):
            body = PutRequest(
                rows=tuple([PutRow(key=RowId(k), columns=await self.pack(row)) for k, row in part])
            )
            path = _space(space, "/rows")
            answer = await self.call("POST", path, body, PutAnswer)
            refused += answer.not_stored
        conflicts = [one for one in refused if one.status is DeliveryStatus.CONFLICT]
        if conflicts:
            raise Conflict(f"{len(conflicts)} columns were not stored: {conflicts[0].detail}")
        return refused

    async def get(
        self, space: str, keys: Sequence[str], columns: Sequence[str] = ()
    ) -> dict[str, GotRow]:
        """Columns of these rows, all of them when none are named. Unknown keys are absent."""
        found: dict[str, GotRow] = {}
        start = 0
        while start < len(keys):
            asked = tuple(RowId(key) for key in keys[start : start + ROWS_PER_CALL])
            body = GetRequest(keys=asked, columns=tuple(columns))
            answer = await self.call(
                "POST", f"/v1/spaces/{quote(space, safe='')}/get", body, GetAnswer
            )
            for values in answer.rows:
                if values.is_known:
                    found[values.key] = await self._unpack(values)
            start += len(answer.rows)
        return found

    async def clear(self, space: str) -> None:
        """Remove every row of this space."""
        await self.call("DELETE", _space(space), None, Done)

    async def set_quota(self, space: str, quota_bytes: int) -> None:
        await self.call(
            "PUT",
            _space(space),
            QuotaRequest(quota_bytes=quota_bytes),
            Done,
        )

    # --- blobs --------------------------------------------------------------------------------

    async def put_blob(self, data: bytes) -> BlobRef:
        return await put_blob(self._caller, data, deadline_s=self._patience_s)

    async def get_blob(self, ref: BlobRef) -> bytes:
        return await get_blob(self._caller, ref, deadline_s=self._patience_s)

    # --- readers ------------------------------------------------------------------------------

    async def reader(
        self,
        name: str,
        *,
        reads: Sequence[str],
        writes: Sequence[str] = (),
        space: str = "train",
        on: On = On.DELIVERED,
        deadline_s: float = 0.0,
        ttl_s: float = 12.0,
        max_attempts: int = 3,
    ) -> RowReader:
        """Declare a reader, or go on with one of this name where it stopped."""
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
        return RowReader(self, state)

    # --- for the readers of this client -------------------------------------------------------

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
        deadline_s = self._patience_s if patience_s is None else patience_s
        return await self._caller.call(
            method, path, body, kind, deadline_s=deadline_s, timeout_s=timeout_s
        )

    async def pack(self, columns: Mapping[str, Data]) -> dict[str, Value]:
        """As it goes over the wire: what is long goes ahead as a blob."""
        packed: dict[str, Value] = {}
        for name, value in columns.items():
            if isinstance(value, bytes) and len(value) > INLINE_BYTES:
                packed[name] = await self.put_blob(value)
            else:
                packed[name] = value
        return packed

    async def _unpack(self, values: RowValues) -> GotRow:
        columns: dict[str, Data] = {}
        for name, value in values.columns.items():
            columns[name] = await self.get_blob(value) if isinstance(value, BlobRef) else value
        return GotRow(key=values.key, columns=columns, failed=values.failed)


def _space(name: str, what: str = "") -> str:
    return f"/v1/spaces/{quote(name, safe='')}{what}"


def _parts(
    rows: Mapping[str, Mapping[str, Data]],
) -> Iterable[list[tuple[str, Mapping[str, Data]]]]:
    """Calls of a size that holds nobody up."""
    part: list[tuple[str, Mapping[str, Data]]] = []
    size = 0
    for key, columns in rows.items():
        part.append((key, columns))
        size += sum(len(value) for value in columns.values() if isinstance(value, bytes))
        if len(part) >= ROWS_PER_CALL or size >= CALL_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part
