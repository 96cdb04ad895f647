# SPDX-License-Identifier: Apache-2.0
"""A ledger's database in a SQLite file, or in memory: one connection writes, a pool reads."""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from penstock.dataflow.ledger.codec import LIST_CONDITION, TYPES, PayloadMove, codec
from penstock.dataflow.records import Record
from penstock.errors import StoreError
from penstock.foreign_ledger import ForeignLedger, open_foreign

MEMORY = ":memory:"
DURABLE = ("journal_mode=WAL", "synchronous=FULL", "busy_timeout=10000")
"""Settings of a ledger that is written."""
MAX_ROWS_PER_STATEMENT = 64
VERIFY_STEPS = 100_000
"""SQLite VM steps between two checks for a pending close."""


class SqliteDatabase:
    """Written by one thread at a time, read by any. Named values (`:name`) mean the same in every
    database; a list value is for `IN :name`."""

    TYPES = TYPES
    COLUMNS = (
        "SELECT m.name, c.name FROM sqlite_master m, pragma_table_info(m.name) c "
        "WHERE m.type = 'table'"
    )
    """Query for table and name of every column."""
    BUNDLE_KEYS = (
        "json_each(:bundles) w CROSS JOIN bundles b ON b.space = json_extract(w.value, '$[0]') "
        "AND b.arrival = json_extract(w.value, '$[1]') CROSS JOIN json_each(b.keys) k"
    )
    """The keys `k` of the bundles `b` in `:bundles`, a JSON list of [space, arrival]."""
    ITEMS_OPTION = " WITHOUT ROWID"
    """Small and many: key and row in one tree."""

    def __init__(self, uri: str, settings: Sequence[str] = ()) -> None:
        self._uri = uri
        self._settings = settings
        self._is_closed = False
        self._idle: list[sqlite3.Connection] = []
        """Connections for reading; at most as many as there were concurrent queries."""
        self._rewritten: dict[str, str] = {}
        self._writer = self._connect()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._uri, uri=True, isolation_level=None, check_same_thread=False
        )
        for setting in self._settings:
            connection.execute(f"PRAGMA {setting}")
        return connection

    @contextmanager
    def begin(self) -> Generator[None]:
        """Durable when the context ends; rolled back on an exception."""
        with self._writer:
            self._writer.execute("BEGIN")
            yield

    def execute(self, statement: str, values: Mapping[str, Any]) -> None:
        self._writer.execute(statement, values)

    def write(self, kind: type[Record], rows: Sequence[Sequence[Any]]) -> None:
        """Upsert encoded records, or apply moves. Many rows per statement: the driver releases the
        GIL after each one and waits up to 5 ms to get it back, so `executemany` would wait once
        per row."""
        if issubclass(kind, PayloadMove):
            self._writer.executemany(_move(kind), rows)
            return
        start, size = 0, MAX_ROWS_PER_STATEMENT
        while start < len(rows):
            left = len(rows) - start
            while size > left:
                # Few sizes, so that the driver's statement cache hits.
                size = left if left < 8 else size // 2
            values = tuple(chain.from_iterable(rows[start : start + size]))
            self._writer.execute(_upsert(kind, size), values)
            start += size

    def read(self, query: str, values: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        sql = self._rewritten.get(query)
        if sql is None:
            # A list is passed as one JSON text, so the statement does not depend on its length.
            sql = LIST_CONDITION.sub(r"IN (SELECT value FROM json_each(:\1))", query)
            self._rewritten[query] = sql
        values = {name: _bindable(value) for name, value in values.items()}
        if self._uri == MEMORY:  # each connection has a separate database
            return self._writer.execute(sql, values).fetchall()
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._connect()
        try:
            rows = self._fetch(connection, sql, values)
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        return rows

    def _fetch(
        self, connection: sqlite3.Connection, sql: str, values: Mapping[str, Any]
    ) -> list[tuple[Any, ...]]:
        return connection.execute(sql, values).fetchall()

    def verify(self) -> None:
        """A record lost from its page leaves no checksum behind. Reads the full file, about 2 s per
        GB, and stops at `close()`."""
        connection = self._connect()
        connection.set_progress_handler(lambda: self._is_closed, VERIFY_STEPS)
        try:
            [found] = connection.execute("PRAGMA quick_check(1)").fetchone()
        except sqlite3.DatabaseError as error:
            found = str(error)
        finally:
            connection.close()
        if found != "ok" and not self._is_closed:
            raise StoreError(f"the ledger database is damaged: {found}; restore it from a backup")

    def close(self) -> None:
        self._is_closed = True
        self._writer.close()
        while self._idle:
            self._idle.pop().close()


class RecordedDatabase(SqliteDatabase):
    """For reading only: a ledger that another user may have made."""

    def __init__(self, path: Path) -> None:
        self._path = path
        super().__init__(str(path))

    def _connect(self) -> ForeignLedger:
        return open_foreign(self._path)

    def _fetch(
        self, connection: sqlite3.Connection, sql: str, values: Mapping[str, Any]
    ) -> list[tuple[Any, ...]]:
        assert isinstance(connection, ForeignLedger)
        return connection.rows(sql, values)


def _bindable(value: Any) -> Any:
    return msgspec.json.encode(value).decode() if isinstance(value, list) else value


@functools.cache
def _upsert(kind: type[Record], num_rows: int) -> str:
    own = codec(kind)
    marks = ", ".join([f"({', '.join('?' * len(own.columns))})"] * num_rows)
    return f'INSERT INTO "{kind.TABLE}" ({own.names}) VALUES {marks} {own.on_conflict()}'


@functools.cache
def _move(kind: type[PayloadMove]) -> str:
    """Values in the order of the kind's fields, new location first."""
    old = " AND ".join(f'"{name}" = ?' for name in kind.KEY)
    return f'UPDATE "{kind.TABLE}" SET segment = ?, "offset" = ? WHERE {old}'
