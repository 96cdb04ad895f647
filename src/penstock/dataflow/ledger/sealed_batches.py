# SPDX-License-Identifier: Apache-2.0
"""Sealed batches of a recorded run, read from its files exactly as they were sent to trainers.

Finds their rows in ledger, segments and blobs, with the columns that stages added. Read-only; rows
that were freed or marked as forgotten come without payload."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from penstock.dataflow.column_records import STORED_COLUMNS_SQL, ColumnRecord
from penstock.dataflow.core.versions import Lineage
from penstock.dataflow.ledger import segments
from penstock.dataflow.ledger.blobs import read_blob
from penstock.dataflow.ledger.recorded import RecordedRun
from penstock.dataflow.ledger.store import location_of
from penstock.dataflow.ledger.tables import Tables
from penstock.dataflow.records import FORGOTTEN_PREFIX, CommitRecord, RowRecord, VersionRecord
from penstock.errors import NotFound, StoreError
from penstock.types import Manifest, PolicyName, RowId, RowPayload
from penstock.wire.codec import decode


def partition_folder(ledger_folder: Path, index: int) -> Path:
    """Ledger folder of an additional partition."""
    return ledger_folder / f"p{index}"


class SealedBatches:
    """Sealed batches of one policy, along its surviving lineage."""

    def __init__(self, recorded: RecordedRun, ledger_folder: Path, policy: PolicyName) -> None:
        self._recorded = recorded
        self._folder = ledger_folder
        self._policy = policy
        newest = recorded.coordinator.scalar(
            "SELECT max(incarnation) FROM incarnations WHERE policy = :policy", policy=policy
        )
        self.lineage: Lineage = recorded.lineage(policy, int(newest or 0))
        """The current lineage."""
        marked = recorded.coordinator.rows(
            "SELECT key FROM meta WHERE key LIKE :keys", keys=f"{FORGOTTEN_PREFIX}%"
        )
        self._gone = {RowId(key.removeprefix(FORGOTTEN_PREFIX)) for (key,) in marked}

    def manifest(self, seq: int) -> Manifest | None:
        found = self._recorded.batch(self._policy, seq)
        return None if found is None else decode(found.manifest, Manifest)

    def commit(self, seq: int) -> CommitRecord | None:
        """The commit of a batch; None when the surviving lineage has not reached it."""
        if seq > self.lineage.seq:
            return None
        commits = self._recorded.commits(self._policy, seq)
        return commits[-1] if commits else None

    def stats(self, commit: CommitRecord) -> dict[str, float]:
        return msgspec.json.decode(commit.stats, type=dict[str, float])

    def version(self, number: int) -> VersionRecord | None:
        """The version with this number on the surviving lineage, published last."""
        found = [
            version
            for version in self.lineage.versions()
            if version.number == number
            and self.lineage.effective_number(version.incarnation, version.number) == number
        ]
        return found[-1] if found else None

    def rows(self, manifest: Manifest) -> Sequence[RowPayload]:
        """Rows in the manifest's order; a row marked as forgotten has no payload."""
        ids = [row.row_id for row in manifest.rows]
        columns = sorted({name for row in manifest.rows for name in row.columns})
        found = self._read(ids, columns)
        if lost := [row_id for row_id in ids if row_id not in self._gone and row_id not in found]:
            raise StoreError(
                f"batch {manifest.consumer}.{manifest.seq}: {len(lost)} of {len(ids)} rows are not "
                f"on disk any more, first {lost[0]}; a run keeps those after its oldest retained "
                "checkpoint"
            )
        return [found.get(row_id, RowPayload(row_id=row_id, payload=None)) for row_id in ids]

    def _read(self, ids: Sequence[RowId], names: Sequence[str]) -> dict[RowId, RowPayload]:
        found: dict[RowId, RowPayload] = {}
        everywhere = {0: self._recorded.coordinator, **self._recorded.partitions}
        for index, tables in everywhere.items():
            folder = partition_folder(self._folder, index) if index else self._folder
            columns = _columns(tables, ids, names)
            for row in tables.read(RowRecord, "row_id IN :ids", ids=[*ids]):
                if row.row_id in self._gone:
                    continue
                try:
                    found[row.row_id] = RowPayload(
                        row_id=row.row_id,
                        payload=_content(folder, row),
                        columns={one.name: _content(folder, one) for one in columns[row.row_id]},
                    )
                except (StoreError, NotFound, OSError):
                    continue  # no longer on disk
        return found


def _columns(
    tables: Tables, ids: Sequence[RowId], names: Sequence[str]
) -> dict[RowId, list[ColumnRecord]]:
    """Columns with these names that have a value, by row."""
    found: dict[RowId, list[ColumnRecord]] = defaultdict(list)
    if names:
        for column in tables.read(ColumnRecord, STORED_COLUMNS_SQL, ids=[*ids], names=list(names)):
            found[column.row_id].append(column)
    return found


def _content(folder: Path, record: RowRecord | ColumnRecord) -> bytes:
    if record.blob:
        return read_blob(folder / "blobs", record.blob)
    return segments.read(folder / "segments", location_of(record))
