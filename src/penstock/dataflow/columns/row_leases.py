# SPDX-License-Identifier: Apache-2.0
"""One reader's rows: the window after its cursor, and the life cycle of a row lease.

A reader has finished every row up to its cursor. After it, the oldest unfinished rows are in memory
and the rest on disk; finished rows are on disk only. No I/O, no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from operator import attrgetter
from types import MappingProxyType
from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.bounds import Count, Id, SafeName, Seconds
from penstock.dataflow.column_records import ReaderRecord, RowLeaseRecord
from penstock.dataflow.core.names import ADMITTED, TRAIN
from penstock.types import RowId

MAX_FINISHED_REQUESTS = 256


class RowTrigger(StrEnum):
    DELIVERED = "delivered"
    """The reader gets a row as soon as it is delivered."""
    ADMITTED = "admitted"
    """The reader gets a row once any policy admits its group."""


class RowLeaseState(StrEnum):
    PENDING = "pending"
    """An input column is missing."""
    WAITING = "waiting"
    """Ready to be leased."""
    LEASED = "leased"
    """Held by a worker."""
    DONE = "done"
    """Acknowledged, or all its output columns exist."""
    DEAD = "dead"
    """Out of attempts, overdue, or an input failed: its missing columns are marked as failed."""
    FREED = "gone"
    """The row was forgotten, or its space cleared."""


class LeaseOutcome(StrEnum):
    NONE = "none"
    """Columns only; the lease continues."""
    DONE = "done"
    FAILED = "failed"
    """Counts against max_attempts."""
    RELEASED = "released"
    """Handed back; does not count as an attempt."""


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
class ReaderRequest:
    """`PUT /v1/readers/{name}`: the columns a reader reads and writes, and its limits. Creates or
    updates the reader; a known one keeps its cursor."""

    reads: Annotated[tuple[Id, ...], Meta(max_length=64)]
    """Columns a row must have before the reader gets it."""
    writes: Annotated[tuple[Id, ...], Meta(max_length=64)] = ()
    """Columns it adds; empty for an exporter."""
    space: SafeName = TRAIN
    on: RowTrigger = RowTrigger.DELIVERED
    deadline_s: Seconds = 0.0
    """Seconds from arrival (or admission) until its missing columns become failed(overdue); 0 for
    no deadline."""
    ttl_s: Seconds = 12.0
    """A lease expires after `ttl_s` without renewal."""
    max_attempts: Count = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderSpec(ReaderRequest):
    name: str

    @property
    def inputs(self) -> tuple[str, ...]:
        return (*self.reads, ADMITTED) if self.on is RowTrigger.ADMITTED else self.reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A worker's claim to a row. `arrival` distinguishes a key that was cleared and put again."""

    row_id: RowId
    arrival: Count
    epoch: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedRow:
    claim: Claim
    attempt: int


@dataclass(slots=True)
class LeaseHolder:
    """The current or last worker of a row that was leased at least once."""

    epoch: int = 0
    attempt: int = 0
    """Failed and expired attempts; returned rows do not count."""
    worker: str = ""
    request_id: str = ""
    expires_at: float = 0.0
    error: str = ""


@dataclass(slots=True, eq=False)
class RowLease:
    """An unfinished row in a reader's window, leased or not."""

    row_id: RowId
    arrival: int
    deadline_start: float
    """When its deadline started; 0 if it has not."""
    missing_inputs: int
    """One bit per input column that does not exist yet."""
    pending_outputs: int
    """One bit per output column that has neither a value nor a failure."""
    state: RowLeaseState = RowLeaseState.PENDING
    holder: LeaseHolder | None = None

    def move(self, state: RowLeaseState) -> None:
        assert state in LEASE_TRANSITIONS[self.state], (
            f"row lease cannot move from {self.state} to {state}"
        )
        self.state = state

    @property
    def is_terminal(self) -> bool:
        return self.state in TERMINAL_STATES


def _bits(names: Iterable[str]) -> dict[str, int]:
    return {name: 1 << position for position, name in enumerate(names)}


