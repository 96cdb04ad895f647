# SPDX-License-Identifier: Apache-2.0
"""Reads rows by key from the tables and the payload store.

Blocking: call it from a thread, not on the event loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from penstock.dataflow.column_records import BundleRecord, ColumnRecord
from penstock.dataflow.columns.bundles import Bundle, ColumnSlice
from penstock.dataflow.columns.column_store import POSITIONS_SQL, RowPosition, read_bundles
from penstock.dataflow.columns.origins import read_origins
from penstock.dataflow.columns.values import BlobRef, FailedColumn, RowValues, WireValue
from penstock.dataflow.core.names import ADMITTED, ORIGIN, REWARD, TRAIN, TURNS
from penstock.dataflow.ledger.store import Ledger
from penstock.dataflow.records import RowRecord
from penstock.errors import StoreError
from penstock.types import RowId

ANSWER_BYTES = 16 << 20
"""A response ends with the row that reaches this size."""
READ_BYTES = 32 << 20
"""A response ends with the row for which this much was read: a bundle is read whole for any of its
columns, with the keys of all its rows, and stays in memory for its other rows."""
KEYS_PER_QUERY = 500
"""Rows located together; the response may end before the last of them."""
FEW_ROWS = 16
"""Up to this many rows are read on the event loop; handing them to a thread would cost more."""
DAMAGED = "damaged"
FREED = FailedColumn(
    kind="freed",
    detail="training needs the row no longer, and its payload was freed: only stages of the run "
    "file get all; `dataflow.keep` and `dataflow.keep_mb` say what stays for other readers",
)
FailedColumns = dict[str, FailedColumn]
BY_KEYS_SQL = "space = :space AND row_id IN :ids"


class RowStoreReader:
    def __init__(self, ledger: Ledger, has_single_columns: Callable[[str], bool]) -> None:
        """`has_single_columns`: whether any column of a space may be stored as a single record."""
        self._ledger = ledger
        self._has_single_columns = has_single_columns

    def read_from_tables(
        self, space: str, keys: Sequence[RowId], names: Sequence[str]
    ) -> list[RowValues] | None:
        """A few rows if the tables alone hold all their values; otherwise None, and the caller must
        use `read`."""
        if space == TRAIN or len(keys) > FEW_ROWS or self._has_single_columns(space):
            return None
        located = self._locate(space, keys, names, BytesRead())
        if any(bundle.is_in_payload_store for bundle in located.bundles.all()):
            return None
        return [*located.rows(keys)]

    def read(self, space: str, keys: Sequence[RowId], names: Sequence[str]) -> list[RowValues]:
        """Read a prefix of these keys, at least one row and about ANSWER_BYTES at most. Empty
        `names` selects all columns."""
        found: list[RowValues] = []
        size, bytes_read = 0, BytesRead()
        for start in range(0, len(keys), KEYS_PER_QUERY):
            part = keys[start : start + KEYS_PER_QUERY]
            read = self._read_rollouts if space == TRAIN else self._read_items
            for values in read(space, part, names, bytes_read):
                found.append(values)
                size += sum([_size(value) for value in values.columns.values()])
                if size >= ANSWER_BYTES or bytes_read.of_bundles >= READ_BYTES:
                    return found
        return found

    def _read_rollouts(
        self, space: str, keys: Sequence[RowId], names: Sequence[str], bytes_read: BytesRead
    ) -> Iterable[RowValues]:
        tables, ids = self._ledger.tables, list[str](keys)
        rows = {
            row.row_id: row for row in tables.read(RowRecord, BY_KEYS_SQL, space=space, ids=ids)
        }
        columns = self._columns(space, ids, names)
        origins = read_origins(tables, rows.values()) if ORIGIN in names else {}
        for key in keys:
            values, failed = self._read_singles(columns.get(key, ()))
            row = rows.get(key)
            if key in origins:
                values[ORIGIN] = origins[key]
            if row is not None:
                self._add_row_columns(row, names, values, failed)
                failed = self._with_freed(row, failed)
            yield RowValues(key=key, exists=row is not None, columns=values, failed=failed)

    def _read_items(
        self, space: str, keys: Sequence[RowId], names: Sequence[str], bytes_read: BytesRead
    ) -> Iterable[RowValues]:
        located = self._locate(space, keys, names, bytes_read)
        if not self._has_single_columns(space):
            yield from located.rows(keys)
            return
        columns = self._columns(space, list[str](keys), names)
        for row in located.rows(keys):
            values, failed = self._read_singles(columns.get(row.key, ()))
            yield RowValues(
                key=row.key,
                exists=row.exists,
                columns={**row.columns, **values},
                failed={**row.failed, **failed},
            )

    def _locate(
        self, space: str, keys: Sequence[RowId], names: Sequence[str], bytes_read: BytesRead
    ) -> LocatedRows:
        """Rows are often read as they were put, so first check the bundle of the first key."""
        located = self._find(space, keys[:1], names, bytes_read)
        if len(keys) == 1:
            return located
        row_positions = {
            key: p for bundle in located.bundles.all() for key, p in bundle.row_positions()
        }
        rest = [key for key in keys if key not in row_positions]
        if not rest:
            for bundle in located.bundles.all():
                bundle.reads_most_rows = len(keys) > len(row_positions) / 2
            return LocatedRows(row_positions=row_positions, bundles=located.bundles)
        others = self._find(space, rest, names, bytes_read)
        return LocatedRows(
            row_positions={**row_positions, **others.row_positions},
            bundles=others.bundles.with_opened(located.bundles),
        )

    def _find(
        self, space: str, keys: Sequence[RowId], names: Sequence[str], bytes_read: BytesRead
    ) -> LocatedRows:
        tables = self._ledger.tables
        found = tables.rows(POSITIONS_SQL, space=space, ids=list[str](keys))
        row_positions = {key: (arrival, bundle) for key, arrival, bundle in found}
        in_order = [row_positions[key][1] for key in keys if key in row_positions]
        arrivals = [*dict.fromkeys(bundle for bundle in in_order if bundle)]
        readers = (
            [BundleReader(self._ledger, record, names, bytes_read) for record in records]
            for records in read_bundles(tables, space, arrivals)
        )
        return LocatedRows(row_positions=row_positions, bundles=OpenedBundles(readers))

    def _columns(
        self, space: str, ids: list[str], names: Sequence[str]
    ) -> dict[RowId, list[ColumnRecord]]:
        columns: dict[RowId, list[ColumnRecord]] = {}
        for column in self._ledger.tables.read(ColumnRecord, BY_KEYS_SQL, space=space, ids=ids):
            if column.name in names or not (names or column.name == ADMITTED):
                columns.setdefault(column.row_id, []).append(column)
        return columns

    def _add_row_columns(
        self,
        row: RowRecord,
        names: Sequence[str],
        values: dict[str, WireValue],
        failed: FailedColumns,
    ) -> None:
        """Add the columns that are part of the row record."""
        reward = row.summary.reward
        if reward is not None and (not names or REWARD in names):
            values.setdefault(REWARD, reward)
        try:
            if not names or TURNS in names:
                values[TURNS] = self._turns(row)
        except StoreError as error:  # affects only this value
            failed[TURNS] = FailedColumn(kind=DAMAGED, detail=str(error))

    def _with_freed(self, row: RowRecord, failed: FailedColumns) -> FailedColumns:
        """What cannot be read because its row was freed is not damaged."""
        if all(column.kind != DAMAGED for column in failed.values()):
            return failed
        query = "SELECT count(*) FROM freed WHERE group_id = :id"
        if not self._ledger.tables.scalar(query, id=row.group_id):
            return failed
        return {n: FREED if c.kind == DAMAGED else c for n, c in failed.items()}

    def _read_singles(
        self, columns: Iterable[ColumnRecord]
    ) -> tuple[dict[str, WireValue], FailedColumns]:
        """Values of columns stored as single records."""
        values: dict[str, WireValue] = {}
        failed: FailedColumns = {}
        for column in columns:
            if column.failed:
                failed[column.name] = FailedColumn(kind=column.failed, detail=column.detail)
                continue
            try:
                values[column.name] = self._value(column)
            except StoreError as error:
                failed[column.name] = FailedColumn(kind=DAMAGED, detail=str(error))
        return values, failed

    def _turns(self, row: RowRecord) -> WireValue:
        if row.blob:
            return BlobRef(digest=row.blob, size=row.length)
        return self._ledger.payload(row)

    def _value(self, column: ColumnRecord) -> WireValue:
        if column.value is not None:
            return column.value
        if column.blob:
            return BlobRef(digest=column.blob, size=column.length)
        return self._ledger.read_payload(column)


@dataclass(slots=True)
class BytesRead:
    """For one call."""

    of_bundles: int = 0


class OpenedBundles:
    """Bundles by arrival of their first row, opened a few at a time in the order of the keys: a
    response may end long before the last of them."""

    def __init__(self, readers: Iterator[Sequence[BundleReader]]) -> None:
        self._readers = readers
        self._opened: dict[int, BundleReader] = {}

    def get(self, first: int) -> BundleReader | None:
        while first not in self._opened and (more := next(self._readers, None)) is not None:
            self._add(more)
        return self._opened.get(first)

    def all(self) -> Iterable[BundleReader]:
        for more in self._readers:
            self._add(more)
        return self._opened.values()

    def with_opened(self, others: OpenedBundles) -> OpenedBundles:
        self._add(others.all())
        return self

    def _add(self, readers: Iterable[BundleReader]) -> None:
        self._opened.update((reader.first, reader) for reader in readers)


class LocatedRows(NamedTuple):
    """Rows that were located but not read yet."""

    row_positions: Mapping[RowId, RowPosition]
    bundles: OpenedBundles

    def rows(self, keys: Iterable[RowId]) -> Iterable[RowValues]:
        """The columns delivered with each row, in the order of `keys`."""
        for key in keys:
            arrival, first = self.row_positions.get(key, (0, 0))
            values: Mapping[str, WireValue] = {}
            failed: FailedColumns = {}
            bundle = self.bundles.get(first) if first else None
            if bundle is not None:
                values, failed = bundle.row(key, arrival - first)
            # If its bundle is missing, the space was cleared in the meantime.
            exists = arrival > 0 and (not first or bundle is not None)
            yield RowValues(key=key, exists=exists, columns=values, failed=failed)


class BundleReader:
    """Reads columns of one bundle; loads the payload on first use. Empty `names` selects all
    columns."""

    def __init__(
        self,
        ledger: Ledger,
        record: BundleRecord,
        names: Sequence[str],
        bytes_read: BytesRead | None = None,
    ) -> None:
        self._ledger = ledger
        self._bytes_read = bytes_read or BytesRead()
        self._bundle = Bundle(record)
        self._bytes_read.of_bundles += self._bundle.index_bytes
        self.first = record.arrival
        self._names = names
        self._payload: bytes | None = None
        self._damage = ""
        self._rows: list[dict[str, float | bytes]] = []
        self.reads_most_rows = False
        """Set if most rows of the bundle are requested; decoding all together is faster then."""

    def row(self, key: RowId, position: int) -> tuple[Mapping[str, WireValue], FailedColumns]:
        """Columns of the row with this key at this position."""
        damage = self._damage
        try:
            if self._payload is None and not damage:
                self._payload = self._read()
            self._bundle.require(key, position)
        except StoreError as error:  # affects only this row, or the rows of this bundle
            damage = str(error)
            self._damage = damage if self._payload is None else ""
        if damage or self._payload is None:
            names = (*(name for name, _ in self._slice.byte_columns), *self._slice.numbers)
            return {}, {name: FailedColumn(kind=DAMAGED, detail=damage) for name in names}
        if not self.reads_most_rows:
            return self._slice.values(position, self._payload), {}
        self._rows = self._rows or self._slice.all_values(len(self._bundle.keys), self._payload)
        return self._rows[position], {}

    @cached_property
    def _slice(self) -> ColumnSlice:
        return self._bundle.select(self._names)

    def row_positions(self) -> Iterable[tuple[RowId, RowPosition]]:
        first = self._bundle.record.arrival
        return ((key, (arrival, first)) for arrival, key in enumerate(self._bundle.keys, first))

    @property
    def is_in_payload_store(self) -> bool:
        """Whether its values are in the payload store, not in the record."""
        return self._bundle.record.segment > 0

    def _read(self) -> bytes:
        record = self._bundle.record
        self._bytes_read.of_bundles += record.length
        return self._ledger.read_payload(record) if self.is_in_payload_store else record.payload


def _size(value: WireValue) -> int:
    return len(value) if isinstance(value, bytes) else 64
