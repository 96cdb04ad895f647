# SPDX-License-Identifier: Apache-2.0
"""A worker of a reader: streams rows and renews their leases while it works.

Stateless across restarts: a row that it did not finish is delivered again, to it or to another
worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar
from urllib.parse import quote

import msgspec
import structlog

from penstock.dataflow.columns.row_leases import LeasedRow, LeaseOutcome
from penstock.dataflow.columns.values import FailedColumn, WireValue
from penstock.dataflow.core.leasing import DeliveryStatus
from penstock.dataflow.service.rows.messages import (
    ExtendAnswer,
    ExtendRequest,
    ReaderState,
    ResultsAnswer,
    ResultsRequest,
    RowLeaseAnswer,
    RowLeaseRequest,
    RowResult,
    RowResultStatus,
)
from penstock.errors import BadRequest, WireError
from penstock.types import RowId, Trajectory
from penstock.wire.codec import decode

T = TypeVar("T")

log = structlog.get_logger(__name__)

ColumnValue = float | bytes
"""The value of a column, of any size."""
WAIT_S = 20.0
LEAVE_S = 3.0
"""A leaving worker does not wait longer to return its rows; the leases expire anyway."""


class FetchedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row as returned by `RowsClient.get`, with blobs resolved."""

    key: RowId
    columns: Mapping[str, ColumnValue]
    """Existing columns; a column that was not written yet is absent."""
    failed: Mapping[str, FailedColumn]


class RowCalls(Protocol):
    """The client methods that a reader uses."""

    async def get(
        self, space: str, keys: Sequence[str], columns: Sequence[str] = ()
    ) -> dict[str, FetchedRow]: ...
    async def call(
        self,
        method: str,
        path: str,
        body: object,
        kind: type[T],
        *,
        patience_s: float | None = None,
        timeout_s: float = 60.0,
    ) -> T: ...
    async def pack(self, columns: Mapping[str, ColumnValue]) -> dict[str, WireValue]: ...


class Row:
    """One leased row. Write its columns or fail it; moving on to the next row finishes it."""

    def __init__(
        self, reader: RowReader, leased: LeasedRow, columns: Mapping[str, ColumnValue]
    ) -> None:
        self.key = leased.claim.row_id
        self.attempt = leased.attempt
        """1 for the first attempt."""
        self.columns = columns
        self.claim = leased.claim
        self.is_finished = False
        """Finished, returned, or revoked by the service."""
        self._reader = reader
        self._unwritten = set(reader.state.writes)

    def __getitem__(self, name: str) -> ColumnValue:
        return self.columns[name]

    def trajectory(self) -> Trajectory:
        """The trajectory of a rollout row; the reader must read `turns`."""
        turns = self.columns["turns"]
        assert isinstance(turns, bytes), "turns are bytes"
        return decode(turns, Trajectory)

    async def write(self, **columns: ColumnValue) -> bool:
        """Write columns; durable on return. Returns False if the row was reassigned to another
        worker: that worker's values are kept, and the stream continues."""
        is_last = self._unwritten <= columns.keys()
        outcome = await self._reader.send(
            RowResult(
                claim=self.claim,
                columns=await self._reader.client.pack(columns),
                end=LeaseOutcome.DONE if is_last else LeaseOutcome.NONE,
            )
        )
        for name, stored in outcome.columns.items():
            if stored.status is DeliveryStatus.INVALID:
                raise BadRequest(f"column {name!r} of row {self.key!r}: {stored.detail}")
            if stored.status not in (DeliveryStatus.STORED, DeliveryStatus.DUPLICATE):
                log.warning("row lost to another worker", row=self.key, why=stored.detail)
                self.is_finished = True
                return False
        self._unwritten -= columns.keys()
        self.is_finished = self.is_finished or is_last
        return True

    async def done(self) -> None:
        """Finish the row. `RowReader.stream` does this before the next row."""
        if self._unwritten and not self.is_finished:
            missing = sorted(self._unwritten)
            raise BadRequest(
                f"row {self.key!r} was left without {missing}; write these columns, or call fail() "
                "or release()"
            )
        await self._end(LeaseOutcome.DONE)

    async def fail(self, error: str) -> None:
        """The attempt failed; it counts against `max_attempts`."""
        await self._end(LeaseOutcome.FAILED, error)

    async def release(self) -> None:
        """Return the row to other workers; this does not count as an attempt."""
        await self._end(LeaseOutcome.RELEASED)

    async def _end(self, end: LeaseOutcome, error: str = "") -> None:
        if not self.is_finished:
            self.is_finished = True
            await self._reader.send(RowResult(claim=self.claim, end=end, error=error))


