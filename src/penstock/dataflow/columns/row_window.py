# SPDX-License-Identifier: Apache-2.0
"""The window of unfinished rows that each reader works through: arrivals, available columns,
states.

A pure state machine; changes go to the journal, terminal columns become ColumnCompleted events.
Each reader sees rows in order of arrival through a bounded window; the rest stays on disk. Knows
nothing about workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Container, Iterable, Mapping, Sequence

from penstock.dataflow.column_records import ColumnRecord, RowLeaseRecord
from penstock.dataflow.columns.cells import Cell, failed_cell, number_cell
from penstock.dataflow.columns.column_store import Columns
from penstock.dataflow.columns.pages import SavedReaders, StoredRow, load_page
from penstock.dataflow.columns.row_leases import (
    Reader,
    RowLease,
    RowLeaseState,
    RowTrigger,
    reader_from_record,
)
from penstock.dataflow.core.completion import ColumnCompleted
from penstock.dataflow.core.names import ADMITTED, TRAIN
from penstock.dataflow.ledger.tables import Tables
from penstock.dataflow.records import Deletion, Journal
from penstock.types import RowId

MAX_WINDOW_ROWS = 65_536
"""Unfinished rows of one reader kept in memory; the rest stay on disk."""
SHARED_WINDOWS = 8
"""Full windows that all readers together have which are no stages of the run file."""
PAGE_ROWS = 512
PAGES_PER_CALL = 4
"""Rows that wait for a column may fill a window with nothing that is ready: it takes many calls."""
REFILL_BELOW = 128
"""Load the next page when fewer rows than this are ready."""
MAX_STALLS = 64
"""Service pauses remembered, to correct deadlines of rows loaded from disk."""
INPUT_FAILED = "input"
"""An input column of the reader has failed."""


class RowWindow:
    def __init__(
        self,
        columns: Columns,
        tables: Tables,
        journal: Journal,
        *,
        stages: Collection[str] = (),
        window: int = MAX_WINDOW_ROWS,
    ) -> None:
        """stages: of the run file, by name."""
        self.readers: dict[str, Reader] = {}
        self.columns = columns
        self.last_arrival = 0
        self.durable_through = 0
        """Rows up to this arrival are on disk; set after a flush."""
        self._tables = tables
        self._journal = journal
        self._stages = stages
        self._window = window
        self._newest: dict[str, int] = {}
        self._stalls: deque[tuple[float, float]] = deque(maxlen=MAX_STALLS)
        """Pauses of the service: (end, duration)."""
        self._completed: list[ColumnCompleted] = []

    def pop_completed(self) -> list[ColumnCompleted]:
        """Columns of rollout rows that became terminal since the last call."""
        completed, self._completed = self._completed, []
        return completed

    def of(self, space: str) -> list[Reader]:
        return [reader for reader in self.readers.values() if reader.terms.space == space]

    # --- adding and removing rows -------------------------------------------------------------

    def next_arrival(self, num: int = 1) -> int:
        """Reserve `num` consecutive arrival numbers and return the first."""
        first = self.last_arrival + 1
        self.last_arrival += num
        return first

    def add_rows(
        self, space: str, row_ids: Sequence[RowId], first: int, columns: Iterable[str], now: float
    ) -> None:
        """Add rows with the same columns and consecutive arrival numbers. The caller journals
        their records, in order of arrival."""
        before = self._newest.get(space, 0)
        self._newest[space] = first + len(row_ids) - 1
        readers = self.of(space)
        if not readers:
            return
        initial_columns = frozenset(columns)
        for reader in readers:
            if reader.loaded_through < before:
                continue
            for arrival, row_id in enumerate(row_ids, first):
                if not self._has_room(reader):
                    break
                reader.loaded_through = arrival
                row = StoredRow(
                    row_id=row_id, arrival=arrival, at=now, initial_columns=initial_columns
                )
                self._add_row(reader, row, {}, now)

    def admitted(self, row_ids: Sequence[RowId], now: float) -> None:
        """A policy admitted these rollout rows; later admissions change nothing."""
        if not any(reader.terms.on is RowTrigger.ADMITTED for reader in self.of(TRAIN)):
            return
        existing = self.columns.existing(TRAIN, row_ids, (ADMITTED,))
        for row_id in row_ids:
            if (row_id, ADMITTED) not in existing:
                self.complete(TRAIN, row_id, number_cell(ADMITTED, now), "dataflow", now)

    def forget(self, space: str, row_ids: Iterable[RowId]) -> None:
        """Remove rows from every window, finished or not: no worker may receive them any more."""
        for row_id in row_ids:
            self.columns.forget(space, row_id)
            for reader in self.of(space):
                row_lease = reader.window.get(row_id)
                if row_lease is not None:
                    reader.end(row_lease, RowLeaseState.FREED)
                    self._delete_lease(reader, row_lease)

    def clear(self, space: str) -> None:
        """Remove every row of this space; readers continue with the next row that is put."""
        for reader in self.of(space):
            for row_lease in [*reader.window.values()]:
                reader.end(row_lease, RowLeaseState.FREED)
            reader.loaded_through = max(reader.loaded_through, self._newest.get(space, 0))
            self.save_cursor(reader)

    def _delete_lease(self, reader: Reader, row_lease: RowLease) -> None:
        if row_lease.holder is not None:
            values = {"reader": reader.terms.name, "row_id": row_lease.row_id}
            where = "reader = :reader AND row_id = :row_id"
            self._journal(Deletion(kind=RowLeaseRecord, where=where, values=values))

    # --- columns ------------------------------------------------------------------------------

    def complete(self, space: str, row_id: RowId, cell: Cell, writer: str, now: float) -> None:
        """Store a value or failure of a column that does not exist yet; the caller has checked."""
        self.columns.complete(space, row_id, cell, writer, now)
        if space == TRAIN and cell.name != ADMITTED:
            self._completed.append(
                ColumnCompleted(
                    row_id=row_id,
                    name=cell.name,
                    failed=cell.failed,
                    value=cell.value,
                    digest=cell.digest,
                )
            )
        for reader in self.of(space):
            row_lease = reader.window.get(row_id)
            if row_lease is not None:
                self._on_column(reader, row_lease, cell, now)

    def _on_column(self, reader: Reader, row_lease: RowLease, cell: Cell, now: float) -> None:
        """A column of a row in this reader's window became terminal."""
        if cell.name in reader.output_bits:
            row_lease.pending_outputs &= ~reader.output_bits[cell.name]
            # A worker that holds the row will acknowledge it; otherwise the row is finished.
            if not row_lease.pending_outputs and row_lease.state is not RowLeaseState.LEASED:
                reader.end(row_lease, RowLeaseState.DONE)
                return
        bit = reader.input_bits.get(cell.name, 0)
        if not row_lease.missing_inputs & bit:
            return
        if cell.failed:
            return self._fail_input(reader, row_lease, cell, now)
        row_lease.missing_inputs &= ~bit
        if cell.name == ADMITTED:
            row_lease.deadline_start = now
            reader.by_deadline.append(row_lease)
        if not row_lease.missing_inputs:
            row_lease.move(RowLeaseState.WAITING)
            reader.waiting.append(row_lease)

    def fail_row(
        self, reader: Reader, row_lease: RowLease, kind: str, detail: str, now: float
    ) -> None:
        """This reader will never finish the row: mark its missing columns as failed."""
        reader.end(row_lease, RowLeaseState.DEAD)
        self._journal(reader.lease_record(row_lease, now))
        for name, bit in reader.output_bits.items():
            if row_lease.pending_outputs & bit:
                cell = failed_cell(name, kind, detail)
                self.complete(reader.terms.space, row_lease.row_id, cell, reader.terms.name, now)

    def _fail_input(
        self, reader: Reader, row_lease: RowLease, column: Cell | ColumnRecord, now: float
    ) -> None:
        detail = f"input column {column.name!r} is failed({column.failed})"
        self.fail_row(reader, row_lease, INPUT_FAILED, detail, now)

    # --- rows on disk -------------------------------------------------------------------------

    def may_have_rows(self, reader: Reader) -> bool:
        """Whether a row may be ready for it, in its window or on disk."""
        is_behind = reader.loaded_through < self._newest.get(reader.terms.space, 0)
        return bool(reader.waiting) or (is_behind and self._has_room(reader))

    def _has_room(self, reader: Reader) -> bool:
        room = self._window
        if reader.terms.name not in self._stages:
            shared = SHARED_WINDOWS * self._window // len(self.readers)
            room = min(room, max(PAGE_ROWS, shared))
        return len(reader.window) < room

    def refill(
        self, reader: Reader, now: float, *, upto: int = 0, max_pages: int = PAGES_PER_CALL
    ) -> int:
        """Load rows from disk until enough are ready, and at least up to arrival `upto`; beyond
        it, no more than `max_pages`. Returns the number of pages."""
        newest, num_pages = self._newest.get(reader.terms.space, 0), 0
        while reader.loaded_through < newest and self._has_room(reader):
            has_enough = len(reader.waiting) >= REFILL_BELOW or num_pages >= max_pages
            if has_enough and reader.loaded_through >= upto:
                break
            num_pages += 1
            if not self._load_page(reader, now):
                break
        return num_pages

    def _load_page(self, reader: Reader, now: float) -> bool:
        """Load one page; returns False if it was the last one on disk."""
        terms = reader.terms
        rows, through = load_page(self._tables, reader, PAGE_ROWS)
        is_last = not through
        if is_last:
            on_disk = min(self.durable_through, self._newest[terms.space])
            through = max([on_disk, *(row.arrival for row in rows[-1:])])
        reader.loaded_through = max(reader.loaded_through, through)
        rows = [row for row in rows if not self.columns.is_deleted(terms.space, row.row_id)]
        names = (*terms.inputs, *terms.writes)
        single_columns = self.columns.single_columns(
            terms.space, [row.row_id for row in rows], names
        )
        for row in rows:
            columns = ((name, single_columns.get((row.row_id, name))) for name in names)
            self._add_row(reader, row, {name: c for name, c in columns if c is not None}, now)
        if terms.on is RowTrigger.ADMITTED:
            reader.sort_by_deadline()
        return not is_last

    def _add_row(
        self, reader: Reader, row: StoredRow, columns: Mapping[str, ColumnRecord], now: float
    ) -> None:
        """Add a row to this reader's window as ready, pending or failed; skip it if finished."""
        present = row.initial_columns | columns.keys()
        pending_outputs = _bits_without(reader.output_bits, present)
        if reader.output_bits and not pending_outputs:
            return
        row_lease = RowLease(
            row_id=row.row_id,
            arrival=row.arrival,
            deadline_start=self._shift_for_stalls(_deadline_start(reader, row, columns), now),
            missing_inputs=_bits_without(reader.input_bits, present),
            pending_outputs=pending_outputs,
            holder=row.holder,
        )
        reader.add(row_lease)
        failed = [c for name, c in columns.items() if c.failed and name in reader.input_bits]
        if failed:
            self._fail_input(reader, row_lease, failed[0], now)
        elif row.is_leased:
            last = reader.waiting.pop()
            assert last is row_lease, "a row that was leased has all its inputs"
            reader.grant(row_lease, now + reader.terms.ttl_s)  # after a restart: a full ttl

    # --- time ---------------------------------------------------------------------------------

    def extend_for_stall(self, gap_s: float, now: float) -> None:
        """Extend leases and deadlines of all rows, in memory or on disk, by a pause of the service
        of `gap_s` seconds."""
        self._stalls.append((now, gap_s))
        for reader in self.readers.values():
            reader.extend_for_stall(gap_s, now)

    def _shift_for_stalls(self, deadline_start: float, now: float) -> float:
        """Move the start of a deadline forward by the service pauses since then."""
        gaps = (gap_s for ended_at, gap_s in self._stalls if deadline_start < ended_at)
        return min(deadline_start + sum(gaps), now) if deadline_start else deadline_start

    # --- cursors and restart ------------------------------------------------------------------

    def save_cursor(self, reader: Reader) -> None:
        """Save the cursor if it moved, and delete the lease records up to it."""
        cursor = reader.advance()
        if cursor > reader.saved_cursor:
            reader.saved_cursor = cursor
            self._journal(reader.record())
            values = {"reader": reader.terms.name, "cursor": cursor}
            where = "reader = :reader AND arrival <= :cursor"
            self._journal(Deletion(kind=RowLeaseRecord, where=where, values=values))

    def restore(self, saved: SavedReaders, now: float) -> None:
        """Load rows only up to the newest leased one; the rest is loaded on demand."""
        self._newest = dict(saved.newest)
        self.readers = {record.name: reader_from_record(record) for record in saved.readers}
        cursors = (reader.cursor for reader in self.readers.values())
        self.last_arrival = max([*saved.newest.values(), *cursors], default=0)
        self.durable_through = self.last_arrival
        for name, reader in self.readers.items():
            reader.grace_until = now + 2 * reader.terms.ttl_s
            upto = saved.held.get(name, 0)
            if upto > reader.loaded_through:
                self.refill(reader, now, upto=upto)


def _deadline_start(reader: Reader, row: StoredRow, columns: Mapping[str, ColumnRecord]) -> float:
    """When the deadline of this row started for this reader; 0 if it has not."""
    deadline_start = row.at
    if reader.terms.on is RowTrigger.ADMITTED:
        admitted = columns.get(ADMITTED)
        deadline_start = 0.0 if admitted is None else admitted.value or 0.0
    return max(deadline_start, reader.declared_at) if deadline_start else 0.0


def _bits_without(bits: Mapping[str, int], present: Container[str]) -> int:
    return sum(bit for name, bit in bits.items() if name not in present)
