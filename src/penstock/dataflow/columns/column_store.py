# SPDX-License-Identifier: Apache-2.0
"""Write-once columns: the stored value of each (row, column), in a bundle with the other rows of
its call or as a single record.

Reads combine SQL with writes that are not flushed yet, so two writers in one group commit cannot
both be first. Does not decide who may write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from penstock.dataflow.column_records import BundleRecord, ColumnRecord, ItemRecord
from penstock.dataflow.columns.bundles import Bundle, BundleDraft, bundle_record
from penstock.dataflow.columns.cells import Cell
from penstock.dataflow.core.names import TRAIN
from penstock.dataflow.ledger.segments import Location
from penstock.dataflow.ledger.tables import Tables
from penstock.dataflow.records import Deletion, Journal
from penstock.errors import TooLarge
from penstock.types import RowId

K = TypeVar("K")
V = TypeVar("V")
COLUMN_BYTES = 64
"""Overhead charged to a space's quota for each column, in addition to its value."""
USED_BYTES_SQL = (
    "SELECT space, coalesce(sum(length), 0) + :each * {cells} FROM {table} "
    "WHERE space != :train GROUP BY space"
)
LOOKUP_BYTES = 16 << 20
"""Keys, sizes and digests that one call makes the service read to compare with what is stored: a
bundle has all of its rows."""
BUNDLES_PER_QUERY = 16
POSITIONS_SQL = "SELECT row_id, arrival, bundle FROM items WHERE space = :space AND row_id IN :ids"


RowPosition = tuple[int, int]
"""Arrival number of a user row, and of the first row of its bundle. The latter is 0 if all columns
of the row are single records."""


def read_bundles(
    tables: Tables, space: str, arrivals: Sequence[int]
) -> Iterator[list[BundleRecord]]:
    """A few at a time: all of one call may be too large together."""
    where = "space = :space AND arrival IN :ids"
    for start in range(0, len(arrivals), BUNDLES_PER_QUERY):
        ids = arrivals[start : start + BUNDLES_PER_QUERY]
        yield tables.read(BundleRecord, where, space=space, ids=[*ids])


class UnflushedWrites(Generic[K, V]):
    """Writes that may not be on disk yet. Call `begin_flush` before a flush and `end_flush` after
    it, to drop exactly the writes that the flush made durable."""

    def __init__(self) -> None:
        self._current: dict[K, V] = {}
        self._flushing: dict[K, V] = {}

    def __setitem__(self, key: K, value: V) -> None:
        self._current[key] = value

    def update(self, found: Mapping[K, V]) -> None:
        self._current.update(found)

    def get(self, key: K) -> V | None:
        return self._current.get(key) or self._flushing.get(key)

    def find(self, keys: Sequence[K]) -> dict[K, V]:
        """Values of the keys that have an unflushed write."""
        older, newer = self._flushing, self._current
        found = {key: older[key] for key in keys if key in older} if older else {}
        return {**found, **{key: newer[key] for key in keys if key in newer}}

    def begin_flush(self) -> None:
        self._flushing.update(self._current)
        self._current = {}

    def end_flush(self) -> None:
        self._flushing = {}

    def drop(self, matches: Callable[[K], bool]) -> None:
        """Discard the writes whose key matches."""
        self._current = {k: value for k, value in self._current.items() if not matches(k)}
        self._flushing = {k: value for k, value in self._flushing.items() if not matches(k)}


