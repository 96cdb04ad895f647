# SPDX-License-Identifier: Apache-2.0
"""The durable truth: records in SQL, payload in segments, one writer thread, group commit.

A write is acknowledged after the segment's fdatasync and the SQL commit (SQLite WAL,
`synchronous=FULL`: class D1). The next group forms while the running one commits, so there is no
timer and no wait. Any storage error is final: the service stops acknowledging and ends, and its
next life starts from what is on disk.
"""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import os
import queue
import threading
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects.sqlite import insert as upsert

from penstock.dataflow import segments
from penstock.dataflow.records import FORMAT, RECORDS, MetaRecord, Record, RowRecord
from penstock.dataflow.segments import Chunk, Location, SegmentPlan, SegmentWriter
from penstock.errors import StoreError
from penstock.types import RowId

R = TypeVar("R")

_COLUMN_TYPES: dict[Any, type[sa.types.TypeEngine[Any]]] = {
    str: sa.Text,
    int: sa.BigInteger,
    float: sa.Float,
    bytes: sa.LargeBinary,
    bool: sa.Boolean,
}


def _column_type(hint: Any) -> type[sa.types.TypeEngine[Any]]:
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(arg for arg in get_args(hint) if arg is not type(None))
    hint = getattr(hint, "__supertype__", hint)
    return sa.Text if issubclass(hint, StrEnum) else _COLUMN_TYPES[hint]


