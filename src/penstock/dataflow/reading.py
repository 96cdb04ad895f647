# SPDX-License-Identifier: Apache-2.0
"""Values of rows by key: from tables and the payload store to what a caller gets. Reads only,
blocks, and belongs off the event loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.dataflow.columns import ADMITTED, PART, REWARD, TURNS
from penstock.dataflow.ledger import Ledger
from penstock.dataflow.records import ColumnRecord, ItemRecord, RowRecord
from penstock.dataflow.row_protocol import BlobRef, FailedColumn, RowValues, Value
from penstock.dataflow.segments import Location
from penstock.errors import StoreError
from penstock.types import RowId

ANSWER_BYTES = 16 << 20
"""An answer stops after the row that reaches this."""
DAMAGED = "damaged"
OF_KEYS = "space = :space AND row_id IN :ids"


class RowReading:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def read(self, space: str, keys: Sequence[RowId], names: Sequence[str]) -> list[RowValues]:
        """The first of these keys in their order, at least one; empty `names` for all columns."""
        found: list[RowValues] = []
        size = 0
        for start in range(0, len(keys), PART):
            for values in self._read_part(space, keys[start : start + PART], names):
                found.append(values)
                size += sum(_size(value) for value in values.columns.values())
                if size >= ANSWER_BYTES:
                    return found
        return found

    def _read_part(
        self, space: str, keys: Sequence[RowId], names: Sequence[str]
    ) -> Iterable[RowValues]:
        ids = list[str](keys)
        tables = self._ledger.tables
        rows = {row.row_id: row for row in tables.read(RowRecord, OF_KEYS, space=space, ids=ids)}
        items = {item.row_id for item in tables.read(ItemRecord, OF_KEYS, space=space, ids=ids)}
        columns: dict[RowId, list[ColumnRecord]] = {}
        for column in tables.read(ColumnRecord, OF_KEYS, space=space, ids=ids):
            if column.name in names or not (names or column.name == ADMITTED):
                columns.setdefault(column.row_id, []).append(column)
        for key in keys:
            yield self._values(key, rows.get(key), key in items, columns.get(key, ()), names)

    def _values(
        self,
        key: RowId,
        row: RowRecord | None,
        is_item: bool,
        columns: Iterable[ColumnRecord],
        names: Sequence[str],
    ) -> RowValues:
        values: dict[str, Value] = {}
        failed: dict[str, FailedColumn] = {}
        if row is not None and row.reward is not None and (not names or REWARD in names):
            values[REWARD] = row.reward
        try:
            if row is not None and (not names or TURNS in names):
                values[TURNS] = self._turns(row)
        except StoreError as error:  # contained to this value
            failed[TURNS] = FailedColumn(kind=DAMAGED, detail=str(error))
        for column in columns:
            if column.failed:
                failed[column.name] = FailedColumn(kind=column.failed, detail=column.detail)
                continue
            try:
                values[column.name] = self._value(column)
            except StoreError as error:
                failed[column.name] = FailedColumn(kind=DAMAGED, detail=str(error))
        is_known = is_item or row is not None
        return RowValues(key=key, is_known=is_known, columns=values, failed=failed)

    def _turns(self, row: RowRecord) -> Value:
        if row.blob:
            return BlobRef(digest=row.blob, size=row.length)
        return self._ledger.payload(row)

    def _value(self, column: ColumnRecord) -> Value:
        if column.value is not None:
            return column.value
        if column.blob:
            return BlobRef(digest=column.blob, size=column.length)
        try:
            return self._ledger.payloads.read(_location(column))
        except StoreError:  # compaction may have moved it after we looked
            where = "space = :space AND row_id = :row_id AND name = :name"
            moved = self._ledger.tables.read(
                ColumnRecord, where, space=column.space, row_id=column.row_id, name=column.name
            )
            if not moved or _location(moved[0]) == _location(column):
                raise
            return self._ledger.payloads.read(_location(moved[0]))


def _location(column: ColumnRecord) -> Location:
    return Location(segment=column.segment, offset=column.offset, length=column.length)


def _size(value: Value) -> int:
    return len(value) if isinstance(value, bytes) else 64
