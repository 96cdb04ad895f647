# SPDX-License-Identifier: Apache-2.0
"""Ledger records about rows after their delivery: columns, readers and their leases, spaces, and
rows that users put by key. `records` lists them all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from penstock.types import RowId


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnRecord:
    """One write-once field of a row: a value, or the reason why it has none."""

    TABLE: ClassVar[str] = "columns"
    KEY: ClassVar[tuple[str, ...]] = ("space", "row_id", "name")

    space: str
    row_id: RowId
    name: str
    failed: str
    """Kind of failure; empty for a value."""
    value: float | None
    """Set for a column that is a single number; such columns travel in reports and manifests."""
    digest: str
    segment: int
    offset: int
    length: int
    """Location of other values in the payload store; length 0 for none."""
    writer: str
    at: float
    blob: str = ""
    """Digest of the claim-checked blob that holds the value, `length` bytes long; segment is then
    0."""
    detail: str = ""
    """The last error, for people."""


STORED_COLUMNS_SQL = "space = 'train' AND row_id IN :ids AND name IN :names AND digest != ''"
"""Columns of rollout rows that are in the payload store."""


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
    """Time after which columns it did not write become failed(overdue); 0 for never."""
    ttl_s: float
    max_attempts: int
    cursor: int
    """All rows up to this arrival are finished."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLeaseRecord:
    """A row beyond a reader's cursor that was leased at least once."""

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
    """`leased`, `waiting` (handed back or expired), `done`, `dead`."""
    at: float
    error: str = ""
    """Why the last attempt failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleRecord:
    """Rows that a user put by key in one call with the same columns: one record for all of them.
    The same commit writes the location of each key to `items`."""

    TABLE: ClassVar[str] = "bundles"
    KEY: ClassVar[tuple[str, ...]] = ("space", "arrival")

    space: str
    arrival: int
    """Arrival of its first row; the others follow one by one."""
    num_cells: int
    names: str
    """JSON list of the columns that every row has in this bundle."""
    keys: str
    """JSON list, in order of arrival."""
    contents: bytes
    """msgpack: sizes and digests of the values, and the values themselves if they are numbers."""
    segment: int
    offset: int
    length: int
    """Location of the values in the payload store, one after another; segment 0 if they are in
    `payload`."""
    writer: str
    at: float
    payload: bytes = b""
    """The values themselves if they are short: one sync makes them durable instead of two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemRecord:
    """Location of a row that a user put by key into a space. Derived from its bundle, whose keys
    reveal a wrong entry."""

    TABLE: ClassVar[str] = "items"
    KEY: ClassVar[tuple[str, ...]] = ("space", "row_id")

    space: str
    row_id: RowId
    """The user's key."""
    arrival: int
    at: float
    bundle: int = 0
    """Arrival of the first row of its bundle; 0 if all its columns are in `columns`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceRecord:
    """A named set of rows with its own quota; can be cleared separately."""

    TABLE: ClassVar[str] = "spaces"
    KEY: ClassVar[tuple[str, ...]] = ("name",)

    name: str
    quota_bytes: int
    """0 for no separate limit."""
    at: float
