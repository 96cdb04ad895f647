# SPDX-License-Identifier: Apache-2.0
"""A process's disk: group commits that are atomic, take time, and may fail or be cut off.

What is durable is kept twice: as records in memory, which the laws read after every event, and in
the real SQL tables, which a process reads when it starts.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from tests.sim.events import EventLoop

from penstock.dataflow.ledger.sqlite import MEMORY, SqliteDatabase
from penstock.dataflow.ledger.tables import Tables
from penstock.dataflow.records import RECORDS, Deletion, Record

R = TypeVar("R")
Entry = Record | Deletion
Key = tuple[Any, ...]
Watch = Callable[["Disk", Record], None]

_TERM = re.compile(r"^(\w+) (=|<=|>=|<|>) :(\w+)$")
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}


class PooledTables(Tables):
    """The real tables; what became durable is written to them when somebody reads."""

    def __init__(self) -> None:
        self.unwritten: list[Sequence[Entry]] = []
        super().__init__(SqliteDatabase(MEMORY))

    def empty(self) -> None:
        self.unwritten = []
        self.commit([Deletion(kind=kind, where="TRUE", values={}) for kind in RECORDS])

    def sync(self) -> None:
        """Commits that follow each other are written as one where that is the same."""
        batch: list[Entry] = []
        for entries in self.unwritten:
            batch += entries
            if any(isinstance(entry, Deletion) for entry in entries):
                self.commit(batch)
                batch = []
        if batch:
            self.commit(batch)
        self.unwritten = []

    def read(self, kind: type[R], where: str = "", **values: Any) -> list[R]:
        self.sync()
        return super().read(kind, where, **values)

    def rows(self, query: str, **values: Any) -> list[tuple[Any, ...]]:
        self.sync()
        return super().rows(query, **values)

    def scalar(self, query: str, **values: Any) -> Any:
        self.sync()
        return super().scalar(query, **values)


_spare: list[PooledTables] = []
"""Making 26 tables takes longer than a whole run; emptied ones are used again."""


def return_tables(tables: PooledTables) -> None:
    _spare.append(tables)


def borrow_tables() -> PooledTables:
    if not _spare:
        return PooledTables()
    tables = _spare.pop()
    tables.empty()
    return tables


class Disk:
    def __init__(self, engine: EventLoop, name: str, watch: Watch) -> None:
        self.name = name
        self.records: dict[type[Record], dict[Key, Record]] = {}
        self.fails_next = False
        self.slow_s = 0.0
        self.on_failure: Callable[[], None] = lambda: None
        self._engine = engine
        self._watch = watch
        self.tables = borrow_tables()
        self._queued: list[tuple[Sequence[Entry], Callable[[], None]]] = []
        self._running: list[tuple[Sequence[Entry], Callable[[], None]]] = []
        self._turn = 0

    def of(self, kind: type[R]) -> dict[Key, R]:
        return cast(dict[Key, R], self.records.setdefault(cast(type[Record], kind), {}))

    @property
    def is_quiet(self) -> bool:
        return not self._queued and not self._running

    def close(self) -> None:
        return_tables(self.tables)

    # --- group commit ---------------------------------------------------------------------------

    def write(self, entries: Sequence[Entry], done: Callable[[], None]) -> None:
        """`done` is called when this, and all before it, is durable."""
        self._queued.append((entries, done))
        if self.is_idle:
            self._begin()

    @property
    def is_idle(self) -> bool:
        return not self._running

    def _begin(self) -> None:
        if not any(entries for entries, _ in self._queued):
            waiting, self._queued = self._queued, []
            for _, done in waiting:
                done()
            return
        self._running, self._queued = self._queued, []
        turn = self._turn
        delay_s = self.slow_s or self._engine.between(0.001, 0.01)
        self._engine.at(delay_s, "", lambda: self._finish(turn))

    def _finish(self, turn: int) -> None:
        if turn != self._turn:
            return  # the process died meanwhile
        if self.fails_next:
            self.fails_next = False
            self.on_failure()
            return
        finished, self._running = self._running, []
        self._durable([entry for entries, _ in finished for entry in entries])
        for _, done in finished:
            done()
            if turn != self._turn:
                return
        if self.is_idle and self._queued:
            self._begin()

    def crash(self) -> None:
        """A commit under way is there or not, whole; what waited behind it is gone."""
        self._turn += 1
        running, self._running, self._queued = self._running, [], []
        if running and self._engine.chance(0.5):
            self._durable([entry for entries, _ in running for entry in entries])

    def _durable(self, entries: Sequence[Entry]) -> None:
        self.tables.unwritten.append(entries)
        for entry in entries:
            if isinstance(entry, Deletion):
                self._erase(entry)
            else:
                self._watch(self, entry)
                key = tuple(getattr(entry, name) for name in entry.KEY)
                self.records.setdefault(type(entry), {})[key] = entry

    def _erase(self, erasure: Deletion) -> None:
        kept = self.records.get(erasure.kind, {})
        terms = [_term(text, erasure.values) for text in erasure.where.split(" AND ")]
        gone = [
            key
            for key, record in kept.items()
            if all(test(getattr(record, field), value) for field, test, value in terms)
        ]
        for key in gone:
            del kept[key]


def _term(text: str, values: Mapping[str, Any]) -> tuple[str, Callable[[Any, Any], bool], Any]:
    match = _TERM.match(text.strip())
    assert match, f"the simulated disk cannot read the condition {text!r}"
    field, sign, name = match.groups()
    return field, _OPERATORS[sign], values[name]
