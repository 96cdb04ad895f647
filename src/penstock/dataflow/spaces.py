# SPDX-License-Identifier: Apache-2.0
"""Spaces: named sets of rows that users put by key, each bounded, each clearable alone.

Owns quotas and keys. The space `train` holds the rollout rows: it is read here and never written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.dataflow.columns import COLUMN_BYTES, RESERVED, TRAIN, Cell, Columns, compare
from penstock.dataflow.protocol import DeliveryStatus
from penstock.dataflow.records import ColumnRecord, ItemRecord, Journal, SpaceRecord
from penstock.dataflow.shelf import Shelf
from penstock.dataflow.tables import Tables
from penstock.errors import BadRequest, Forbidden, NotFound, StorageFull
from penstock.types import RowId

RETRY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRow:
    key: RowId
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PutResult:
    key: RowId
    name: str
    status: DeliveryStatus
    detail: str = ""


class Spaces:
    def __init__(self, shelf: Shelf, columns: Columns, journal: Journal) -> None:
        self._shelf = shelf
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

    def put(self, name: str, rows: Sequence[NewRow], writer: str, now: float) -> list[PutResult]:
        """All of it, or nothing when it does not fit. A column that stands is never changed."""
        check_name(name)
        if name == TRAIN:
            raise Forbidden("rows of 'train' come from rollouts; put into a space of another name")
        _check_rows(rows)
        keys = [row.key for row in rows]
        items = self._columns.items(name, keys)
        known = [key for key in keys if key in items]
        names = {cell.name for row in rows for cell in row.cells}
        standing = self._columns.standing(name, known, names)
        fresh = (c for row in rows for c in row.cells if (row.key, c.name) not in standing)
        self._require_room(name, fresh)
        if name not in self.records:
            self.set_quota(name, 0, now)
        return [
            result
            for row in rows
            for result in self._put_row(name, row, row.key in items, standing, writer, now)
        ]

    def _put_row(
        self,
        name: str,
        row: NewRow,
        is_known: bool,
        standing: Mapping[tuple[RowId, str], ColumnRecord],
        writer: str,
        now: float,
    ) -> list[PutResult]:
        results: list[PutResult] = []
        for cell in row.cells:
            stands = standing.get((row.key, cell.name))
            status, detail = DeliveryStatus.STORED, ""
            if stands is not None:
                status, detail = compare(stands, cell)
            elif is_known:
                self._shelf.land(name, row.key, cell, writer, now)
            else:
                self._columns.land(name, row.key, cell, writer, now)
            results.append(PutResult(key=row.key, name=cell.name, status=status, detail=detail))
        if not is_known:
            arrival = self._shelf.next_arrival()
            self._columns.add_item(ItemRecord(space=name, row_id=row.key, arrival=arrival, at=now))
            born = [cell.name for cell in row.cells]
            self._shelf.arrived(name, row.key, arrival, born, now)
        return results

    def _require_room(self, name: str, cells: Iterable[Cell]) -> None:
        record = self.records.get(name)
        quota = 0 if record is None else record.quota_bytes
        used = self._columns.used_bytes.get(name, 0)
        wanted = sum(cell.length + COLUMN_BYTES for cell in cells)
        if quota and wanted and used + wanted > quota:
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


def _check_rows(rows: Sequence[NewRow]) -> None:
    keys = {row.key for row in rows}
    if len(keys) != len(rows):
        raise BadRequest("a key stands twice in one call; give each row once")
    for row in rows:
        if not 0 < len(row.key) <= 256:
            raise BadRequest("a key has 1 to 256 characters")
        names = [cell.name for cell in row.cells]
        if len(set(names)) != len(names):
            raise BadRequest(f"row {row.key!r} names a column twice")
        taken = RESERVED.intersection(names)
        if taken:
            raise BadRequest(f"columns {sorted(taken)} are the service's own; choose other names")
