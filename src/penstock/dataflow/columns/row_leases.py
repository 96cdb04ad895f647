# SPDX-License-Identifier: Apache-2.0
"""Rows as one reader holds them: its window beyond the cursor, and the life-cycle of a take.

A reader is done with every row up to its cursor. Beyond it, the oldest unfinished rows are in
memory and the rest on disk; finished ones are on disk only. No I/O, no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

import msgspec

from penstock.dataflow.column_records import ReaderRecord, RowLeaseRecord
from penstock.dataflow.core.names import ADMITTED, TRAIN
from penstock.types import RowId

MAX_FINISHED_REQUESTS = 256


class RowTrigger(StrEnum):
    DELIVERED = "delivered"
    """A row is for this reader as soon as it arrives."""
    ADMITTED = "admitted"
    """Only once some policy admitted its group."""


class RowLeaseState(StrEnum):
    PENDING = "pending"
    """A column that the reader needs is not there yet."""
    WAITING = "waiting"
    LEASED = "leased"
    DONE = "done"
    DEAD = "dead"
    """Out of attempts, overdue, or without its input: the columns it owed are failed."""
    FREED = "gone"
    """Freed, or its space was cleared."""


TERMINAL_STATES = frozenset({RowLeaseState.DONE, RowLeaseState.DEAD, RowLeaseState.FREED})
LEASE_TRANSITIONS: Mapping[RowLeaseState, frozenset[RowLeaseState]] = MappingProxyType(
    {
        RowLeaseState.PENDING: frozenset({RowLeaseState.WAITING}) | TERMINAL_STATES,
        RowLeaseState.WAITING: frozenset({RowLeaseState.LEASED}) | TERMINAL_STATES,
        RowLeaseState.LEASED: frozenset({RowLeaseState.WAITING}) | TERMINAL_STATES,
        RowLeaseState.DONE: frozenset(),
        RowLeaseState.DEAD: frozenset(),
        RowLeaseState.FREED: frozenset(),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderSpec:
    """What a reader asks for and what it promises."""

    name: str
    reads: tuple[str, ...]
    """Columns a row must have before the reader gets it."""
    writes: tuple[str, ...] = ()
    """Columns it adds; none for an exporter."""
    space: str = TRAIN
    on: RowTrigger = RowTrigger.DELIVERED
    deadline_s: float = 0.0
    """From arrival (or admission) until columns it did not write are failed(overdue); 0: never."""
    ttl_s: float = 12.0
    """A lease that nobody extends for so long is given to others."""
    max_attempts: int = 3

    @property
    def inputs(self) -> tuple[str, ...]:
        return (*self.reads, ADMITTED) if self.on is RowTrigger.ADMITTED else self.reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One lease of one row; the arrival tells a key that was cleared and put anew."""

    row_id: RowId
    arrival: int
    epoch: int


@dataclass(slots=True)
class LeaseHolder:
    """Of a row that was handed out at least once."""

    epoch: int = 0
    attempt: int = 0
    """Attempts that cost one: failures and expiries, not hand-backs."""
    worker: str = ""
    request_id: str = ""
    expires_at: float = 0.0
    error: str = ""


@dataclass(slots=True, eq=False)
class RowLease:
    row_id: RowId
    arrival: int
    deadline_start: float
    """When its deadline began to run; 0 while it does not."""
    missing_inputs: int
    """One bit per needed column that is not there yet."""
    pending_outputs: int
    """One bit per column of the reader that is not terminal yet."""
    state: RowLeaseState = RowLeaseState.PENDING
    lease: LeaseHolder | None = None

    def move(self, state: RowLeaseState) -> None:
        assert state in LEASE_TRANSITIONS[self.state], (
            f"take cannot go from {self.state} to {state}"
        )
        self.state = state

    @property
    def is_terminal(self) -> bool:
        return self.state in TERMINAL_STATES


def _bits(names: Iterable[str]) -> dict[str, int]:
    return {name: 1 << position for position, name in enumerate(names)}