@dataclass(slots=True)
class Reader:
    """State of one reader: its cursor, window, queues and leases."""

    terms: ReaderSpec
    declared_at: float
    cursor: int = 0
    """Every row up to this arrival is finished; the saved cursor may lag behind."""
    loaded_through: int = 0
    """Rows up to this arrival are in the window or finished; later ones are on disk only."""
    last_seen_at: float = float("-inf")
    """When a worker last called."""
    grace_until: float = 0.0
    """No row is overdue before this: after a restart, workers get time to reconnect."""
    window: dict[RowId, RowLease] = field(default_factory=dict[RowId, RowLease])
    waiting: deque[RowLease] = field(default_factory=deque[RowLease])
    leased: dict[RowId, RowLease] = field(default_factory=dict[RowId, RowLease])
    requests: dict[str, set[RowId]] = field(default_factory=dict[str, set[RowId]])
    """Leased rows by the request that leased them."""
    finished_requests: deque[str] = field(
        default_factory=lambda: deque[str](maxlen=MAX_FINISHED_REQUESTS)
    )
    """Requests whose rows are all finished; a late retry gets no rows."""
    by_arrival: deque[RowLease] = field(default_factory=deque[RowLease])
    """In order of arrival. Finished entries stay in the three queues until they are popped."""
    by_deadline: deque[RowLease] = field(default_factory=deque[RowLease])
    """In order of `deadline_start`."""
    saved_cursor: int = 0
    input_bits: dict[str, int] = field(default_factory=dict[str, int])
    output_bits: dict[str, int] = field(default_factory=dict[str, int])

    def __post_init__(self) -> None:
        self.input_bits = _bits(self.terms.inputs)
        self.output_bits = _bits(self.terms.writes)

    def add(self, row_lease: RowLease) -> None:
        """Add a row that is not leased; call in order of arrival."""
        self.window[row_lease.row_id] = row_lease
        self.by_arrival.append(row_lease)
        if row_lease.deadline_start:
            self.by_deadline.append(row_lease)
        if not row_lease.missing_inputs:
            row_lease.move(RowLeaseState.WAITING)
            self.waiting.append(row_lease)

    def grant(self, row_lease: RowLease, expires_at: float) -> None:
        """Lease a row to its holder."""
        assert row_lease.holder is not None, "a granted row has a holder"
        row_lease.move(RowLeaseState.LEASED)
        row_lease.holder.expires_at = expires_at
        self.leased[row_lease.row_id] = row_lease
        self.requests.setdefault(row_lease.holder.request_id, set()).add(row_lease.row_id)

    def end(self, row_lease: RowLease, state: RowLeaseState) -> None:
        """Move a row to a terminal state and out of the window."""
        if row_lease.state is RowLeaseState.LEASED:
            self.end_lease(row_lease)
        row_lease.move(state)
        del self.window[row_lease.row_id]
        self._trim()

    def end_lease(self, row_lease: RowLease) -> None:
        """End the lease; the caller decides the next state."""
        assert row_lease.holder is not None, "a leased row has a holder"
        del self.leased[row_lease.row_id]
        held = self.requests[row_lease.holder.request_id]
        held.remove(row_lease.row_id)
        if not held:
            del self.requests[row_lease.holder.request_id]
            self.finished_requests.append(row_lease.holder.request_id)

    def next_waiting(self) -> RowLease | None:
        while self.waiting:
            row_lease = self.waiting.popleft()
            if row_lease.state is RowLeaseState.WAITING:
                return row_lease
        return None

    def advance(self) -> int:
        """Move the cursor past finished rows and return it."""
        while self.by_arrival and self.by_arrival[0].is_terminal:
            self.by_arrival.popleft()
        self.cursor = self.by_arrival[0].arrival - 1 if self.by_arrival else self.loaded_through
        return self.cursor

    def extend_for_stall(self, gap_s: float, now: float) -> None:
        """Extend leases and deadlines by a pause of `gap_s` that has just ended. None gets more
        than its full time from now, so those that started after the pause gain nothing."""
        ttl_s = self.terms.ttl_s
        self.last_seen_at = min(self.last_seen_at, now)
        self.grace_until = min(self.grace_until + gap_s, now + 2 * ttl_s)
        for row_lease in self.window.values():
            if row_lease.deadline_start:
                row_lease.deadline_start = min(row_lease.deadline_start + gap_s, now)
            if row_lease.holder is not None:
                row_lease.holder.expires_at = min(row_lease.holder.expires_at + gap_s, now + ttl_s)

    def sort_by_deadline(self) -> None:
        self.by_deadline = deque(sorted(self.by_deadline, key=attrgetter("deadline_start")))

    def _trim(self) -> None:
        """Drop finished entries, so that one slow row cannot make the queues grow."""
        limit = 2 * len(self.window) + 64
        if len(self.by_arrival) > limit:
            self.by_arrival = _unfinished(self.by_arrival)
        if len(self.by_deadline) > limit:
            self.by_deadline = _unfinished(self.by_deadline)
        if len(self.waiting) > limit:
            self.waiting = _unfinished(self.waiting)

    def record(self) -> ReaderRecord:
        names = (self.terms.reads, self.terms.writes)
        reads, writes = (msgspec.json.encode(columns).decode() for columns in names)
        fields = asdict(self.terms)
        fields.update(reads=reads, writes=writes)
        return ReaderRecord(**fields, cursor=self.cursor, at=self.declared_at)

    def lease_record(self, row_lease: RowLease, now: float) -> RowLeaseRecord:
        holder = row_lease.holder or LeaseHolder()
        return RowLeaseRecord(
            reader=self.terms.name,
            row_id=row_lease.row_id,
            arrival=row_lease.arrival,
            epoch=holder.epoch,
            attempt=holder.attempt,
            worker=holder.worker,
            request_id=holder.request_id,
            state=row_lease.state,
            at=now,
            error=holder.error,
        )


def _unfinished(queue: Iterable[RowLease]) -> deque[RowLease]:
    return deque(row_lease for row_lease in queue if not row_lease.is_terminal)


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


def _names(text: str) -> tuple[str, ...]:
    return tuple(msgspec.json.decode(text, type=list[str]))