def _field_names(kind: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _table(metadata: sa.MetaData, kind: type[Record]) -> sa.Table:
    hints = get_type_hints(kind)
    return sa.Table(
        kind.TABLE,
        metadata,
        *(
            sa.Column(name, _column_type(hints[name]), primary_key=name in kind.KEY)
            for name in _field_names(kind)
        ),
    )


METADATA = sa.MetaData()
TABLES: dict[type[Record], sa.Table] = {kind: _table(METADATA, kind) for kind in RECORDS}
sa.Index("rows_by_group", TABLES[RowRecord].c.group_id)


def _upsert(kind: type[Record]) -> Any:
    table = TABLES[kind]
    statement = upsert(table)
    changed = {c.name: statement.excluded[c.name] for c in table.c if not c.primary_key}
    return statement.on_conflict_do_update(index_elements=list(kind.KEY), set_=changed)


class Tables:
    """The records of one database: written whole, read by condition. Knows nothing of payload."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        METADATA.create_all(engine)
        self._fields = {kind: _field_names(kind) for kind in RECORDS}
        self._upserts = {kind: _upsert(kind) for kind in RECORDS}

    def commit(self, records: Sequence[Record]) -> None:
        """All of them in one transaction; of several with one key the last stands."""
        newest: dict[type[Record], dict[tuple[Any, ...], dict[str, Any]]] = {}
        for record in records:
            kind = type(record)
            values = {name: getattr(record, name) for name in self._fields[kind]}
            newest.setdefault(kind, {})[tuple(values[name] for name in kind.KEY)] = values
        with self._engine.begin() as connection:
            for kind, rows in newest.items():
                connection.execute(self._upserts[kind], list(rows.values()))

    def read(self, kind: type[R], where: str = "", **values: Any) -> list[R]:
        """Records of one table, filtered by an SQL condition with named values."""
        table = TABLES[cast(type[Record], kind)]
        query = sa.select(table)
        if where:
            lists = [name for name, value in values.items() if isinstance(value, list)]
            expanding: list[Any] = [sa.bindparam(name, expanding=True) for name in lists]
            query = query.where(sa.text(where).bindparams(*expanding))
        with self._engine.connect() as connection:
            return [kind(**row) for row in connection.execute(query, values).mappings()]

    def rows(self, query: str, **values: Any) -> list[tuple[Any, ...]]:
        with self._engine.connect() as connection:
            return [tuple(row) for row in connection.execute(sa.text(query), values)]

    def scalar(self, query: str, **values: Any) -> Any:
        with self._engine.connect() as connection:
            return connection.execute(sa.text(query), values).scalar()

    def close(self) -> None:
        self._engine.dispose()


@dataclass(slots=True)
class _Write:
    records: Sequence[Record]
    chunks: list[Chunk]
    done: asyncio.Future[None]


class Ledger:
    """Opened by one process at a time; a second one is refused."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(folder)
        self.segments_folder = folder / "segments"
        engine = sa.create_engine(f"sqlite:///{folder / 'ledger.db'}")
        event.listen(engine, "connect", _set_pragmas)
        self.tables = Tables(engine)
        self._check_format()
        self._plan = SegmentPlan(self.segments_folder)
        self._placed: list[Chunk] = []
        self._queue: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write_groups, name="ledger", daemon=True)
        self._writer.start()
        self.on_failure: Callable[[StoreError], None] = lambda error: None
        """Called on the event loop when storage failed for good."""

    def _check_format(self) -> None:
        found = self.tables.scalar("SELECT value FROM meta WHERE key = 'format'")
        if found is not None and int(found) > FORMAT:
            raise StoreError(
                f"this ledger has format {found}, this penstock reads up to {FORMAT}; "
                "run the newer penstock that wrote it"
            )

    # --- writing ------------------------------------------------------------------------------

    def place(self, payload: bytes) -> Location:
        """Where this payload will lie. It goes to disk with the next write, whoever makes it, so
        no record can ever point at bytes that were left out."""
        location, chunk = self._plan.place(payload)
        self._placed.append(chunk)
        return location

    def write(self, records: Sequence[Record]) -> asyncio.Future[None]:
        """Durable when the future is done, with all payload placed before. In order of call."""
        done = asyncio.get_running_loop().create_future()
        chunks, self._placed = self._placed, []
        if not records and not chunks:
            done.set_result(None)
        else:
            self._queue.put(_Write(records, chunks, done))
        return done

    def flush(self) -> asyncio.Future[None]:
        """Done when every write made so far is durable: for answers that repeat an earlier
        decision."""
        done = asyncio.get_running_loop().create_future()
        self._queue.put(_Write((), [], done))
        return done

    def _write_groups(self) -> None:
        """consumes: writes of all callers · produces: one fsynced group at a time
        waits for: the first write · woken by: `write()`"""
        writer = SegmentWriter(self.segments_folder)
        while True:
            group = self._next_group()
            if not group:
                writer.close()
                return
            try:
                chunks = [chunk for write in group for chunk in write.chunks]
                if chunks:
                    writer.append(chunks)
                records = [record for write in group for record in write.records]
                if records:
                    self.tables.commit(records)
            except Exception as error:
                self._fail(group, error)
                return
            _resolve(group)

    def _next_group(self) -> list[_Write]:
        group: list[_Write] = []
        item = self._queue.get()
        while item is not None:
            group.append(item)
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return group
        if group:
            self._queue.put(None)
        return group

    def _fail(self, group: list[_Write], error: Exception) -> None:
        failure = StoreError(f"the ledger cannot be written: {type(error).__name__}: {error}")
        failure.__cause__ = error
        loop = group[0].done.get_loop()

        def tell() -> None:
            for write in group:
                if not write.done.done():
                    write.done.set_exception(failure)
            self.on_failure(failure)

        loop.call_soon_threadsafe(tell)

    def close(self) -> None:
        self._queue.put(None)
        self._writer.join()
        self.tables.close()
        os.close(self._lock)

    # --- reading ------------------------------------------------------------------------------

    def row(self, row_id: RowId) -> RowRecord | None:
        found = self.tables.read(RowRecord, "row_id = :row_id", row_id=row_id)
        return found[0] if found else None

    def payload(self, row: RowRecord) -> bytes:
        location = Location(segment=row.segment, offset=row.offset, length=row.length)
        return segments.read(self.segments_folder, location)

    def stamp(self) -> list[Record]:
        """Format and service epoch for this start, to be written before anything else."""
        epoch = (
            int(self.tables.scalar("SELECT value FROM meta WHERE key = 'service_epoch'") or 0) + 1
        )
        return [
            MetaRecord(key="format", value=str(FORMAT)),
            MetaRecord(key="service_epoch", value=str(epoch)),
        ]


def _resolve(group: list[_Write]) -> None:
    def tell() -> None:
        for write in group:
            if not write.done.done():
                write.done.set_result(None)

    group[0].done.get_loop().call_soon_threadsafe(tell)


def _set_pragmas(connection: Any, _: Any) -> None:
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "busy_timeout=10000"):
        connection.execute(f"PRAGMA {pragma}")


def _lock(folder: Path) -> int:
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise StoreError(
            f"another dataflow service has {folder} open; only one may write a ledger"
        ) from None
    return descriptor
