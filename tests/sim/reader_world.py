# SPDX-License-Identifier: Apache-2.0
"""Readers, columns and spaces under virtual time, over tables in memory: no threads, no disk.

What a command journaled is durable after `settle`; a crash rebuilds everything from the tables
through the code that a real restart uses.
"""

from __future__ import annotations

from penstock.dataflow.column_records import (
    BundleRecord,
    ColumnRecord,
    ItemRecord,
    ReaderRecord,
    RowLeaseRecord,
    SpaceRecord,
)
from penstock.dataflow.columns.bundles import BlobLike
from penstock.dataflow.columns.cells import Cell
from penstock.dataflow.columns.column_store import Columns
from penstock.dataflow.columns.pages import load_saved_readers
from penstock.dataflow.columns.readers import Readers
from penstock.dataflow.columns.row_window import RowWindow
from penstock.dataflow.columns.spaces import Spaces
from penstock.dataflow.ledger.payloads import MemoryPayloads
from penstock.dataflow.ledger.segments import Location
from penstock.dataflow.ledger.tables import Tables, open_memory_tables
from penstock.dataflow.records import (
    FORGOTTEN_PREFIX,
    Deletion,
    FreedRecord,
    MetaRecord,
    Record,
    RowRecord,
    gone_key,
)
from penstock.types import DropReason, GroupId, NodeId, OutcomeKind, RowId, RowSummary


def wipe(tables: Tables) -> None:
    """Emptying tables is faster than making them."""
    rows = (ColumnRecord, ItemRecord, BundleRecord, SpaceRecord, RowRecord, FreedRecord)
    kept = (*rows, ReaderRecord, RowLeaseRecord)
    marks = Deletion(
        kind=MetaRecord, where="key LIKE :keys", values={"keys": f"{FORGOTTEN_PREFIX}%"}
    )
    tables.commit([marks, *(Deletion(kind=kind, where="1 = 1", values={}) for kind in kept)])


ELSEWHERE = Location(segment=1, offset=0, length=1)


def rollout_row(
    row_id: RowId,
    arrival: int,
    now: float,
    reward: float | None,
    location: Location = ELSEWHERE,
) -> RowRecord:
    group_id, slot, epoch = row_id.split(".")
    return RowRecord(
        summary=RowSummary(
            row_id=row_id,
            digest="d",
            outcome=OutcomeKind.COMPLETED,
            reward=reward,
            sampled={},
            versions={},
        ),
        group_id=GroupId(group_id),
        slot=int(slot),
        epoch=int(epoch),
        node_id=NodeId("n"),
        segment=location.segment,
        offset=location.offset,
        length=location.length,
        delivered_at=now,
        arrival=arrival,
    )


def no_blobs(name: str, blob: BlobLike) -> Cell:
    raise AssertionError("no row of these tests names a blob")


class ReaderWorld:
    def __init__(self, *, window: int = 65_536, tables: Tables | None = None) -> None:
        self.tables = open_memory_tables() if tables is None else tables
        wipe(self.tables)
        self.payloads = MemoryPayloads()
        self.window = window
        self.now = 1000.0
        self.journaled: list[Record | Deletion] = []
        """Since the last `settle`."""
        self.start()

    def start(self) -> None:
        self.journaled.clear()

        def journal(record: Record | Deletion) -> None:
            self.journaled.append(record)

        self.columns = Columns(self.tables, journal, self._place)
        self.row_window = RowWindow(self.columns, self.tables, journal, window=self.window)
        self.readers = Readers(self.row_window, journal)
        self.spaces = Spaces(self.row_window, self.columns, journal)
        self.spaces.restore(self.tables)
        self.row_window.restore(load_saved_readers(self.tables), self.now)

    crash = start
    """What was not settled is gone."""

    def _place(self, payload: bytes) -> Location:
        chunk = self.payloads.place(payload)
        self.payloads.append([chunk])
        return chunk.location

    def settle(self) -> None:
        self.tables.commit(self.journaled)
        self.journaled.clear()

    def flush(self) -> None:
        """As the service's timer does: afterwards the tables answer for all that was decided."""
        self.columns.cut()
        upto = self.row_window.last_arrival
        self.settle()
        self.columns.release()
        self.row_window.durable_through = upto

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.readers.tick(self.now)

    def arrive(self, row_id: str, reward: float | None = None) -> int:
        arrival = self.row_window.next_arrival()
        self.journaled.append(rollout_row(RowId(row_id), arrival, self.now, reward))
        initial_columns = {"turns"} if reward is None else {"turns", "reward"}
        self.row_window.add_rows("train", (RowId(row_id),), arrival, initial_columns, self.now)
        return arrival

    def free(self, row_id: str) -> None:
        """No trainer needs its group any more; readers still do."""
        group_id = GroupId(row_id.partition(".")[0])
        self.journaled.append(FreedRecord(group_id=group_id, at=self.now))

    def forget(self, row_id: str) -> None:
        """As the service does for a session that an operator erases."""
        key = gone_key(RowId(row_id))
        self.journaled.append(MetaRecord(key=key, value=DropReason.FORGOTTEN))
        self.row_window.forget("train", [RowId(row_id)])
