# SPDX-License-Identifier: Apache-2.0
"""Write-once columns: what stands for a row and a name, and the ways a value becomes a record: with
the other rows of its call, or alone.

Answers from SQL and from what is decided but not yet on disk, so that two writers in one group
commit cannot both be first. Decides nothing about who may write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

from penstock.dataflow.column_records import BundleRecord, ColumnRecord, ItemRecord
from penstock.dataflow.columns.bundles import Bundle, Draft, record_of
from penstock.dataflow.columns.cells import Cell
from penstock.dataflow.core.names import TRAIN
from penstock.dataflow.ledger.segments import Location
from penstock.dataflow.ledger.tables import Tables
from penstock.dataflow.records import Erasure, Journal
from penstock.types import RowId

K = TypeVar("K")
V = TypeVar("V")
PART = 500
"""Keys in one SQL condition."""
COLUMN_BYTES = 64
"""What a column of a user's space counts beside its value: its record costs too."""
USED = (
    "SELECT space, coalesce(sum(length), 0) + :each * {cells} FROM {table} "
    "WHERE space != :train GROUP BY space"
)
PLACES = "SELECT row_id, arrival, bundle FROM items WHERE space = :space AND row_id IN :ids"


Place = tuple[int, int]
"""Arrival of a row that users put, and of the first row of its bundle: 0 for a row whose columns
all stand alone."""


class Recent(Generic[K, V]):
    """What is decided and maybe not on disk yet. `cut` before a flush and `release` after it drop
    exactly what that flush made durable."""

    def __init__(self) -> None:
        self._young: dict[K, V] = {}
        self._old: dict[K, V] = {}

    def __setitem__(self, key: K, value: V) -> None:
        self._young[key] = value

    def update(self, found: Mapping[K, V]) -> None:
        self._young.update(found)

    def get(self, key: K) -> V | None:
        return self._young.get(key) or self._old.get(key)

    def find(self, keys: Sequence[K]) -> dict[K, V]:
        """Those of these keys that are here."""
        old, young = self._old, self._young
        found = {key: old[key] for key in keys if key in old} if old else {}
        return {**found, **{key: young[key] for key in keys if key in young}}

    def cut(self) -> None:
        self._old.update(self._young)
        self._young = {}

    def release(self) -> None:
        self._old = {}

    def drop(self, is_gone: Callable[[K], bool]) -> None:
        self._young = {key: value for key, value in self._young.items() if not is_gone(key)}
        self._old = {key: value for key, value in self._old.items() if not is_gone(key)}


