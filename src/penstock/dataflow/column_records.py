# SPDX-License-Identifier: Apache-2.0
"""What the ledger keeps of rows beyond their delivery: columns, readers and their leases, spaces
and what users put into them by key. Records as in `records`, which lists them all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from penstock.types import RowId


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnRecord:
    """One write-once field of a row: a value, or the reason why there will be none."""

    TABLE: ClassVar[str] = "columns"
    KEY: ClassVar[tuple[str, ...]] = ("space", "row_id", "name")

    space: str
    row_id: RowId
    name: str
    failed: str
    """Kind of failure, empty for a value."""
    value: float | None
    """Of a column that is one number; such columns travel in reports and manifests."""
    digest: str
    segment: int
    offset: int
    length: int
    """Where other values lie in the payload store; length 0 for none."""
    writer: str
    at: float
    blob: str = ""
    """Digest of the claim-checked blob that holds the value, of `length` bytes; segment is then
    0."""
    detail: str = ""
    """Of a failure, for people: the last error."""


STORED_COLUMNS_SQL = "space = 'train' AND row_id IN :ids AND name IN :names AND digest != ''"
"""Columns of rollout rows that lie in the payload store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderRecord:
    """A named reader of rows, with its own cursor: a stage that adds columns, an exporter."""

    TABLE: ClassVar[str] = "readers"
    KEY: ClassVar[tuple[str, ...]] = ("name",)

    name: str
    space: str
    reads: str
    """JSON list of the columns a row must have."""
    writes: str
    """JSON list of the columns it adds."""
    on: str
    """`delivered` or `admitted`."""
    deadline_s: float
    """After which columns it did not write are failed(overdue); 0 for never."""
    ttl_s: float
    max_attempts: int
    cursor: int
    """Every row up to this arrival is done with."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLeaseRecord:
    """A row beyond a reader's cursor that was handed out."""

    TABLE: ClassVar[str] = "row_leases"
    KEY: ClassVar[tuple[str, ...]] = ("reader", "row_id")

    reader: str
    row_id: RowId
    arrival: int
    epoch: int
    attempt: int
    worker: str
    request_id: str
    state: str
    """`leased`, `waiting` (given back or expired), `done`, `dead`."""
    at: float
    error: str = ""
    """Why the last attempt came to nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleRecord:
    """Rows that users put by key in one call with the same columns: one record for all of them.
    Its commit also says in `items` where each key is."""

    TABLE: ClassVar[str] = "bundles"
    KEY: ClassVar[tuple[str, ...]] = ("space", "arrival")

    space: str
    arrival: int
    """Of its first row; the others follow one by one."""
    num_cells: int
    names: str
    """JSON list of the columns that every row has in here."""
    keys: str
    """JSON list, in order of arrival."""
    contents: bytes
    """msgpack: sizes and digests of their values, and numbers themselves."""
    segment: int
    offset: int
    length: int
    """Where the values lie in the payload store, one after another; in segment 0 for those that are
    here."""
    writer: str
    at: float
    payload: bytes = b""
    """The values themselves when they are short: one sync makes them durable, not two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemRecord:
    """Where a row is found that a user put by key into a space. Follows from its bundle, whose keys
    tell if it is wrong."""

    TABLE: ClassVar[str] = "items"
    KEY: ClassVar[tuple[str, ...]] = ("space", "row_id")

    space: str
    row_id: RowId
    """The user's key."""
    arrival: int
    at: float
    bundle: int = 0
    """Arrival of the first row of its bundle; 0 when all its columns are in `columns`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceRecord:
    """A named set of rows, bounded and clearable alone."""

    TABLE: ClassVar[str] = "spaces"
    KEY: ClassVar[tuple[str, ...]] = ("name",)

    name: str
    quota_bytes: int
    """0 for no limit of its own."""
    at: float
