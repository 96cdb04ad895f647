# SPDX-License-Identifier: Apache-2.0
"""Bodies of the calls about rows, columns, readers, spaces and blobs.

Owns shapes only. Repeating any of these calls changes nothing: columns are write-once, leases go
by request id, blobs by digest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from penstock.dataflow.columns.row_leases import Claim, RowTrigger
from penstock.dataflow.columns.values import RowValues, WireValue
from penstock.dataflow.core.leasing import DeliveryStatus
from penstock.types import RowId

# --- readers ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderRequest:
    """`PUT /v1/readers/{name}`: be there, with these terms. Known readers keep their cursor."""

    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()
    space: str = "train"
    on: RowTrigger = RowTrigger.DELIVERED
    deadline_s: float = 0.0
    ttl_s: float = 12.0
    max_attempts: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderState:
    """Where a reader stands."""

    name: str
    space: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    on: RowTrigger
    deadline_s: float
    ttl_s: float
    max_attempts: int
    cursor: int
    """Every row up to this arrival is done with."""
    num_loaded: int
    """Unfinished rows in memory; more may wait on disk."""
    num_leased: int
    has_worker: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadersAnswer:
    readers: tuple[ReaderState, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLeaseRequest:
    """`POST /v1/readers/{name}/leases`: up to n rows; held open while there are none."""

    request_id: str
    """A repeated request gets the same rows, so an answer lost on the way loses nothing."""
    worker: str
    max_rows: int
    wait_s: float = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedRow:
    claim: Claim
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLeaseAnswer:
    rows: tuple[LeasedRow, ...]
    ttl_s: float
    """Extend or finish each lease within this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendRequest:
    """`PUT /v1/readers/{name}/leases`: still at work on these."""

    claims: tuple[Claim, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendAnswer:
    lost: tuple[RowId, ...]
    """Given to others or over; stop working on them."""


class LeaseOutcome(StrEnum):
    NONE = "none"
    """Columns only; the lease goes on."""
    DONE = "done"
    FAILED = "failed"
    """Costs an attempt."""
    RELEASED = "released"
    """Handed back; costs none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    claim: Claim
    columns: Mapping[str, WireValue] = field(default_factory=dict[str, WireValue])
    failed: Mapping[str, str] = field(default_factory=dict[str, str])
    """Columns that will never have a value, with the kind of failure."""
    end: LeaseOutcome = LeaseOutcome.NONE
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultsRequest:
    """`PUT /v1/rows/columns`: what a worker found out about rows it holds."""

    reader: str
    worker: str
    results: tuple[RowResult, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteStatus:
    status: DeliveryStatus
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResultStatus:
    row_id: RowId
    columns: Mapping[str, WriteStatus]
    end: WriteStatus
    """Of the lease; `fenced` when it had ended before, which loses nothing that is stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultsAnswer:
    outcomes: tuple[RowResultStatus, ...]
    durability: str = "D1"


# --- spaces -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaRequest:
    """`PUT /v1/spaces/{space}`."""

    quota_bytes: int
    """0 for no limit of its own."""


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
    columns: Mapping[str, WireValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class PutRequest:
    """`POST /v1/spaces/{space}/rows`. A key that is there gets the columns it does not have."""

    rows: tuple[PutRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnStatus:
    key: RowId
    name: str
    status: DeliveryStatus
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PutAnswer:
    rejected: tuple[ColumnStatus, ...]
    """Duplicates and conflicts; every other column is stored now."""
    durability: str = "D1"


@dataclass(frozen=True, slots=True, kw_only=True)
class GetRequest:
    """`POST /v1/spaces/{space}/get`."""

    keys: tuple[RowId, ...]
    columns: tuple[str, ...] = ()
    """Empty for all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GetAnswer:
    rows: tuple[RowValues, ...]
    """The first of the keys asked for, in their order; at least one. Ask again for the rest."""


# --- blobs ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobState:
    """`GET /v1/blobs/{digest}/state`, and the answer to each piece of an upload."""

    held_bytes: int
    """Go on from here."""
    complete: bool