@dataclass(slots=True)
class Reader:
    terms: ReaderSpec
    declared_at: float
    cursor: int = 0
    """Every row up to this arrival is done with; on disk it may lag behind."""
    loaded_through: int = 0
    """Rows up to this arrival are in the window or finished; later ones are on disk only."""
    last_seen_at: float = float("-inf")
    """When a worker last showed itself."""
    grace_until: float = 0.0
    """No row is overdue before: after a restart workers get the time to come back."""
    window: dict[RowId, RowLease] = field(default_factory=dict[RowId, RowLease])
    waiting: deque[RowLease] = field(default_factory=deque[RowLease])
    leased: dict[RowId, RowLease] = field(default_factory=dict[RowId, RowLease])
    requests: dict[str, set[RowId]] = field(default_factory=dict[str, set[RowId]])
    """Held rows by the request that got them."""
    finished_requests: deque[str] = field(
        default_factory=lambda: deque[str](maxlen=MAX_FINISHED_REQUESTS)
    )
    """Requests that got rows and hold none any more; a late copy gets nothing."""
    by_arrival: deque[RowLease] = field(default_factory=deque[RowLease])
    """By arrival; finished ones are skipped when met, as in the two other queues."""
    by_deadline: deque[RowLease] = field(default_factory=deque[RowLease])
    """By the time their deadline began."""
    saved_cursor: int = 0
    input_bits: dict[str, int] = field(default_factory=dict[str, int])
    output_bits: dict[str, int] = field(default_factory=dict[str, int])

    def __post_init__(self) -> None:
        self.input_bits = _bits(self.terms.inputs)
        self.output_bits = _bits(self.terms.writes)

    def add(self, row_lease: RowLease) -> None:
        """In order of arrival; not yet handed out in this life."""
        self.window[row_lease.row_id] = row_lease
        self.by_arrival.append(row_lease)
        if row_lease.deadline_start:
            self.by_deadline.append(row_lease)
        if not row_lease.missing_inputs:
            row_lease.move(RowLeaseState.WAITING)
            self.waiting.append(row_lease)

    def grant(self, row_lease: RowLease, expires_at: float) -> None:
        """Leased from now on."""
        assert row_lease.lease is not None, "handed out means leased"
        row_lease.move(RowLeaseState.LEASED)
        row_lease.lease.expires_at = expires_at
        self.leased[row_lease.row_id] = row_lease
        self.requests.setdefault(row_lease.lease.request_id, set()).add(row_lease.row_id)

    def end(self, row_lease: RowLease, state: RowLeaseState) -> None:
        if row_lease.state is RowLeaseState.LEASED:
            self.end_lease(row_lease)
        row_lease.move(state)
        del self.window[row_lease.row_id]
        self._trim()

    def end_lease(self, row_lease: RowLease) -> None:
        """The lease is over; what follows, the caller says."""
        assert row_lease.lease is not None, "a leased row has a lease"
        del self.leased[row_lease.row_id]
        held = self.requests[row_lease.lease.request_id]
        held.remove(row_lease.row_id)
        if not held:
            del self.requests[row_lease.lease.request_id]
            self.finished_requests.append(row_lease.lease.request_id)

    def next_waiting(self) -> RowLease | None:
        while self.waiting:
            row_lease = self.waiting.popleft()
            if row_lease.state is RowLeaseState.WAITING:
                return row_lease
        return None

    def advance(self) -> int:
        while self.by_arrival and self.by_arrival[0].is_terminal:
            self.by_arrival.popleft()
        self.cursor = self.by_arrival[0].arrival - 1 if self.by_arrival else self.loaded_through
        return self.cursor

    def extend_for_stall(self, gap_s: float, now: float) -> None:
        """The service stood still for so long, until a moment ago. What began since then was not
        held up: no lease and no deadline gets more than all its time."""
        ttl_s = self.terms.ttl_s
        self.last_seen_at = min(self.last_seen_at, now)
        self.grace_until = min(self.grace_until + gap_s, now + 2 * ttl_s)
        for row_lease in self.window.values():
            if row_lease.deadline_start:
                row_lease.deadline_start = min(row_lease.deadline_start + gap_s, now)
            if row_lease.lease is not None:
                row_lease.lease.expires_at = min(row_lease.lease.expires_at + gap_s, now + ttl_s)

    def sort_by_deadline(self) -> None:
        self.by_deadline = deque(
            sorted(self.by_deadline, key=lambda row_lease: row_lease.deadline_start)
        )

    def _trim(self) -> None:
        """One row that stays for long must not keep all those that came and went behind it."""
        limit = 2 * len(self.window) + 64
        if len(self.by_arrival) > limit:
            self.by_arrival = _unfinished(self.by_arrival)
        if len(self.by_deadline) > limit:
            self.by_deadline = _unfinished(self.by_deadline)
        if len(self.waiting) > limit:
            self.waiting = _unfinished(self.waiting)

    def record(self) -> ReaderRecord:
        terms = self.terms
        return ReaderRecord(
            name=terms.name,
            space=terms.space,
            reads=msgspec.json.encode(terms.reads).decode(),
            writes=msgspec.json.encode(terms.writes).decode(),
            on=terms.on,
            deadline_s=terms.deadline_s,
            ttl_s=terms.ttl_s,
            max_attempts=terms.max_attempts,
            cursor=self.cursor,
            at=self.declared_at,
        )

    def lease_record(self, row_lease: RowLease, now: float) -> RowLeaseRecord:
        lease = row_lease.lease or LeaseHolder()
        return RowLeaseRecord(
            reader=self.terms.name,
            row_id=row_lease.row_id,
            arrival=row_lease.arrival,
            epoch=lease.epoch,
            attempt=lease.attempt,
            worker=lease.worker,
            request_id=lease.request_id,
            state=row_lease.state,
            at=now,
            error=lease.error,
        )


def _unfinished(takes: Iterable[RowLease]) -> deque[RowLease]:
    return deque(row_lease for row_lease in takes if not row_lease.is_terminal)


def reader_from_record(record: ReaderRecord) -> Reader:
    terms = ReaderSpec(
        name=record.name,
        space=record.space,
        reads=_names(record.reads),
        writes=_names(record.writes),
        on=RowTrigger(record.on),
        deadline_s=record.deadline_s,
        ttl_s=record.ttl_s,
        max_attempts=record.max_attempts,
    )
    return Reader(
        terms=terms,
        declared_at=record.at,
        cursor=record.cursor,
        loaded_through=record.cursor,
        saved_cursor=record.cursor,
    )


def holder_from_record(record: RowLeaseRecord) -> LeaseHolder:
    return LeaseHolder(
        epoch=record.epoch,
        attempt=record.attempt,
        worker=record.worker,
        request_id=record.request_id,
        error=record.error,
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(msgspec.json.decode(text, type=list[str]))
