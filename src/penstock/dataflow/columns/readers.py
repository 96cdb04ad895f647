# SPDX-License-Identifier: Apache-2.0
"""Readers and their workers: leases, redelivery, attempts and deadlines, separately for each
reader. A pure state machine.

Never loses a row: a row that a worker does not finish is handed out again until it runs out of
attempts or time. Then its missing columns are marked as failed, so that nothing waits for them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

from penstock.dataflow.column_records import ColumnRecord, ReaderRecord, RowLeaseRecord
from penstock.dataflow.columns.cells import Cell, compare_write
from penstock.dataflow.columns.row_leases import (
    Claim,
    LeasedRow,
    LeaseHolder,
    LeaseOutcome,
    Reader,
    ReaderSpec,
    RowLease,
    RowLeaseState,
)
from penstock.dataflow.columns.row_window import RowWindow
from penstock.dataflow.core.leasing import DeliveryStatus
from penstock.dataflow.records import Deletion, Journal
from penstock.errors import BadRequest, Conflict, NotFound
from penstock.types import RowId

ATTEMPTS = "attempts"
OVERDUE = "overdue"
MAX_ERROR = 2_000
MIN_CHECK_S = 0.5
PAGES_PER_TICK = 8
"""Of all readers, which take turns: limits the work on a backlog per tick, to keep the event loop
responsive."""

Status = tuple[DeliveryStatus, str]
"""The status, and an explanation for people."""
LEASE_ENDED: Status = (DeliveryStatus.FENCED, "the lease has already ended")
STORED: Status = (DeliveryStatus.STORED, "")
StoredColumns = Mapping[tuple[RowId, str], ColumnRecord]


class Readers:
    def __init__(self, row_window: RowWindow, journal: Journal) -> None:
        self._row_window = row_window
        self._journal = journal
        self._stall_s = 0.0
        """Pause of the service that the next tick will add to leases and deadlines."""
        self._num_ticks = 0

    # --- declaring ----------------------------------------------------------------------------

    def declare(self, terms: ReaderSpec, now: float) -> Reader:
        """A new reader starts with the oldest row. An existing one keeps its cursor; its times and
        attempts may change, its columns may not."""
        known = self._row_window.readers.get(terms.name)
        if known is None:
            known = self._row_window.readers[terms.name] = Reader(terms=terms, declared_at=now)
            self._journal(known.record())
        elif known.terms != terms:
            timed = replace(
                known.terms,
                deadline_s=terms.deadline_s,
                ttl_s=terms.ttl_s,
                max_attempts=terms.max_attempts,
            )
            if timed != terms:
                raise Conflict(
                    f"reader {terms.name!r} already exists with other columns (space "
                    f"{known.terms.space!r}, reads {list(known.terms.reads)}, writes "
                    f"{list(known.terms.writes)}); delete it first, or choose another name"
                )
            known.terms = terms
            self._journal(known.record())
        return known

    def remove(self, name: str) -> None:
        """Ends its leases; columns it wrote stay. Once this is durable, the name can be declared
        again and starts with the oldest row."""
        self.reader(name)
        del self._row_window.readers[name]
        self._journal(Deletion(kind=ReaderRecord, where="name = :name", values={"name": name}))
        self._journal(Deletion(kind=RowLeaseRecord, where="reader = :name", values={"name": name}))

    def reader(self, name: str) -> Reader:
        found = self._row_window.readers.get(name)
        if found is None:
            raise NotFound(f"no reader {name!r}; declare it with PUT /v1/readers/{name}")
        return found

    def has_worker(self, name: str, now: float) -> bool:
        """Whether a worker of this reader called recently. Idle workers poll, so they count."""
        reader = self._row_window.readers.get(name)
        return reader is not None and now - reader.last_seen_at <= 4 * check_interval_s(reader)

    # --- leases -------------------------------------------------------------------------------

    def lease(
        self, name: str, worker: str, request_id: str, max_rows: int, now: float
    ) -> list[LeasedRow]:
        """Lease up to `max_rows` rows. A repeated request gets the rows that it still holds."""
        reader = self.reader(name)
        reader.last_seen_at = now
        if request_id in reader.requests:
            held = (reader.leased[row_id] for row_id in reader.requests[request_id])
            return [_leased(row_lease) for row_lease in sorted(held, key=attrgetter("arrival"))]
        if request_id in reader.finished_requests:
            return []
        self._row_window.refill(reader, now)
        grants: list[LeasedRow] = []
        while len(grants) < max_rows and (row_lease := reader.next_waiting()) is not None:
            holder = row_lease.holder = row_lease.holder or LeaseHolder()
            holder.epoch += 1
            holder.worker, holder.request_id = worker, request_id
            reader.grant(row_lease, now + reader.terms.ttl_s)
            self._journal(reader.lease_record(row_lease, now))
            grants.append(_leased(row_lease))
        return grants

    def extend(self, name: str, claims: Iterable[Claim], now: float) -> list[RowId]:
        """Renew these leases; returns the rows whose lease is lost."""
        reader = self.reader(name)
        reader.last_seen_at = now
        lost: list[RowId] = []
        for claim in claims:
            row_lease = _find_lease(reader, claim)
            if row_lease is None or row_lease.holder is None:
                lost.append(claim.row_id)
            else:
                row_lease.holder.expires_at = now + reader.terms.ttl_s
        return lost

    def require_writes(self, name: str, columns: Iterable[str]) -> None:
        """Raise BadRequest for a column that this reader does not write."""
        reader = self.reader(name)
        for column in columns:
            if column not in reader.output_bits and not _is_version(column, reader):
                raise BadRequest(
                    f"reader {name!r} may not write column {column[:128]!r}; GET /v1/readers shows "
                    "the columns that each writes. Nothing of this call was stored"
                )

    def stored(self, name: str, written: Iterable[tuple[Claim, Collection[str]]]) -> StoredColumns:
        """The columns of these writes that exist already, for `write` to compare with."""
        reader = self.reader(name)
        names: dict[RowId, set[str]] = {}
        for claim, columns in written:
            row_lease = _find_lease(reader, claim)
            pending = 0 if row_lease is None else row_lease.pending_outputs
            known = [c for c in columns if not pending & reader.output_bits.get(c, 0)]
            if known:
                names.setdefault(claim.row_id, set()).update(known)
        return self._row_window.columns.existing_of_rows(
            reader.terms.space, {row_id: frozenset(found) for row_id, found in names.items()}
        )

    def write(
        self,
        name: str,
        claim: Claim,
        cells: Sequence[Cell],
        worker: str,
        now: float,
        stored: StoredColumns | None = None,
    ) -> list[Status]:
        """Write columns of a leased row. A column that already exists is compared even without a
        lease, so a repeated call gets the same answer. `stored`: of all writes of a call."""
        reader = self.reader(name)
        reader.last_seen_at = now
        self.require_writes(name, [cell.name for cell in cells])
        if stored is None:
            stored = self.stored(name, [(claim, [cell.name for cell in cells])])
        writer = f"{name}/{worker}"
        return [self._write_one(reader, claim, cell, writer, now, stored) for cell in cells]

    def _write_one(
        self,
        reader: Reader,
        claim: Claim,
        cell: Cell,
        writer: str,
        now: float,
        stored: StoredColumns,
    ) -> Status:
        bit = reader.output_bits.get(cell.name, 0)
        row_lease, space = _find_lease(reader, claim), reader.terms.space
        if row_lease is None or not row_lease.pending_outputs & bit:
            # Of a column that was still to be written when the call came, only what the call wrote.
            existing = self._row_window.columns.unflushed(space, claim.row_id, cell.name)
            existing = existing or stored.get((claim.row_id, cell.name))
            if existing is not None:
                return compare_write(existing, cell)
            if row_lease is None or bit:
                return LEASE_ENDED
        self._row_window.complete(space, claim.row_id, cell, writer, now)
        return STORED

    def end(
        self, name: str, claim: Claim, outcome: LeaseOutcome, now: float, error: str = ""
    ) -> Status:
        """End a lease. DONE is rejected while a column that the reader must write is missing."""
        if outcome is LeaseOutcome.NONE:
            return STORED
        reader = self.reader(name)
        row_lease = _find_lease(reader, claim)
        if row_lease is None:
            return LEASE_ENDED
        if outcome is LeaseOutcome.FAILED:
            self._fail_attempt(reader, row_lease, error, now)
        elif outcome is LeaseOutcome.RELEASED:
            self._requeue(reader, row_lease, now)
        elif pending := row_lease.pending_outputs:
            missing = [n for n, bit in reader.output_bits.items() if pending & bit]
            return DeliveryStatus.INVALID, f"columns {missing} are not written yet"
        else:
            self._finish(reader, row_lease, now)
        return STORED

    def _fail_attempt(self, reader: Reader, row_lease: RowLease, error: str, now: float) -> None:
        holder = row_lease.holder
        assert holder is not None, "only leased rows can fail"
        holder.attempt += 1
        holder.error = error[:MAX_ERROR]
        if holder.attempt >= reader.terms.max_attempts and not _is_complete(reader, row_lease):
            self._row_window.fail_row(reader, row_lease, ATTEMPTS, holder.error, now)
        else:
            self._requeue(reader, row_lease, now)

    def _requeue(self, reader: Reader, row_lease: RowLease, now: float) -> None:
        if _is_complete(reader, row_lease):  # only the acknowledgement is missing
            self._finish(reader, row_lease, now)
            return
        reader.end_lease(row_lease)
        row_lease.move(RowLeaseState.WAITING)
        reader.waiting.appendleft(row_lease)  # it is older than most waiting rows
        self._journal(reader.lease_record(row_lease, now))

    def _finish(self, reader: Reader, row_lease: RowLease, now: float) -> None:
        reader.end(row_lease, RowLeaseState.DONE)
        self._journal(reader.lease_record(row_lease, now))

    # --- time ---------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Expire leases of silent workers and overdue rows, then save the cursors."""
        if self._stall_s:
            self._row_window.extend_for_stall(self._stall_s, now)
            self._stall_s = 0.0
        readers, max_pages = [*self._row_window.readers.values()], PAGES_PER_TICK
        self._num_ticks += 1
        first = self._num_ticks % max(1, len(readers))
        for reader in readers[first:] + readers[:first]:
            for row_lease in reversed([*reader.leased.values()]):  # so the oldest is next
                if row_lease.holder is not None and row_lease.holder.expires_at < now:
                    error = f"worker {row_lease.holder.worker} did not renew its lease"
                    self._fail_attempt(reader, row_lease, error, now)
            while True:
                max_pages -= self._row_window.refill(reader, now, max_pages=max_pages)
                if not self._expire(reader, now) or max_pages <= 0:
                    break
            self._row_window.save_cursor(reader)

    def _expire(self, reader: Reader, now: float) -> int:
        """Fail overdue rows; returns how many there were."""
        limit = reader.terms.deadline_s
        num_expired = 0
        if not limit or now < reader.grace_until:
            return num_expired
        while reader.by_deadline:
            row_lease = reader.by_deadline[0]
            if not row_lease.is_terminal and row_lease.deadline_start + limit > now:
                break
            reader.by_deadline.popleft()
            if row_lease.is_terminal:
                continue
            num_expired += 1
            if _is_complete(reader, row_lease):
                self._finish(reader, row_lease, now)
            else:
                self._row_window.fail_row(
                    reader, row_lease, OVERDUE, _overdue_detail(row_lease, limit), now
                )
        return num_expired

    def extend_deadlines(self, gap_s: float) -> None:
        """Do not count a pause of the service itself as silence of workers."""
        self._stall_s += gap_s
        for reader in self._row_window.readers.values():
            reader.last_seen_at += gap_s


