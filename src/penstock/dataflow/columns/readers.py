# SPDX-License-Identifier: Apache-2.0
"""Readers and their workers: leases, redelivery, attempts and deadlines, each reader for itself.
A pure state machine.

Never loses a row: what a worker does not finish is handed out again, until its attempts or its
deadline are over; then the columns it owed are failed for good, so nobody waits for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from penstock.dataflow.column_records import ReaderRecord, TakeRecord
from penstock.dataflow.columns.cells import Cell, compare
from penstock.dataflow.columns.row_leases import Claim, Lease, Reader, ReaderTerms, Take, TakeState
from penstock.dataflow.columns.row_window import Shelf
from penstock.dataflow.core.leasing import DeliveryStatus
from penstock.dataflow.records import Erasure, Journal
from penstock.errors import Conflict, NotFound
from penstock.types import RowId

ATTEMPTS = "attempts"
OVERDUE = "overdue"
MAX_ERROR = 2_000
PAGES_PER_TICK = 4
"""Of a backlog that is overdue: it drains, and the event loop stays free."""

Status = tuple[DeliveryStatus, str]
"""And why, for people."""
LATE: Status = (DeliveryStatus.FENCED, "the lease ended before")
STORED: Status = (DeliveryStatus.STORED, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGrant:
    """The right to work on one row, until the lease ends."""

    row_id: RowId
    arrival: int
    epoch: int
    attempt: int


class Readers:
    def __init__(self, shelf: Shelf, journal: Journal) -> None:
        self._shelf = shelf
        self._journal = journal
        self._stood_still_s = 0.0
        """Not yet made good; the next tick does."""

    # --- declaring ----------------------------------------------------------------------------

    def declare(self, terms: ReaderTerms, now: float) -> Reader:
        """A new reader starts with the oldest row there is. Known ones keep their cursor; their
        times and attempts may change, their columns may not."""
        known = self._shelf.readers.get(terms.name)
        if known is None:
            known = self._shelf.readers[terms.name] = Reader(terms=terms, declared_at=now)
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
                    f"reader {terms.name!r} exists and reads {known.terms.reads} of "
                    f"{known.terms.space!r}, writes {known.terms.writes}; delete it first, or "
                    "choose another name"
                )
            known.terms = terms
            self._journal(known.record())
        return known

    def remove(self, name: str) -> None:
        """Its leases end; columns it wrote stay. Declaring the name again starts anew, once this
        is durable."""
        self.reader(name)
        del self._shelf.readers[name]
        self._journal(Erasure(kind=ReaderRecord, where="name = :name", values={"name": name}))
        self._journal(Erasure(kind=TakeRecord, where="reader = :name", values={"name": name}))

    def reader(self, name: str) -> Reader:
        found = self._shelf.readers.get(name)
        if found is None:
            raise NotFound(f"no reader {name!r}; declare it with PUT /v1/readers/{name}")
        return found

    def has_worker(self, name: str, now: float) -> bool:
        """Did a worker of this reader show itself of late? One with nothing to do asks too."""
        reader = self._shelf.readers.get(name)
        return reader is not None and now - reader.seen_at <= 2 * reader.terms.ttl_s

    # --- leases -------------------------------------------------------------------------------

    def lease(
        self, name: str, worker: str, request_id: str, max_rows: int, now: float
    ) -> list[RowGrant]:
        """Up to n rows; a repeated request gets those it got before and still holds."""
        reader = self.reader(name)
        reader.seen_at = now
        if request_id in reader.requests:
            held = [reader.leased[row_id] for row_id in reader.requests[request_id]]
            return [_grant(take) for take in sorted(held, key=lambda take: take.arrival)]
        if request_id in reader.spent:
            return []
        self._shelf.refill(reader, now)
        grants: list[RowGrant] = []
        while len(grants) < max_rows and (take := reader.next_waiting()) is not None:
            lease = take.lease = take.lease or Lease()
            lease.epoch += 1
            lease.worker, lease.request_id = worker, request_id
            reader.hold(take, now + reader.terms.ttl_s)
            self._journal(reader.take_record(take, now))
            grants.append(_grant(take))
        return grants

    def extend(self, name: str, claims: Iterable[Claim], now: float) -> list[RowId]:
        """Still at work on these; returns those it holds no more."""
        reader = self.reader(name)
        reader.seen_at = now
        lost: list[RowId] = []
        for claim in claims:
            take = _held(reader, claim)
            if take is None or take.lease is None:
                lost.append(claim.row_id)
            else:
                take.lease.expires_at = now + reader.terms.ttl_s
        return lost

    def write(
        self, name: str, claim: Claim, cells: Sequence[Cell], worker: str, now: float
    ) -> list[Status]:
        """Columns of a row under lease. One that stands already is compared, lease or not, so a
        repeated call gets the same answer."""
        reader = self.reader(name)
        reader.seen_at = now
        return [self._write_one(reader, claim, cell, f"{name}/{worker}", now) for cell in cells]

    def _write_one(
        self, reader: Reader, claim: Claim, cell: Cell, writer: str, now: float
    ) -> Status:
        bit = reader.writes_bits.get(cell.name)
        if bit is None:
            writes = f"it writes {list(reader.terms.writes)}"
            return DeliveryStatus.INVALID, f"{cell.name!r} is no column of {writer}; {writes}"
        take, space = _held(reader, claim), reader.terms.space
        if take is not None and take.owes & bit:
            self._shelf.land(space, claim.row_id, cell, writer, now)
            return STORED
        standing = self._shelf.columns.standing(space, [claim.row_id], [cell.name])
        return compare(standing[claim.row_id, cell.name], cell) if standing else LATE

    def ack(self, name: str, claim: Claim, now: float) -> Status:
        """Done with this row. Refused while a column it promised is missing."""
        reader = self.reader(name)
        take = _held(reader, claim)
        if take is None:
            return LATE
        if take.owes:
            missing = [n for n, bit in reader.writes_bits.items() if take.owes & bit]
            return DeliveryStatus.INVALID, f"columns {missing} are not written yet"
        self._finish(reader, take, now)
        return STORED

    def fail(self, name: str, claim: Claim, error: str, now: float) -> Status:
        """This attempt came to nothing and costs one."""
        reader = self.reader(name)
        take = _held(reader, claim)
        if take is None:
            return LATE
        self._lose(reader, take, error, now)
        return STORED

    def release(self, name: str, claim: Claim, now: float) -> Status:
        """Hand a row back unharmed."""
        reader = self.reader(name)
        take = _held(reader, claim)
        if take is None:
            return LATE
        self._give_back(reader, take, now)
        return STORED

    def _lose(self, reader: Reader, take: Take, error: str, now: float) -> None:
        lease = take.lease
        assert lease is not None, "only leased rows are lost"
        lease.attempt += 1
        lease.error = error[:MAX_ERROR]
        if lease.attempt >= reader.terms.max_attempts and not _is_complete(reader, take):
            self._shelf.kill(reader, take, ATTEMPTS, lease.error, now)
        else:
            self._give_back(reader, take, now)

    def _give_back(self, reader: Reader, take: Take, now: float) -> None:
        if _is_complete(reader, take):  # all was written, only the word was missing
            self._finish(reader, take, now)
            return
        reader.let_go(take)
        take.move(TakeState.WAITING)
        reader.waiting.appendleft(take)  # older than most that wait
        self._journal(reader.take_record(take, now))

    def _finish(self, reader: Reader, take: Take, now: float) -> None:
        reader.end(take, TakeState.DONE)
        self._journal(reader.take_record(take, now))

    # --- time ---------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Leases whose worker fell silent, rows that are overdue, cursors that moved."""
        if self._stood_still_s:
            self._shelf.prolong(self._stood_still_s, now)
            self._stood_still_s = 0.0
        for reader in [*self._shelf.readers.values()]:
            for take in reversed([*reader.leased.values()]):  # the oldest is to be next
                if take.lease is not None and take.lease.expires_at < now:
                    self._lose(reader, take, f"worker {take.lease.worker} fell silent", now)
            for _ in range(PAGES_PER_TICK):
                self._shelf.refill(reader, now)
                if not self._expire(reader, now):
                    break
            self._shelf.save_cursor(reader)

    def _expire(self, reader: Reader, now: float) -> int:
        """How many rows were overdue."""
        limit = reader.terms.deadline_s
        num_expired = 0
        if not limit or now < reader.patient_until:
            return num_expired
        while reader.by_age:
            take = reader.by_age[0]
            if not take.is_over and take.since + limit > now:
                break
            reader.by_age.popleft()
            if take.is_over:
                continue
            num_expired += 1
            if _is_complete(reader, take):
                self._finish(reader, take, now)
            else:
                self._shelf.kill(reader, take, OVERDUE, _late(take, limit), now)
        return num_expired

    def forgive(self, gap_s: float) -> None:
        """The service itself stood still: nobody could be heard meanwhile, so nobody was silent."""
        self._stood_still_s += gap_s
        for reader in self._shelf.readers.values():
            reader.seen_at += gap_s


def _held(reader: Reader, claim: Claim) -> Take | None:
    take = reader.leased.get(claim.row_id)
    if take is None or take.lease is None or take.arrival != claim.arrival:
        return None
    return take if take.lease.epoch == claim.epoch else None


def _is_complete(reader: Reader, take: Take) -> bool:
    return bool(reader.writes_bits) and not take.owes


def _late(take: Take, limit: float) -> str:
    error = "" if take.lease is None else take.lease.error
    return f"not written within {limit:g} s" + (f"; last error: {error}" if error else "")


def _grant(take: Take) -> RowGrant:
    assert take.lease is not None, "granted means leased"
    return RowGrant(
        row_id=take.row_id,
        arrival=take.arrival,
        epoch=take.lease.epoch,
        attempt=take.lease.attempt + 1,
    )
