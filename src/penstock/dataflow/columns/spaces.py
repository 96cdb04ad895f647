# SPDX-License-Identifier: Apache-2.0
"""Spaces: named sets of rows that users put by key, each bounded, each clearable alone.

Owns quotas and keys. The space `train` holds the rollout rows: it is read here and never written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.dataflow.column_records import ColumnRecord, SpaceRecord
from penstock.dataflow.columns.bundles import BundleDraft, Values
from penstock.dataflow.columns.cells import Cell, compare_write
from penstock.dataflow.columns.column_store import COLUMN_BYTES, Columns
from penstock.dataflow.columns.row_window import RowWindow
from penstock.dataflow.core.leasing import DeliveryStatus
from penstock.dataflow.core.names import RESERVED, TRAIN
from penstock.dataflow.ledger.tables import Tables
from penstock.dataflow.records import Journal
from penstock.errors import BadRequest, Forbidden, NotFound, StorageFull
from penstock.types import RowId

RETRY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedColumn:
    """A column that was not stored, and why."""

    key: RowId
    name: str
    status: DeliveryStatus
    detail: str = ""


class Spaces:
    def __init__(self, row_window: RowWindow, columns: Columns, journal: Journal) -> None:
        self._shelf = row_window
        self._columns = columns
        self._journal = journal
        self.records: dict[str, SpaceRecord] = {}

    def restore(self, tables: Tables) -> None:
        self.records = {record.name: record for record in tables.read(SpaceRecord)}
        self._columns.restore()

    def set_quota(self, name: str, quota_bytes: int, now: float) -> None:
        """Holds for what is put from now on; rows that are there stay."""
        check_name(name)
        if quota_bytes < 0:
            raise BadRequest(f"a quota of {quota_bytes} bytes; give 0 for none")
        self.records[name] = SpaceRecord(name=name, quota_bytes=quota_bytes, at=now)
        self._journal(self.records[name])

    def put(
        self, name: str, drafts: Sequence[BundleDraft], writer: str, now: float
    ) -> list[RejectedColumn]:
        """All of it, or nothing when it does not fit; the answer names what stood before. A column
        that stands is never changed."""
        check_name(name)
        if name == TRAIN:
            raise Forbidden("rows of 'train' come from rollouts; put into a space of another name")
        rows = {key: values for draft in drafts for key, values in draft.rows}
        _check_rows(rows, drafts)
        row_positions = self._columns.row_positions(name, [*rows])
        cells = {
            key: draft.cells(key, values)
            for draft in (drafts if row_positions else ())
            for key, values in draft.rows
            if key in row_positions
        }
        existing = self._columns.existing(
            name, [*cells], {cell.name for row in cells.values() for cell in row}
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
            refused
            for key, row in cells.items()
            for refused in self._complete(name, key, row, existing, writer, now)
        ]

    def _add(self, name: str, draft: BundleDraft, writer: str, now: float) -> None:
        first = self._shelf.next_arrival(len(draft.rows))
        self._columns.add(name, draft, first, writer, now)
        self._shelf.add_rows(name, draft.keys, first, draft.names, now)

    def _complete(
        self,
        name: str,
        key: RowId,
        cells: Iterable[Cell],
        existing: Mapping[tuple[RowId, str], ColumnRecord],
        writer: str,
        now: float,
    ) -> Iterable[RejectedColumn]:
        """Give a row that is there the columns it does not have."""
        for cell in cells:
            current = existing.get((key, cell.name))
            if current is None:
                self._shelf.complete(name, key, cell, writer, now)
            else:
                status, detail = compare_write(current, cell)
                yield RejectedColumn(key=key, name=cell.name, status=status, detail=detail)

    def _require_room(
        self, name: str, drafts: Iterable[BundleDraft], cells: Iterable[Cell]
    ) -> None:
        record = self.records.get(name)
        quota = 0 if record is None else record.quota_bytes
        if not quota:
            return
        used = self._columns.used_bytes.get(name, 0)
        wanted = sum(cell.length + COLUMN_BYTES for cell in cells)
        wanted += sum(draft.quota_bytes_used(COLUMN_BYTES) for draft in drafts)
        if wanted and used + wanted > quota:
            raise StorageFull(
                f"space {name!r} holds {used} of {quota} bytes and this needs {wanted} more; "
                f"clear it (DELETE /v1/spaces/{name}) or raise its quota (PUT /v1/spaces/{name})",
                retry_after_s=RETRY_S,
            )

    def clear(self, name: str) -> None:
        """Only this space, and only what was put before. Nothing may be put into it until this is
        durable."""
        check_name(name)
        if name == TRAIN:
            raise Forbidden("rows of 'train' are freed by the run itself; it cannot be cleared")
        if name not in self.records:
            raise NotFound(f"no space {name!r}; a space is made by the first put into it")
        self._shelf.clear(name)
        self._columns.clear(name)


def check_name(name: str) -> None:
    is_plain = all(c.isascii() and (c.isalnum() or c in "._-") for c in name)
    if not (0 < len(name) <= 128 and is_plain and not name.startswith(".")):
        raise BadRequest(f"{name[:128]!r} is no name; it reads [A-Za-z0-9._-]{{1,128}}")


def _check_rows(rows: Mapping[RowId, Values], drafts: Iterable[BundleDraft]) -> None:
    if len(rows) != sum(len(draft.rows) for draft in drafts):
        raise BadRequest("a key stands twice in one call; give each row once")
    if not all(0 < len(key) <= 256 and "\0" not in key for key in rows):
        raise BadRequest("a key has 1 to 256 characters, and NUL is none of them")
    taken = RESERVED.intersection([name for draft in drafts for name in draft.names])
    if taken:
        raise BadRequest(f"columns {sorted(taken)} are the service's own; choose other names")
