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

from penstock.dataflow.column_records import ReaderRecord, TakeRecord
from penstock.dataflow.core.names import ADMITTED, TRAIN
from penstock.types import RowId

SPENT_REQUESTS = 256


class On(StrEnum):
    DELIVERED = "delivered"
    """A row is for this reader as soon as it arrives."""
    ADMITTED = "admitted"
    """Only once some policy admitted its group."""


class TakeState(StrEnum):
    PENDING = "pending"
    """A column that the reader needs is not there yet."""
    WAITING = "waiting"
    LEASED = "leased"
    DONE = "done"
    DEAD = "dead"
    """Out of attempts, overdue, or without its input: the columns it owed are failed."""
    GONE = "gone"
    """Freed, or its space was cleared."""


ENDED = frozenset({TakeState.DONE, TakeState.DEAD, TakeState.GONE})
NEXT_TAKE: Mapping[TakeState, frozenset[TakeState]] = MappingProxyType(
    {
        TakeState.PENDING: frozenset({TakeState.WAITING}) | ENDED,
        TakeState.WAITING: frozenset({TakeState.LEASED}) | ENDED,
        TakeState.LEASED: frozenset({TakeState.WAITING}) | ENDED,
        TakeState.DONE: frozenset(),
        TakeState.DEAD: frozenset(),
        TakeState.GONE: frozenset(),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderTerms:
    """What a reader asks for and what it promises."""

    name: str
    reads: tuple[str, ...]
    """Columns a row must have before the reader gets it."""
    writes: tuple[str, ...] = ()
    """Columns it adds; none for an exporter."""
    space: str = TRAIN
    on: On = On.DELIVERED
    deadline_s: float = 0.0
    """From arrival (or admission) until columns it did not write are failed(overdue); 0: never."""
    ttl_s: float = 12.0
    """A lease that nobody extends for so long is given to others."""
    max_attempts: int = 3

    @property
    def needs(self) -> tuple[str, ...]:
        return (*self.reads, ADMITTED) if self.on is On.ADMITTED else self.reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One lease of one row; the arrival tells a key that was cleared and put anew."""

    row_id: RowId
    arrival: int
    epoch: int


@dataclass(slots=True)
class Lease:
    """Of a row that was handed out at least once."""

    epoch: int = 0
    attempt: int = 0
    """Attempts that cost one: failures and expiries, not hand-backs."""
    worker: str = ""
    request_id: str = ""
    expires_at: float = 0.0
    error: str = ""


@dataclass(slots=True, eq=False)
class Take:
    row_id: RowId
    arrival: int
    since: float
    """When its deadline began to run; 0 while it does not."""
    lacks: int
    """One bit per needed column that is not there yet."""
    owes: int
    """One bit per column of the reader that is not terminal yet."""
    state: TakeState = TakeState.PENDING
    lease: Lease | None = None

    def move(self, state: TakeState) -> None:
        assert state in NEXT_TAKE[self.state], f"take cannot go from {self.state} to {state}"
        self.state = state

    @property
    def is_over(self) -> bool:
        return self.state in ENDED


def _bits(names: Iterable[str]) -> dict[str, int]:
    return {name: 1 << position for position, name in enumerate(names)}


@dataclass(slots=True)
class Reader:
    terms: ReaderTerms
    declared_at: float
    cursor: int = 0
    """Every row up to this arrival is done with; on disk it may lag behind."""
    loaded_to: int = 0
    """Rows up to this arrival are in the window or finished; later ones are on disk only."""
    seen_at: float = float("-inf")
    """When a worker last showed itself."""
    patient_until: float = 0.0
    """No row is overdue before: after a restart workers get the time to come back."""
    window: dict[RowId, Take] = field(default_factory=dict[RowId, Take])
    waiting: deque[Take] = field(default_factory=deque[Take])
    leased: dict[RowId, Take] = field(default_factory=dict[RowId, Take])
    requests: dict[str, set[RowId]] = field(default_factory=dict[str, set[RowId]])
    """Held rows by the request that got them."""
    spent: deque[str] = field(default_factory=lambda: deque[str](maxlen=SPENT_REQUESTS))
    """Requests that got rows and hold none any more; a late copy gets nothing."""
    in_order: deque[Take] = field(default_factory=deque[Take])
    """By arrival; finished ones are skipped when met, as in the two other queues."""
    by_age: deque[Take] = field(default_factory=deque[Take])
    """By the time their deadline began."""
    saved_cursor: int = 0
    needs_bits: dict[str, int] = field(default_factory=dict[str, int])
    writes_bits: dict[str, int] = field(default_factory=dict[str, int])

    def __post_init__(self) -> None:
        self.needs_bits = _bits(self.terms.needs)
        self.writes_bits = _bits(self.terms.writes)

    def add(self, take: Take) -> None:
        """In order of arrival; not yet handed out in this life."""
        self.window[take.row_id] = take
        self.in_order.append(take)
        if take.since:
            self.by_age.append(take)
        if not take.lacks:
            take.move(TakeState.WAITING)
            self.waiting.append(take)

    def hold(self, take: Take, expires_at: float) -> None:
        """Leased from now on."""
        assert take.lease is not None, "handed out means leased"
        take.move(TakeState.LEASED)
        take.lease.expires_at = expires_at
        self.leased[take.row_id] = take
        self.requests.setdefault(take.lease.request_id, set()).add(take.row_id)

    def end(self, take: Take, state: TakeState) -> None:
        if take.state is TakeState.LEASED:
            self.let_go(take)
        take.move(state)
        del self.window[take.row_id]
        self._trim()

    def let_go(self, take: Take) -> None:
        """The lease is over; what follows, the caller says."""
        assert take.lease is not None, "a leased row has a lease"
        del self.leased[take.row_id]
        held = self.requests[take.lease.request_id]
        held.remove(take.row_id)
        if not held:
            del self.requests[take.lease.request_id]
            self.spent.append(take.lease.request_id)

    def next_waiting(self) -> Take | None:
        while self.waiting:
            take = self.waiting.popleft()
            if take.state is TakeState.WAITING:
                return take
        return None

    def advance(self) -> int:
        while self.in_order and self.in_order[0].is_over:
            self.in_order.popleft()
        self.cursor = self.in_order[0].arrival - 1 if self.in_order else self.loaded_to
        return self.cursor

    def prolong(self, gap_s: float, now: float) -> None:
        """The service stood still for so long, until a moment ago. What began since then was not
        held up: no lease and no deadline gets more than all its time."""
        ttl_s = self.terms.ttl_s
        self.seen_at = min(self.seen_at, now)
        self.patient_until = min(self.patient_until + gap_s, now + 2 * ttl_s)
        for take in self.window.values():
            if take.since:
                take.since = min(take.since + gap_s, now)
            if take.lease is not None:
                take.lease.expires_at = min(take.lease.expires_at + gap_s, now + ttl_s)

    def sort_ages(self) -> None:
        self.by_age = deque(sorted(self.by_age, key=lambda take: take.since))

    def _trim(self) -> None:
        """One row that stays for long must not keep all those that came and went behind it."""
        limit = 2 * len(self.window) + 64
        if len(self.in_order) > limit:
            self.in_order = _unfinished(self.in_order)
        if len(self.by_age) > limit:
            self.by_age = _unfinished(self.by_age)
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

    def take_record(self, take: Take, now: float) -> TakeRecord:
        lease = take.lease or Lease()
        return TakeRecord(
            reader=self.terms.name,
            row_id=take.row_id,
            arrival=take.arrival,
            epoch=lease.epoch,
            attempt=lease.attempt,
            worker=lease.worker,
            request_id=lease.request_id,
            state=take.state,
            at=now,
            error=lease.error,
        )


def _unfinished(takes: Iterable[Take]) -> deque[Take]:
    return deque(take for take in takes if not take.is_over)


def reader_of(record: ReaderRecord) -> Reader:
    terms = ReaderTerms(
        name=record.name,
        space=record.space,
        reads=_names(record.reads),
        writes=_names(record.writes),
        on=On(record.on),
        deadline_s=record.deadline_s,
        ttl_s=record.ttl_s,
        max_attempts=record.max_attempts,
    )
    return Reader(
        terms=terms,
        declared_at=record.at,
        cursor=record.cursor,
        loaded_to=record.cursor,
        saved_cursor=record.cursor,
    )


def lease_of(record: TakeRecord) -> Lease:
    return Lease(
        epoch=record.epoch,
        attempt=record.attempt,
        worker=record.worker,
        request_id=record.request_id,
        error=record.error,
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(msgspec.json.decode(text, type=list[str]))
