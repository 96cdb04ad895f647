# SPDX-License-Identifier: Apache-2.0
"""Spaces: named sets of rows that users put by key. Each has its own quota and can be cleared
separately.

Owns quotas and keys. The space `train` holds the rollout rows and is read-only here.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from penstock.dataflow.column_records import ColumnRecord, SpaceRecord
from penstock.dataflow.columns.bundles import BundleDraft, Values
from penstock.dataflow.columns.cells import MAX_WRITES, Cell, compare_write
from penstock.dataflow.columns.column_store import COLUMN_BYTES, Columns
from penstock.dataflow.columns.row_window import RowWindow
from penstock.dataflow.columns.values import ColumnStatus
from penstock.dataflow.core.names import RESERVED, TRAIN
from penstock.dataflow.ledger.tables import Tables
from penstock.dataflow.records import Journal
from penstock.errors import BadRequest, Forbidden, NotFound, StorageFull
from penstock.types import RowId

RETRY_S = 1.0


class Spaces:
    def __init__(self, row_window: RowWindow, columns: Columns, journal: Journal) -> None:
        self._row_window = row_window
        self._columns = columns
        self._journal = journal
        self.records: dict[str, SpaceRecord] = {}

    def restore(self, tables: Tables) -> None:
        self.records = {record.name: record for record in tables.read(SpaceRecord)}
        self._columns.restore()

    def set_quota(self, name: str, quota_bytes: int, now: float) -> None:
        """Applies to later puts; existing rows stay."""
        check_name(name)
        if quota_bytes < 0:
            raise BadRequest(f"quota_bytes is {quota_bytes}; it must be >= 0 (0 means no quota)")
        self.records[name] = SpaceRecord(name=name, quota_bytes=quota_bytes, at=now)
        self._journal(self.records[name])

    def put(
        self, name: str, drafts: Sequence[BundleDraft], writer: str, now: float
    ) -> list[ColumnStatus]:
        """Store all rows, or raise StorageFull and store none. Returns the columns that already
        existed; an existing column is never changed."""
        check_name(name)
        if name == TRAIN:
            raise Forbidden("space 'train' only receives rollouts; put rows into another space")
        rows = {key: values for draft in drafts for key, values in draft.rows}
        _check_rows(rows, drafts)
        row_positions = self._columns.row_positions(name, [*rows])
        _require_few_writes(drafts, row_positions)
        cells = {
            key: draft.cells(key, values)
            for draft in (drafts if row_positions else ())
            for key, values in draft.rows
            if key in row_positions
        }
        existing = self._columns.existing_of_rows(
            name, {key: frozenset([cell.name for cell in row]) for key, row in cells.items()}
        )
        if cells:
            drafts = [fresh for draft in drafts for fresh in draft.without(cells)]
        missing = [c for key in cells for c in cells[key] if (key, c.name) not in existing]
        self._require_room(name, drafts, missing)
        if name not in self.records:
            self.set_quota(name, 0, now)
        for draft in drafts:
            self._add(name, draft, writer, now)
        return [
            rejected
            for key, row in cells.items()
            for rejected in self._complete(name, key, row, existing, writer, now)
        ]

    def _add(self, name: str, draft: BundleDraft, writer: str, now: float) -> None:
        first = self._row_window.next_arrival(len(draft.rows))
        self._columns.add(name, draft, first, writer, now)
        self._row_window.add_rows(name, draft.keys, first, draft.names, now)

    def _complete(
        self,
        name: str,
        key: RowId,
        cells: Iterable[Cell],
        existing: Mapping[tuple[RowId, str], ColumnRecord],
        writer: str,
        now: float,
    ) -> Iterable[ColumnStatus]:
        """Add the missing columns to an existing row."""
        for cell in cells:
            current = existing.get((key, cell.name))
            if current is None:
                self._row_window.complete(name, key, cell, writer, now)
            else:
                status, detail = compare_write(current, cell)
                yield ColumnStatus(key=key, name=cell.name, status=status, detail=detail)

    def _require_room(
        self, name: str, drafts: Iterable[BundleDraft], cells: Iterable[Cell]
    ) -> None:
        record = self.records.get(name)
        quota = 0 if record is None else record.quota_bytes
        if not quota:
            return
        used = self._columns.used_bytes.get(name, 0)
        needed = sum(cell.length + COLUMN_BYTES for cell in cells)
        needed += sum(draft.quota_bytes_used(COLUMN_BYTES) for draft in drafts)
        if needed and used + needed > quota:
            raise StorageFull(
                f"space {name!r} uses {used} of {quota} bytes and this call needs {needed} more; "
                f"clear it (DELETE /v1/spaces/{name}) or raise its quota (PUT /v1/spaces/{name})",
                retry_after_s=RETRY_S,
            )

    def clear(self, name: str) -> None:
        """Delete all rows of this space. The caller must reject puts until this is durable."""
        check_name(name)
        if name == TRAIN:
            raise Forbidden("space 'train' cannot be cleared; the run frees its rows automatically")
        if name not in self.records:
            raise NotFound(f"no space {name!r}; the first put creates a space")
        self._row_window.clear(name)
        self._columns.clear(name)


def check_name(name: str) -> None:
    is_plain = all(c.isascii() and (c.isalnum() or c in "._-") for c in name)
    if not (0 < len(name) <= 128 and is_plain and not name.startswith(".")):
        raise BadRequest(
            f"invalid name {name[:128]!r}: expected 1 to 128 characters of [A-Za-z0-9._-], "
            "not starting with a dot"
        )


def _require_few_writes(drafts: Iterable[BundleDraft], existing: Container[RowId]) -> None:
    num_writes = sum(
        len(draft.names if key in existing else draft.single_cells.get(key, ()))
        for draft in drafts
        for key, _ in draft.rows
    )
    if num_writes > MAX_WRITES:
        raise BadRequest(
            f"{num_writes} columns of rows that exist or blobs in one call; at most {MAX_WRITES} "
            "are allowed: put fewer rows in each call"
        )


def _check_rows(rows: Mapping[RowId, Values], drafts: Iterable[BundleDraft]) -> None:
    if len(rows) != sum(len(draft.rows) for draft in drafts):
        raise BadRequest("duplicate key in one call; send each row once")
    if not all(0 < len(key) <= 256 and "\0" not in key for key in rows):
        raise BadRequest("keys must have 1 to 256 characters and must not contain NUL")
    taken = RESERVED.intersection([name for draft in drafts for name in draft.names])
    if taken:
        raise BadRequest(f"column names {sorted(taken)} are reserved; choose other names")