@dataclass(slots=True, eq=False)
class _OpenStream:
    """The rows that one stream holds, until it is left."""

    extender: asyncio.Task[None]
    held: list[Row]
    current: Row | None = None
    """The row that the caller works on."""
    leaving: asyncio.Lock = field(default_factory=asyncio.Lock)
    """A stream that is left while its client closes must not release its rows twice."""


class RowReader:
    """One worker of a reader. Start as many as needed, on any machine."""

    def __init__(self, client: RowCalls, state: ReaderState) -> None:
        self.client = client
        self.state = state
        self.worker = uuid.uuid4().hex[:16]
        self._path = f"/v1/readers/{quote(state.name, safe='')}/leases"
        self._open: list[_OpenStream] = []

    async def stream(self, *, max_rows: int = 16) -> AsyncGenerator[Row]:
        """Endless stream of rows in order of arrival; waits while there are none. Leases up to
        `max_rows` at a time.

        Leaving the loop inside a row counts as a failed attempt, since the row may be the cause;
        rows not reached yet are returned.
        """
        held: list[Row] = []
        extender = asyncio.create_task(self._extend_leases(held), name=f"keep {self.state.name}")
        stream = _OpenStream(extender=extender, held=held)
        self._open.append(stream)
        try:
            while True:
                held += await self.lease(max_rows)
                while held:
                    if not held[0].is_finished:  # otherwise lost while queued
                        stream.current = held[0]
                        yield held[0]
                        await held[0].done()
                    stream.current = None
                    held.pop(0)
        finally:
            await self._leave(stream)

    async def leave(self) -> None:
        """End every stream of this worker, as leaving its loop does. Closing the client calls this:
        after `break`, Python ends a stream only some time later."""
        for stream in [*self._open]:
            await self._leave(stream)

    async def _leave(self, stream: _OpenStream) -> None:
        stream.extender.cancel()
        async with stream.leaving:
            await self._release_all(stream.current, stream.held)
            if stream in self._open:
                self._open.remove(stream)

    async def lease(self, max_rows: int) -> list[Row]:
        """Lease at least one row, with the columns that the reader reads; polls until there is
        one."""
        leased: tuple[LeasedRow, ...] = ()
        while not leased:
            body = RowLeaseRequest(
                request_id=uuid.uuid4().hex, worker=self.worker, max_rows=max_rows, wait_s=WAIT_S
            )
            answer = await self.client.call(
                "POST", self._path, body, RowLeaseAnswer, timeout_s=WAIT_S + 15.0
            )
            leased = answer.rows
        keys = [row.claim.row_id for row in leased]
        found = await self.client.get(self.state.space, keys, self.state.reads or ("",))
        rows: list[Row] = []
        for one in leased:
            got = found.get(one.claim.row_id)
            row = Row(self, one, {} if got is None else got.columns)
            missing = set(self.state.reads) - row.columns.keys()
            if missing:  # freed in the meantime, or damaged on disk
                await row.fail(f"columns {sorted(missing)} cannot be read")
            else:
                rows.append(row)
        return rows

    async def keep(self, rows: Sequence[Row]) -> None:
        """Renew the leases of these rows until cancelled; for callers of `lease`."""
        await self._extend_leases(rows)

    async def send(self, result: RowResult, patience_s: float | None = None) -> RowResultStatus:
        body = ResultsRequest(reader=self.state.name, worker=self.worker, results=(result,))
        path = "/v1/rows/columns"
        answer = await self.client.call("PUT", path, body, ResultsAnswer, patience_s=patience_s)
        return answer.outcomes[0]

    async def _extend_leases(self, held: Sequence[Row]) -> None:
        """consumes: time · produces: renewed leases · waits for: a third of the ttl"""
        while True:
            await asyncio.sleep(self.state.ttl_s / 3)
            claims = tuple(row.claim for row in held if not row.is_finished)
            if not claims:
                continue
            try:
                body = ExtendRequest(claims=claims)
                answer = await self.client.call(
                    "PUT", self._path, body, ExtendAnswer, patience_s=self.state.ttl_s
                )
            except WireError as error:  # expired rows are delivered again
                log.warning("lease renewal failed", reader=self.state.name, why=str(error))
                continue
            for row in held:
                row.is_finished = row.is_finished or row.key in answer.lost

    async def _release_all(self, current: Row | None, held: Iterable[Row]) -> None:
        for row in held:
            if row.is_finished:
                continue
            end = LeaseOutcome.FAILED if row is current else LeaseOutcome.RELEASED
            error = "the worker left the loop while processing this row" if current else ""
            row.is_finished = True
            result = RowResult(claim=row.claim, end=end, error=error)
            with contextlib.suppress(WireError):  # the leases expire anyway
                await self.send(result, patience_s=LEAVE_S)
