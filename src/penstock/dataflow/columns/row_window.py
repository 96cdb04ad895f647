# SPDX-License-Identifier: Apache-2.0
"""Rows in front of their readers: which have arrived, which columns they have, who may take them.

A pure state machine; facts go out through the journal, terminal columns as Landed events. Each
reader sees rows in order of arrival through a bounded window; the rest waits on disk. Knows
nothing of workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from penstock.dataflow.column_records import ColumnRecord, TakeRecord
from penstock.dataflow.columns.cells import Cell, failed_cell, number_cell
from penstock.dataflow.columns.column_store import Columns
from penstock.dataflow.columns.pages import PagedRow, Pages, ReadersLeft
from penstock.dataflow.columns.row_leases import On, Reader, Take, TakeState, lease_of, reader_of
from penstock.dataflow.core.completion import Landed
from penstock.dataflow.core.names import ADMITTED, TRAIN
from penstock.dataflow.records import Erasure, Journal
from penstock.types import RowId

WINDOW = 65_536
"""Unfinished rows of one reader in memory; the rest wait on disk."""
PAGE = 512
LOW = 128
"""With fewer rows to hand out, the next page is read."""
MAX_STALLS = 64
"""Remembered, for rows that come back from disk."""
INPUT = "input"
"""A column that the reader needs is itself failed."""


class Shelf:
    def __init__(
        self, columns: Columns, pages: Pages, journal: Journal, *, window: int = WINDOW
    ) -> None:
        self.readers: dict[str, Reader] = {}
        self.columns = columns
        self.last_arrival = 0
        self.durable_to = 0
        """Rows up to this arrival are on disk; set after a flush."""
        self._pages = pages
        self._journal = journal
        self._window = window
        self._newest: dict[str, int] = {}
        self._stalls: deque[tuple[float, float]] = deque(maxlen=MAX_STALLS)
        """When the service stood still: until when, for how long."""
        self._landed: list[Landed] = []

    def drain(self) -> list[Landed]:
        """Columns of rollout rows that became terminal since the last call."""
        landed, self._landed = self._landed, []
        return landed

    def of(self, space: str) -> list[Reader]:
        return [reader for reader in self.readers.values() if reader.terms.space == space]

    # --- rows come and go ---------------------------------------------------------------------

    def next_arrival(self, num: int = 1) -> int:
        """The first of so many that follow one another."""
        first = self.last_arrival + 1
        self.last_arrival += num
        return first

    def arrived(
        self, space: str, row_id: RowId, arrival: int, columns: Iterable[str], now: float
    ) -> None:
        """A row with these columns; its record is journaled by the caller, in order of arrival."""
        self.arrived_together(space, (row_id,), arrival, columns, now)

    def arrived_together(
        self, space: str, row_ids: Sequence[RowId], first: int, columns: Iterable[str], now: float
    ) -> None:
        """Rows with the same columns, one arrival after another."""
        before = self._newest.get(space, 0)
        self._newest[space] = first + len(row_ids) - 1
        born = frozenset(columns)
        for reader in self.of(space):
            if reader.loaded_to < before:
                continue
            for arrival, row_id in enumerate(row_ids, first):
                if len(reader.window) >= self._window:
                    break
                reader.loaded_to = arrival
                row = PagedRow(row_id=row_id, arrival=arrival, at=now, born=born)
                self._enter(reader, row, {}, now)

    def admitted(self, row_ids: Sequence[RowId], now: float) -> None:
        """Some policy admitted these rollout rows; a second one changes nothing."""
        if not any(reader.terms.on is On.ADMITTED for reader in self.of(TRAIN)):
            return
        standing = self.columns.standing(TRAIN, row_ids, (ADMITTED,))
        for row_id in row_ids:
            if (row_id, ADMITTED) not in standing:
                self.land(TRAIN, row_id, number_cell(ADMITTED, now), "dataflow", now)

    def forget(self, space: str, row_ids: Iterable[RowId]) -> None:
        """Freed: final for every consumer, so nobody reads them again."""
        for row_id in row_ids:
            self.columns.forget(space, row_id)
            for reader in self.of(space):
                take = reader.window.get(row_id)
                if take is not None:
                    reader.end(take, TakeState.GONE)
                    self._erase_take(reader, take)

    def clear(self, space: str) -> None:
        """Every row of this space is gone; readers go on with what is put next."""
        for reader in self.of(space):
            for take in [*reader.window.values()]:
                reader.end(take, TakeState.GONE)
            reader.loaded_to = max(reader.loaded_to, self._newest.get(space, 0))
            self.save_cursor(reader)

    def _erase_take(self, reader: Reader, take: Take) -> None:
        if take.lease is not None:
            values = {"reader": reader.terms.name, "row_id": take.row_id}
            where = "reader = :reader AND row_id = :row_id"
            self._journal(Erasure(kind=TakeRecord, where=where, values=values))

    # --- columns ------------------------------------------------------------------------------

    def land(self, space: str, row_id: RowId, cell: Cell, writer: str, now: float) -> None:
        """A column becomes terminal; the caller knows that nothing stands in its place."""
        self.columns.land(space, row_id, cell, writer, now)
        if space == TRAIN and cell.name != ADMITTED:
            self._landed.append(
                Landed(
                    row_id=row_id,
                    name=cell.name,
                    failed=cell.failed,
                    value=cell.value,
                    digest=cell.digest,
                )
            )
        for reader in self.of(space):
            take = reader.window.get(row_id)
            if take is not None:
                self._notice(reader, take, cell, now)

    def _notice(self, reader: Reader, take: Take, cell: Cell, now: float) -> None:
        """A column of a row in this reader's window became terminal."""
        if cell.name in reader.writes_bits:
            take.owes &= ~reader.writes_bits[cell.name]
            # A worker that holds the row acknowledges it; nobody else needs to do it any more.
            if not take.owes and take.state is not TakeState.LEASED:
                reader.end(take, TakeState.DONE)
                return
        bit = reader.needs_bits.get(cell.name, 0)
        if not take.lacks & bit:
            return
        if cell.failed:
            self.kill(reader, take, INPUT, _no_input(cell.name, cell.failed), now)
            return
        take.lacks &= ~bit
        if cell.name == ADMITTED:
            take.since = now
            reader.by_age.append(take)
        if not take.lacks:
            take.move(TakeState.WAITING)
            reader.waiting.append(take)

    def kill(self, reader: Reader, take: Take, kind: str, detail: str, now: float) -> None:
        """This reader will never finish the row: what it owed is failed for good."""
        reader.end(take, TakeState.DEAD)
        self._journal(reader.take_record(take, now))
        for name, bit in reader.writes_bits.items():
            if take.owes & bit:
                cell = failed_cell(name, kind, detail)
                self.land(reader.terms.space, take.row_id, cell, reader.terms.name, now)

    # --- rows on disk -------------------------------------------------------------------------

    def refill(self, reader: Reader, now: float, upto: int = 0) -> None:
        """Load rows while few wait to be handed out, or up to one that must be known."""
        newest = self._newest.get(reader.terms.space, 0)
        while reader.loaded_to < newest and len(reader.window) < self._window:
            if len(reader.waiting) >= LOW and reader.loaded_to >= upto:
                return
            if not self._load_page(reader, now):
                return

    def _load_page(self, reader: Reader, now: float) -> bool:
        """False when no more is on disk yet."""
        terms = reader.terms
        rows = self._pages(terms.name, terms.space, reader.loaded_to, PAGE)
        is_last = len(rows) < PAGE
        if rows:
            reader.loaded_to = rows[-1].arrival
        if is_last:
            on_disk = min(self.durable_to, self._newest[terms.space])
            reader.loaded_to = max(reader.loaded_to, on_disk)
        rows = [row for row in rows if not self.columns.is_gone(terms.space, row.row_id)]
        names = (*terms.needs, *terms.writes)
        alone = self.columns.alone(terms.space, [row.row_id for row in rows], names)
        for row in rows:
            there = ((name, alone.get((row.row_id, name))) for name in names)
            self._enter(reader, row, {name: c for name, c in there if c is not None}, now)
        if terms.on is On.ADMITTED:
            reader.sort_ages()
        return not is_last

    def _enter(
        self, reader: Reader, row: PagedRow, columns: Mapping[str, ColumnRecord], now: float
    ) -> None:
        """Judge a row for this reader: finished, without hope, ready, or to be waited for."""
        there = row.born | columns.keys()
        owes = sum(bit for name, bit in reader.writes_bits.items() if name not in there)
        if reader.writes_bits and not owes:
            return
        take = Take(
            row_id=row.row_id,
            arrival=row.arrival,
            since=self._held_up(_since(reader, row, columns), now),
            lacks=sum(bit for name, bit in reader.needs_bits.items() if name not in there),
            owes=owes,
            lease=None if row.take is None else lease_of(row.take),
        )
        reader.add(take)
        failed = [c for name, c in columns.items() if c.failed and name in reader.needs_bits]
        if failed:
            self.kill(reader, take, INPUT, _no_input(failed[0].name, failed[0].failed), now)
        elif row.take is not None and row.take.state == TakeState.LEASED:
            last = reader.waiting.pop()
            assert last is take, "a row that was handed out had its columns"
            reader.hold(take, now + reader.terms.ttl_s)  # after a restart: a full ttl

    # --- time ---------------------------------------------------------------------------------

    def prolong(self, gap_s: float, now: float) -> None:
        """The service stood still for so long: leases and deadlines of all rows, in memory or on
        disk, stood still with it."""
        self._stalls.append((now, gap_s))
        for reader in self.readers.values():
            reader.prolong(gap_s, now)

    def _held_up(self, since: float, now: float) -> float:
        """When a deadline that began then would have begun, had the service never stood still."""
        gaps = (gap_s for ended_at, gap_s in self._stalls if since < ended_at)
        return min(since + sum(gaps), now) if since else since

    # --- cursors and restart ------------------------------------------------------------------

    def save_cursor(self, reader: Reader) -> None:
        """Finished rows stand on disk one by one until now; behind the cursor they need not."""
        cursor = reader.advance()
        if cursor > reader.saved_cursor:
            reader.saved_cursor = cursor
            self._journal(reader.record())
            values = {"reader": reader.terms.name, "cursor": cursor}
            where = "reader = :reader AND arrival <= :cursor"
            self._journal(Erasure(kind=TakeRecord, where=where, values=values))

    def restore(self, left: ReadersLeft, now: float) -> None:
        """Rows are loaded only as far as somebody holds them; the rest when it is asked for."""
        self._newest = dict(left.newest)
        self.readers = {record.name: reader_of(record) for record in left.readers}
        cursors = (reader.cursor for reader in self.readers.values())
        self.last_arrival = max([*left.newest.values(), *cursors], default=0)
        self.durable_to = self.last_arrival
        for name, reader in self.readers.items():
            reader.patient_until = now + 2 * reader.terms.ttl_s
            upto = left.held.get(name, 0)
            if upto > reader.loaded_to:
                self.refill(reader, now, upto)


def _since(reader: Reader, row: PagedRow, columns: Mapping[str, ColumnRecord]) -> float:
    """When the deadline of this row began for this reader; 0 while it does not run."""
    since = row.at
    if reader.terms.on is On.ADMITTED:
        admitted = columns.get(ADMITTED)
        since = 0.0 if admitted is None else admitted.value or 0.0
    return max(since, reader.declared_at) if since else 0.0


def _no_input(name: str, kind: str) -> str:
    return f"its input {name!r} is failed({kind})"
