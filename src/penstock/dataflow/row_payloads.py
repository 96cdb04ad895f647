# SPDX-License-Identifier: Apache-2.0
"""Rows as trainers fetch them: payload and the further columns, from wherever they lie. Blocks, so
it belongs off the event loop.

Damage is contained to its record: that row is gone, every rank sees it masked, and all others are
served."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from penstock.dataflow.blobs import BlobStore
from penstock.dataflow.ledger import Ledger
from penstock.dataflow.protocol import RowPayload
from penstock.dataflow.records import ColumnRecord, RowRecord
from penstock.dataflow.segments import Location
from penstock.errors import NotFound, StoreError
from penstock.types import RowId

log = structlog.get_logger(__name__)

PART = 500
"""Row ids per query."""


class RowPayloads:
    def __init__(self, ledger: Ledger, blobs: BlobStore) -> None:
        self._ledger = ledger
        self._blobs = blobs

    def read(self, row_ids: Sequence[RowId], columns: Sequence[str]) -> tuple[RowPayload, ...]:
        """These rows, in this order, with these of their columns."""
        rows: dict[RowId, RowRecord] = {}
        values: dict[RowId, list[ColumnRecord]] = {}
        for start in range(0, len(row_ids), PART):
            ids = list[str](row_ids[start : start + PART])
            for row in self._ledger.tables.read(RowRecord, "row_id IN :ids", ids=ids):
                rows[row.row_id] = row
            if columns:
                where = "space = 'train' AND row_id IN :ids AND name IN :names"
                named = {"ids": ids, "names": list(columns)}
                for column in self._ledger.tables.read(ColumnRecord, where, **named):
                    values.setdefault(column.row_id, []).append(column)
        return tuple(
            self._row(row_id, rows.get(row_id), values.get(row_id, ())) for row_id in row_ids
        )

    def _row(
        self, row_id: RowId, row: RowRecord | None, columns: Sequence[ColumnRecord]
    ) -> RowPayload:
        if row is None:
            return RowPayload(row_id=row_id, payload=None)
        try:
            return RowPayload(
                row_id=row_id,
                payload=self._blobs.read(row.blob) if row.blob else self._ledger.payload(row),
                columns={column.name: self._value(column) for column in columns if column.digest},
            )
        except (StoreError, NotFound) as error:
            log.error("row is gone", row=row_id, reason=str(error))
            return RowPayload(row_id=row_id, payload=None)

    def _value(self, column: ColumnRecord) -> bytes:
        if column.blob:
            return self._blobs.read(column.blob)
        place = Location(segment=column.segment, offset=column.offset, length=column.length)
        return self._ledger.payloads.read(place)