class Columns:
    def __init__(
        self, tables: Tables, journal: Journal, place: Callable[[bytes], Location]
    ) -> None:
        self._tables = tables
        self._journal = journal
        self._place = place
        self.used_bytes: dict[str, int] = {}
        """By space, of those that users put into."""
        self._alone: set[str] | None = None
        """Spaces of which some column stands alone; in others nobody looks for one. Unknown until
        restored."""
        self._recent: Recent[tuple[str, RowId, str], ColumnRecord] = Recent()
        self._places: Recent[tuple[str, RowId], Place] = Recent()
        self._bundles: Recent[tuple[str, int], BundleRecord] = Recent()
        self._gone: Recent[tuple[str, RowId], bool] = Recent()

    def restore(self) -> None:
        alone = self._used("columns", "count(*)")
        self._alone = {TRAIN, *alone}
        self.used_bytes = self._used("bundles", "sum(num_cells)")
        for space, used in alone.items():
            self.used_bytes[space] = self.used_bytes.get(space, 0) + used

    def _used(self, table: str, cells: str) -> dict[str, int]:
        query = USED.format(table=table, cells=cells)
        found = self._tables.rows(query, each=COLUMN_BYTES, train=TRAIN)
        return {str(space): int(used) for space, used in found}

    # --- what stands --------------------------------------------------------------------------

    def stands_alone(self, space: str) -> bool:
        """May some column of this space have a record of its own?"""
        return self._alone is None or space in self._alone

    def standing(
        self, space: str, row_ids: Sequence[RowId], names: Iterable[str]
    ) -> dict[tuple[RowId, str], ColumnRecord]:
        wanted = sorted(set(names))
        if not wanted or not row_ids:
            return {}
        found = self.alone(space, row_ids, wanted)
        if space != TRAIN:
            found |= self._bundled(space, self.places(space, row_ids), wanted)
        return found

    def alone(
        self, space: str, row_ids: Sequence[RowId], names: Sequence[str]
    ) -> dict[tuple[RowId, str], ColumnRecord]:
        """Columns that did not come with their row."""
        found: dict[tuple[RowId, str], ColumnRecord] = {}
        if not self.stands_alone(space):
            return found
        for start in range(0, len(row_ids), PART):
            ids = list[str](row_ids[start : start + PART])
            where = "space = :space AND row_id IN :ids AND name IN :names"
            values = {"space": space, "ids": ids, "names": list(names)}
            for record in self._tables.read(ColumnRecord, where, **values):
                found[record.row_id, record.name] = record
        for row_id in row_ids:
            for name in names:
                recent = self._recent.get((space, row_id, name))
                if recent is not None:
                    found[row_id, name] = recent
        return found

    def _bundled(
        self, space: str, places: Mapping[RowId, Place], names: Sequence[str]
    ) -> dict[tuple[RowId, str], ColumnRecord]:
        bundles = self._open(space, {first for _, first in places.values()})
        found: dict[tuple[RowId, str], ColumnRecord] = {}
        for row_id, (arrival, first) in places.items():
            if first in bundles:
                bundles[first].require(row_id, arrival - first)
                columns = (bundles[first].column(arrival - first, name) for name in names)
                found.update(((row_id, column.name), column) for column in columns if column)
        return found

    def _open(self, space: str, arrivals: Iterable[int]) -> dict[int, Bundle]:
        recent = {arrival: self._bundles.get((space, arrival)) for arrival in arrivals}
        found = {arrival: Bundle(record) for arrival, record in recent.items() if record}
        ids = [arrival for arrival, record in recent.items() if record is None]
        for start in range(0, len(ids), PART):
            where = "space = :space AND arrival IN :ids"
            part = ids[start : start + PART]
            for record in self._tables.read(BundleRecord, where, space=space, ids=part):
                found[record.arrival] = Bundle(record)
        return found

    def places(self, space: str, keys: Sequence[RowId]) -> dict[RowId, Place]:
        """Of the rows of these keys that users put."""
        found: dict[RowId, Place] = {}
        for start in range(0, len(keys), PART):
            ids = list[str](keys[start : start + PART])
            for row_id, arrival, bundle in self._tables.rows(PLACES, space=space, ids=ids):
                found[row_id] = arrival, bundle
        recent = self._places.find([(space, key) for key in keys])
        return {**found, **{key: place for (_, key), place in recent.items()}}

    def is_gone(self, space: str, row_id: RowId) -> bool:
        """Forgotten a moment ago, while tables may still show it."""
        return self._gone.get((space, row_id)) is not None

    # --- what becomes of it -------------------------------------------------------------------

    def land(self, space: str, row_id: RowId, cell: Cell, writer: str, now: float) -> ColumnRecord:
        """Store a cell whose place is free; whether it is, the caller knows."""
        where = Location(segment=0, offset=0, length=cell.length)
        if cell.payload is not None:
            where = self._place(cell.payload)
        record = ColumnRecord(
            space=space,
            row_id=row_id,
            name=cell.name,
            failed=cell.failed,
            value=cell.value,
            digest=cell.digest,
            segment=where.segment,
            offset=where.offset,
            length=where.length,
            writer=writer,
            at=now,
            blob=cell.blob,
            detail=cell.detail,
        )
        self._journal(record)
        self._recent[space, row_id, cell.name] = record
        if self._alone is not None:
            self._alone.add(space)
        if space != TRAIN:
            used = self.used_bytes.get(space, 0)
            self.used_bytes[space] = used + where.length + COLUMN_BYTES
        return record

    def add(self, space: str, draft: Draft, arrival: int, writer: str, now: float) -> None:
        """Store new rows of free keys, the first with this arrival and the others behind it."""
        record = record_of(draft, self._place, space=space, arrival=arrival, writer=writer, now=now)
        self._journal(record)
        self._bundles[space, arrival] = record
        self._places.update(
            {(space, key): (at, arrival) for at, key in enumerate(draft.keys, arrival)}
        )
        used = self.used_bytes.get(space, 0)
        self.used_bytes[space] = used + record.length + COLUMN_BYTES * draft.num_cells
        for key, cells in draft.singles.items():
            for cell in cells:
                self.land(space, key, cell, writer, now)

    def forget(self, space: str, row_id: RowId) -> None:
        self._gone[space, row_id] = True

    def clear(self, space: str) -> None:
        """Nothing may be put into this space until this is durable: a commit erases after it has
        written every record of its group."""
        self._recent.drop(lambda key: key[0] == space)
        self._places.drop(lambda key: key[0] == space)
        self._bundles.drop(lambda key: key[0] == space)
        self.used_bytes.pop(space, None)
        if self._alone is not None:
            self._alone.discard(space)
        for kind in (ColumnRecord, ItemRecord, BundleRecord):
            self._journal(Erasure(kind=kind, where="space = :space", values={"space": space}))

    def cut(self) -> None:
        for recent in (self._recent, self._places, self._bundles, self._gone):
            recent.cut()

    def release(self) -> None:
        """All that was decided before `cut` is durable; the tables answer for it."""
        for recent in (self._recent, self._places, self._bundles, self._gone):
            recent.release()