def check_interval_s(reader: Reader) -> float:
    """How often a waiting worker is checked for being there."""
    return max(MIN_CHECK_S, reader.terms.ttl_s / 2)


def _find_lease(reader: Reader, claim: Claim) -> RowLease | None:
    row_lease = reader.leased.get(claim.row_id)
    if row_lease is None or row_lease.holder is None or row_lease.arrival != claim.arrival:
        return None
    return row_lease if row_lease.holder.epoch == claim.epoch else None


def _is_version(name: str, reader: Reader) -> bool:
    """Whether it is a column of this reader with the version of its writer, like `score@7`. No
    reader waits for such a column."""
    column, _, version = name.partition("@")
    return bool(version) and column in reader.output_bits


def _is_complete(reader: Reader, row_lease: RowLease) -> bool:
    return bool(reader.output_bits) and not row_lease.pending_outputs


def _overdue_detail(row_lease: RowLease, limit: float) -> str:
    error = "" if row_lease.holder is None else row_lease.holder.error
    return f"not written within deadline_s={limit:g}" + (f"; last error: {error}" if error else "")


def _leased(row_lease: RowLease) -> LeasedRow:
    holder = row_lease.holder
    assert holder is not None, "a leased row has a holder"
    claim = Claim(row_id=row_lease.row_id, arrival=row_lease.arrival, epoch=holder.epoch)
    return LeasedRow(claim=claim, attempt=holder.attempt + 1)
