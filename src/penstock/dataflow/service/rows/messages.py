# SPDX-License-Identifier: Apache-2.0
"""Bodies of the calls about rows, columns, readers, spaces and blobs.

Owns shapes only. Repeating any of these calls is a no-op: columns are write-once, leases are
identified by request id, blobs by digest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta

from penstock.bounds import Count, Id, SafeName, Seconds
from penstock.dataflow.columns.row_leases import Claim, LeasedRow, LeaseOutcome, ReaderSpec
from penstock.dataflow.columns.values import ColumnStatus, RowValues, WireValue
from penstock.dataflow.core.leasing import DeliveryStatus
from penstock.errors import BadRequest
from penstock.types import RowId
from penstock.wire.codec import decode

MANY = Meta(max_length=100_000)
"""Of names of rows in one call; handlers allow fewer, by the work that a row is."""
MAX_ROWS = 4_096
"""Of other calls about rows; more would block the event loop."""
MAX_CELLS = 65_536
"""Columns of all rows in one call: each is hashed and compared with what is stored."""
MAX_OTHER_BYTES = 2 << 20
"""Of a call, beside the columns and errors of its rows: unknown and repeated fields are there."""
ColumnName = Annotated[str, Meta(max_length=128)]

# --- readers ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderState(ReaderSpec):
    """A reader and its progress."""

    cursor: int
    """Every row up to this arrival is finished."""
    num_loaded: int
    """Unfinished rows in memory; more may wait on disk."""
    num_leased: int
    has_worker: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadersAnswer:
    readers: tuple[ReaderState, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLeaseRequest:
    """`POST /v1/readers/{name}/leases`: lease up to n rows; held open while there are none."""

    request_id: Id
    """A repeated request gets the same rows, so a lost response loses nothing."""
    worker: Id
    max_rows: Count
    wait_s: Seconds = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLeaseAnswer:
    rows: tuple[LeasedRow, ...]
    ttl_s: float
    """Extend or finish each lease within this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendRequest:
    """`PUT /v1/readers/{name}/leases`: keep these leases."""

    claims: Annotated[tuple[Claim, ...], MANY]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendAnswer:
    lost: tuple[RowId, ...]
    """Leases given to other workers or ended; stop working on them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    claim: Claim
    columns: Annotated[Mapping[ColumnName, WireValue], Meta(max_length=1024)] = field(
        default_factory=dict[str, WireValue]
    )
    failed: Annotated[Mapping[ColumnName, Id], Meta(max_length=1024)] = field(
        default_factory=dict[str, str]
    )
    """Columns that will never have a value, with the kind of failure."""
    end: LeaseOutcome = LeaseOutcome.NONE
    error: Annotated[str, Meta(max_length=1 << 20)] = ""
    """The ledger keeps its first 2,000 characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultsRequest:
    """`PUT /v1/rows/columns`: a worker's results for its leased rows."""

    reader: SafeName
    worker: Id
    results: Annotated[tuple[RowResult, ...], Meta(max_length=MAX_ROWS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteStatus:
    status: DeliveryStatus
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResultStatus:
    row_id: RowId
    columns: Mapping[str, WriteStatus]
    end: WriteStatus
    """Result for the lease; `fenced` when it had already ended. Stored columns stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultsAnswer:
    outcomes: tuple[RowResultStatus, ...]
    durability: str = "D1"


# --- spaces -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaRequest:
    """`PUT /v1/spaces/{space}`."""

    quota_bytes: Count
    """0 for no separate limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceState:
    name: str
    used_bytes: int
    quota_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpacesAnswer:
    spaces: tuple[SpaceState, ...]


class PutRow(msgspec.Struct, frozen=True, kw_only=True):
    key: RowId
    columns: Annotated[Mapping[ColumnName, WireValue], Meta(max_length=1024)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PutRequest:
    """`POST /v1/spaces/{space}/rows`. An existing key gets the columns it lacks."""

    rows: Annotated[tuple[PutRow, ...], Meta(max_length=MAX_ROWS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PutAnswer:
    rejected: tuple[ColumnStatus, ...]
    """Duplicates and conflicts; every other column is stored now."""
    durability: str = "D1"


@dataclass(frozen=True, slots=True, kw_only=True)
class GetRequest:
    """`POST /v1/spaces/{space}/get`."""

    keys: Annotated[tuple[RowId, ...], MANY]
    columns: Annotated[tuple[ColumnName, ...], Meta(max_length=1024)] = ()
    """Empty for all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GetAnswer:
    rows: tuple[RowValues, ...]
    """Rows of the first requested keys, in request order; at least one. Request the rest again."""


# --- before a call is decoded -----------------------------------------------------------------


NO_ROWS = msgspec.Raw(b"\x90")


class _RowOutline(msgspec.Struct):
    columns: msgspec.Raw = msgspec.Raw()
    failed: msgspec.Raw = msgspec.Raw()
    error: msgspec.Raw = msgspec.Raw()


class _Outline(msgspec.Struct):
    """Of ResultsRequest and PutRequest. Each has one of these lists, which is read when all else is
    known to be short: it may stand there again and again."""

    results: msgspec.Raw = NO_ROWS
    rows: msgspec.Raw = NO_ROWS


_RowOutlines: type[list[_RowOutline]] = cast(
    Any, Annotated[list[_RowOutline], Meta(max_length=MAX_ROWS)]
)


def check_cells(body: bytes) -> None:
    """Raise BadRequest for too many columns before one of them is made: 32 MB of them take two
    seconds."""
    found = decode(body, _Outline)
    lists = [memoryview(found.results), memoryview(found.rows)]
    _require_few_others(len(body) - sum(map(len, lists)))
    rows = [row for some in lists for row in decode(some, _RowOutlines)]
    parts = [memoryview(part) for row in rows for part in (row.columns, row.failed, row.error)]
    num_cells = sum(map(_num_pairs, parts))
    if num_cells > MAX_CELLS:
        raise BadRequest(
            f"{num_cells} columns of {len(rows)} rows in one call; at most {MAX_CELLS} together "
            "are allowed: send fewer rows in each call"
        )
    _require_few_others(len(body) - sum(map(len, parts)))


def _require_few_others(num_bytes: int) -> None:
    if num_bytes > MAX_OTHER_BYTES:
        raise BadRequest(f"{num_bytes} bytes beside columns; at most {MAX_OTHER_BYTES} in one call")


def _num_pairs(value: memoryview) -> int:
    """Of a msgpack map; 0 for anything else."""
    kind = value[0] if value else 0
    if 0x80 <= kind <= 0x8F:
        return kind & 0x0F
    width = {0xDE: 2, 0xDF: 4}.get(kind, 0)
    return int.from_bytes(value[1 : 1 + width], "big")


# --- blobs ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobState:
    """`GET /v1/blobs/{digest}/state`, and the answer to each piece of an upload."""

    held_bytes: int
    """Continue the upload at this offset."""
    complete: bool