class Columns:
    def __init__(
        self, tables: Tables, journal: Journal, place: Callable[[bytes], Location]
    ) -> None:
        self._tables = tables
        self._journal = journal
        self._place = place
        self.used_bytes: dict[str, int] = {}
        """By space; `train` is not counted."""
        self._spaces_with_singles = {TRAIN}
        """Spaces with at least one single-column record; others skip that lookup."""
        self._recent: UnflushedWrites[tuple[str, RowId, str], ColumnRecord] = UnflushedWrites()
        self._row_positions: UnflushedWrites[tuple[str, RowId], RowPosition] = UnflushedWrites()
        self._bundles: UnflushedWrites[tuple[str, int], BundleRecord] = UnflushedWrites()
        self._deleted: UnflushedWrites[tuple[str, RowId], bool] = UnflushedWrites()

    def restore(self) -> None:
        single_columns = self._used("columns", "count(*)")
        self._spaces_with_singles = {TRAIN, *single_columns}
        self.used_bytes = self._used("bundles", "sum(num_cells)")
        for space, used in single_columns.items():
            self.used_bytes[space] = self.used_bytes.get(space, 0) + used

    def _used(self, table: str, cells: str) -> dict[str, int]:
        query = USED_BYTES_SQL.format(table=table, cells=cells)
        found = self._tables.rows(query, each=COLUMN_BYTES, train=TRAIN)
        return {str(space): int(used) for space, used in found}

    # --- reading ------------------------------------------------------------------------------

    def has_single_columns(self, space: str) -> bool:
        """Whether any column of this space may be stored as a single record."""
        return space in self._spaces_with_singles

    def existing(
        self, space: str, row_ids: Sequence[RowId], names: Iterable[str]
    ) -> dict[tuple[RowId, str], ColumnRecord]:
        """The columns of these names that these rows already have."""
        unique_names = frozenset(names)
        return self.existing_of_rows(space, dict.fromkeys(row_ids, unique_names))

    def existing_of_rows(
        self, space: str, names: Mapping[RowId, frozenset[str]]
    ) -> dict[tuple[RowId, str], ColumnRecord]:
        """As `existing`, with the names of each row: in proportion to their number, and with one
        query for all rows of the same names."""
        row_ids: dict[frozenset[str], list[RowId]] = {}
        for row_id, of_row in names.items():
            if of_row:
                row_ids.setdefault(of_row, []).append(row_id)
        found: dict[tuple[RowId, str], ColumnRecord] = {}
        for of_rows, ids in row_ids.items():
            found.update(self.single_columns(space, ids, sorted(of_rows)))
        if space != TRAIN and row_ids:
            found.update(self._bundled(space, self.row_positions(space, [*names]), names))
        return found

    def unflushed(self, space: str, row_id: RowId, name: str) -> ColumnRecord | None:
        """The column, if it is a single record that was just written."""
        return self._recent.get((space, row_id, name))

    def single_columns(
        self, space: str, row_ids: Sequence[RowId], names: Sequence[str]
    ) -> dict[tuple[RowId, str], ColumnRecord]:
        """Columns stored as single records, not with their row's bundle."""
        if not self.has_single_columns(space):
            return {}
        where = "space = :space AND row_id IN :ids AND name IN :names"
        values = {"space": space, "ids": [*row_ids], "names": [*names]}
        records = self._tables.read(ColumnRecord, where, **values)
        found = {(record.row_id, record.name): record for record in records}
        for row_id in row_ids:
            for name in names:
                recent = self._recent.get((space, row_id, name))
                if recent is not None:
                    found[row_id, name] = recent
        return found

    def _bundled(
        self,
        space: str,
        row_positions: Mapping[RowId, RowPosition],
        names: Mapping[RowId, frozenset[str]],
    ) -> dict[tuple[RowId, str], ColumnRecord]:
        in_bundle: dict[int, list[tuple[RowId, int]]] = {}
        for row_id, (arrival, first) in row_positions.items():
            if first:
                in_bundle.setdefault(first, []).append((row_id, arrival - first))
        found: dict[tuple[RowId, str], ColumnRecord] = {}
        size = 0
        for bundle in self._open(space, sorted(in_bundle)):
            size += bundle.index_bytes
            if size > LOOKUP_BYTES:
                raise TooLarge(
                    f"the rows of this call are in {len(in_bundle)} bundles of together more than "
                    f"{LOOKUP_BYTES} bytes of keys and digests: send fewer rows in each call"
                )
            for row_id, position in in_bundle[bundle.record.arrival]:
                bundle.require(row_id, position)
                columns = (bundle.column(position, n) for n in names[row_id])
                found.update(((row_id, column.name), column) for column in columns if column)
        return found

    def _open(self, space: str, arrivals: Sequence[int]) -> Iterator[Bundle]:
        """The bundles that start at these arrivals, a few in memory at a time."""
        on_disk: list[int] = []
        for arrival in arrivals:
            recent = self._bundles.get((space, arrival))
            if recent is None:
                on_disk.append(arrival)
            else:
                yield Bundle(recent)
        for records in read_bundles(self._tables, space, on_disk):
            yield from map(Bundle, records)

    def row_positions(self, space: str, keys: Sequence[RowId]) -> dict[RowId, RowPosition]:
        """Positions of the keys that exist as user rows."""
        stored = self._tables.rows(POSITIONS_SQL, space=space, ids=[*keys])
        found = {row_id: (arrival, bundle) for row_id, arrival, bundle in stored}
        recent = self._row_positions.find([(space, key) for key in keys])
        return found | {key: position for (_, key), position in recent.items()}

    def is_deleted(self, space: str, row_id: RowId) -> bool:
        """Whether the row was just deleted; the tables may still show it."""
        return self._deleted.get((space, row_id)) is not None

    # --- writing ------------------------------------------------------------------------------

    def complete(
        self, space: str, row_id: RowId, cell: Cell, writer: str, now: float
    ) -> ColumnRecord:
        """Store a column that the row does not have yet; the caller has checked that."""
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
        self._spaces_with_singles.add(space)
        if space != TRAIN:
            used = self.used_bytes.get(space, 0)
            self.used_bytes[space] = used + where.length + COLUMN_BYTES
        return record

    def add(self, space: str, draft: BundleDraft, arrival: int, writer: str, now: float) -> None:
        """Store new rows with consecutive arrival numbers that start at `arrival`."""
        record = bundle_record(
            draft, self._place, space=space, arrival=arrival, writer=writer, now=now
        )
        self._journal(record)
        self._bundles[space, arrival] = record
        self._row_positions.update(
            {(space, key): (at, arrival) for at, key in enumerate(draft.keys, arrival)}
        )
        used = self.used_bytes.get(space, 0)
        self.used_bytes[space] = used + record.length + COLUMN_BYTES * draft.num_cells
        for key, cells in draft.single_cells.items():
            for cell in cells:
                self.complete(space, key, cell, writer, now)

    def forget(self, space: str, row_id: RowId) -> None:
        self._deleted[space, row_id] = True

    def clear(self, space: str) -> None:
        """The caller must reject puts into this space until this is durable: a group commit runs
        deletions after its writes."""
        self._recent.drop(lambda key: key[0] == space)
        self._row_positions.drop(lambda key: key[0] == space)
        self._bundles.drop(lambda key: key[0] == space)
        self.used_bytes.pop(space, None)
        self._spaces_with_singles.discard(space)
        for kind in (ColumnRecord, ItemRecord, BundleRecord):
            self._journal(Deletion(kind=kind, where="space = :space", values={"space": space}))

    def cut(self) -> None:
        """A flush starts: writes from now on belong to the next one."""
        for recent in (self._recent, self._row_positions, self._bundles, self._deleted):
            recent.begin_flush()

    def release(self) -> None:
        """The flush ended: everything written before `cut` is durable and read from the tables."""
        for recent in (self._recent, self._row_positions, self._bundles, self._deleted):
            recent.end_flush()
