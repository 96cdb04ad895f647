# SPDX-License-Identifier: Apache-2.0
"""The records of a ledger as SQL tables: one table per kind, full-record upserts, filtered reads.

One code path for SQLite and PostgreSQL. Knows SQL and nothing of payload, threads or the event
loop."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sqlite3
import types
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import chain
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, ClassVar, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import crc32c
import msgspec
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects import postgresql, sqlite

from penstock.dataflow.column_records import BundleRecord, ColumnRecord, ItemRecord
from penstock.dataflow.ledger.postgres import array, connect
from penstock.dataflow.ledger.read_pool import ReadPool
from penstock.dataflow.ledger.schema import prepare
from penstock.dataflow.ledger.wal import check_wal
from penstock.dataflow.records import (
    FORMAT,
    RECORDS,
    Deletion,
    FateRecord,
    GroupRecord,
    MetaRecord,
    Record,
    RowRecord,
)
from penstock.errors import StoreError
from penstock.types import RowId

R = TypeVar("R")
CHECKSUM = "checksum"
"""CRC32C of a record, since SQLite has no page checksums. Never 0: SQLite fills in defaults for
fields missing from a damaged record. Items have none, since their bundle's checksum covers them."""
LOCATION_FIELDS = frozenset({"segment", "offset"})
"""Changed by compaction alone; the payload there has its own checksum and digest."""
MAX_ROWS_PER_STATEMENT = 64
VERIFY_STEPS = 100_000
"""SQLite VM steps between two checks for a pending close."""

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
    return sa.Text if _is_json(hint) or issubclass(hint, StrEnum) else _COLUMN_TYPES[hint]


def _is_json(hint: Any) -> bool:
    """Stored as JSON text."""
    return get_origin(hint) in (Mapping, tuple)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    name: str
    path: str
    """Attribute of the record; `summary.reward` for a field of a nested record."""
    hint: Any


@functools.cache
def _columns(kind: type[Any]) -> tuple[_Column, ...]:
    """One column per field; a nested record adds one for each of its fields."""
    found: list[_Column] = []
    for name, hint in _fields(kind):
        if dataclasses.is_dataclass(hint):
            inner = _fields(cast(type[Any], hint))
            found += [_Column(name=n, path=f"{name}.{n}", hint=h) for n, h in inner]
        else:
            found.append(_Column(name=name, path=name, hint=hint))
    return tuple(found)


def _fields(kind: type[Any]) -> list[tuple[str, Any]]:
    hints = get_type_hints(kind)
    return [(field.name, hints[field.name]) for field in dataclasses.fields(kind)]


def _table(metadata: sa.MetaData, kind: type[Record]) -> sa.Table:
    return sa.Table(
        kind.TABLE,
        metadata,
        *(
            sa.Column(column.name, _column_type(column.hint), primary_key=column.name in kind.KEY)
            for column in _columns(kind)
        ),
        sa.Column(CHECKSUM, sa.BigInteger, server_default="0"),
        sqlite_with_rowid=kind
        is not ItemRecord,  # small and many: WITHOUT ROWID keeps key and row in one tree
    )


METADATA = sa.MetaData()
TABLES: dict[type[Record], sa.Table] = {kind: _table(METADATA, kind) for kind in RECORDS}
sa.Index("rows_by_group", TABLES[RowRecord].c.group_id)
sa.Index("rows_by_arrival", TABLES[RowRecord].c.space, TABLES[RowRecord].c.arrival)
sa.Index("items_by_arrival", TABLES[ItemRecord].c.space, TABLES[ItemRecord].c.arrival)
sa.Index("groups_by_state", TABLES[GroupRecord].c.partition, TABLES[GroupRecord].c.state)
sa.Index("fates_by_state", TABLES[FateRecord].c.consumer, TABLES[FateRecord].c.state)
sa.Index("fates_by_arrival", TABLES[FateRecord].c.consumer, TABLES[FateRecord].c.arrival)
sa.Index("rows_by_segment", TABLES[RowRecord].c.segment)
_BATCH = (TABLES[FateRecord].c[name] for name in ("consumer", "seq", "group_id"))
sa.Index("fates_by_batch", *_BATCH)
sa.Index("columns_by_segment", TABLES[ColumnRecord].c.segment)
sa.Index("bundles_by_segment", TABLES[BundleRecord].c.segment)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowMove:
    """Updates a row's payload location. Applies only if the row still has the old location, so a
    row that was deleted or put again meanwhile is not changed."""

    TABLE: ClassVar[str] = "rows"
    KEY: ClassVar[tuple[str, ...]] = ("row_id", "segment", "offset")

    to_segment: int
    to_offset: int
    row_id: RowId
    segment: int
    offset: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ColumnMove:
    """As RowMove, for the value of a column."""

    TABLE: ClassVar[str] = "columns"
    KEY: ClassVar[tuple[str, ...]] = ("space", "row_id", "name", "segment", "offset")

    to_segment: int
    to_offset: int
    space: str
    row_id: RowId
    name: str
    segment: int
    offset: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BundleMove:
    """As RowMove, for the values of a bundle."""

    TABLE: ClassVar[str] = "bundles"
    KEY: ClassVar[tuple[str, ...]] = ("space", "arrival", "segment", "offset")

    to_segment: int
    to_offset: int
    space: str
    arrival: int
    segment: int
    offset: int


MOVE_RECORDS: tuple[type[Record], ...] = (RowMove, ColumnMove, BundleMove)


def _upsert(kind: type[Record], dialect: sa.Dialect) -> sa.ClauseElement:
    table = TABLES[kind]
    if dialect.name == "postgresql":
        arrays = (sa.bindparam(c.name, type_=postgresql.ARRAY(c.type)) for c in table.c)
        new = sa.func.unnest(*arrays).table_valued(*table.c.keys(), name="new").render_derived()
        statement = postgresql.insert(table).from_select(table.c.keys(), sa.select(*new.c))
    else:
        statement = sqlite.insert(table)
    changed = {c.name: statement.excluded[c.name] for c in table.c if not c.primary_key}
    return statement.on_conflict_do_update(index_elements=list(kind.KEY), set_=changed)


def _move(kind: type[Record]) -> sa.ClauseElement:
    """Parameters in the order of the kind's fields, new location first."""
    table = METADATA.tables[kind.TABLE]
    old = [table.c[name] == sa.bindparam(f"old_{name}") for name in kind.KEY]
    new: dict[str, Any] = {
        "segment": sa.bindparam("to_segment"),
        "offset": sa.bindparam("to_offset"),
    }
    return table.update().where(*old).values(new)


class _Statement:
    """The driver-level write statement of one kind: compiled once, so that a commit of thousands of
    records spends its time in the database."""

    def __init__(self, kind: type[Record], dialect: sa.Dialect) -> None:
        statement = _move(kind) if kind in MOVE_RECORDS else _upsert(kind, dialect)
        self._sql = str(statement.compile(dialect=dialect))
        self._head, _, rest = self._sql.partition(" VALUES ")
        self._placeholders, _, self._tail = rest.partition(" ON CONFLICT ")
        self._by_size: dict[int, str] = {}
        self._values = _encoder(kind)
        self._checked = None if kind in MOVE_RECORDS else _checked_fields(kind)
        # SQLite is in-process; to a server all records go in one round trip, an array per column.
        self._is_columnwise = dialect.name == "postgresql" and kind not in MOVE_RECORDS
        self.key = attrgetter(*kind.KEY)

    def execute(self, connection: sa.Connection, records: Iterable[Record]) -> None:
        rows = [*map(self._values, records)]
        if self._checked is not None:
            rows = [(*row, _checksum(self._checked(row))) for row in rows]
        if self._is_columnwise:
            connection.exec_driver_sql(self._sql, tuple(map(array, zip(*rows, strict=True))))
        elif not self._tail:
            connection.exec_driver_sql(self._sql, rows)
        else:
            self._execute_rows(connection, rows)

    def _execute_rows(self, connection: sa.Connection, rows: Sequence[Sequence[Any]]) -> None:
        """Many rows per statement: SQLite's driver releases the GIL after each statement and waits
        up to 5 ms to get it back, so `executemany` would wait once per row. Bypasses SQLAlchemy,
        which costs more than a small statement."""
        cursor = connection.connection.cursor()
        start, size = 0, MAX_ROWS_PER_STATEMENT
        while start < len(rows):
            left = len(rows) - start
            while size > left:
                # Few sizes, so that the driver's statement cache hits.
                size = left if left < 8 else size // 2
            if size not in self._by_size:
                marks = ", ".join([self._placeholders] * size)
                self._by_size[size] = f"{self._head} VALUES {marks} ON CONFLICT {self._tail}"
            cursor.execute(self._by_size[size], tuple(chain(*rows[start : start + size])))
            start += size


def _encoder(kind: type[Any]) -> Callable[[Record], Sequence[Any]]:
    """The values of a record, one per column; maps and tuples become JSON text."""
    columns = _columns(kind)
    values: Callable[[Record], Sequence[Any]] = attrgetter(*(column.path for column in columns))
    maps = [index for index, column in enumerate(columns) if _is_json(column.hint)]

    def encoded(record: Record) -> Sequence[Any]:
        row = [*values(record)]
        for index in maps:
            row[index] = msgspec.json.encode(row[index]).decode()
        return row

    return encoded if maps else values


_KEYS = {
    "sqlite": "json_each(?) w CROSS JOIN bundles b ON b.space = json_extract(w.value, '$[0]') "
    "AND b.arrival = json_extract(w.value, '$[1]') CROSS JOIN json_each(b.keys) k",
    "postgresql": "json_array_elements(CAST(%s AS json)) w JOIN bundles b ON b.space = w->>0 "
    "AND b.arrival = CAST(w->>1 AS bigint) CROSS JOIN LATERAL (SELECT value, n - 1 AS key FROM "
    "json_array_elements_text(CAST(b.keys AS json)) WITH ORDINALITY AS o (value, n)) k",
}
ITEMS = (
    "INSERT INTO items (space, row_id, arrival, at, bundle, checksum) "
    "SELECT b.space, k.value, b.arrival + k.key, b.at, b.arrival, 0 FROM {keys} WHERE TRUE "
    "ON CONFLICT (space, row_id) DO UPDATE SET arrival = excluded.arrival, at = excluded.at, "
    "bundle = excluded.bundle, checksum = 0"
)
"""Writes the item of each key of some bundles; the database reads the keys from the bundles."""


class _BundleStatement(_Statement):
    def __init__(self, dialect: sa.Dialect) -> None:
        super().__init__(BundleRecord, dialect)
        self._items = ITEMS.format(keys=_KEYS[dialect.name])

    def execute(self, connection: sa.Connection, records: Iterable[Record]) -> None:
        bundles = [*records]
        super().execute(connection, bundles)
        written = msgspec.json.encode([*map(self.key, bundles)]).decode()
        connection.exec_driver_sql(self._items, (written,))


def _checked_fields(kind: type[Any]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """The values covered by a record's checksum. An integer in a float column is read back as a
    float, so it is hashed as one."""
    columns = _columns(kind)
    checked_columns = [column for column in columns if column.name not in LOCATION_FIELDS]
    chosen = itemgetter(*(i for i, c in enumerate(columns) if c.name not in LOCATION_FIELDS))
    floats = [i for i, c in enumerate(checked_columns) if _column_type(c.hint) is sa.Float]
    is_single = len(checked_columns) == 1

    def checked(row: Sequence[Any]) -> Sequence[Any]:
        values = [chosen(row)] if is_single else list(chosen(row))
        for index in floats:
            if values[index].__class__ is int:
                values[index] = float(values[index])
        return values

    return checked


def _checksum(values: Sequence[Any]) -> int:
    return crc32c.crc32c(msgspec.msgpack.encode(values)) or 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _RecordLayout:
    """How the records of one kind are read."""

    select: str
    fields: tuple[tuple[str, type[Any] | None, slice], ...]
    """Name of each field, its nested record type if any, and its columns."""
    bool_columns: tuple[int, ...]
    """Boolean columns; SQLite stores them as numbers."""
    decoders: tuple[tuple[int, Callable[[str], Any]], ...]
    """Decoders for JSON columns, and for enums of a nested record."""
    checked: Callable[[Sequence[Any]], Sequence[Any]] | None
    """None for records without a checksum."""


@functools.cache
def _layout(kind: type[Any]) -> _RecordLayout:
    columns = _columns(kind)
    names = ", ".join(f'"{name}"' for name in (*(column.name for column in columns), CHECKSUM))
    return _RecordLayout(
        select=f"SELECT {names} FROM {kind.TABLE}",
        fields=_field_slices(kind),
        bool_columns=tuple(i for i, column in enumerate(columns) if column.hint is bool),
        decoders=tuple(
            (index, _decoder(column.hint))
            for index, column in enumerate(columns)
            if _is_json(column.hint) or (column.path != column.name and _is_enum(column.hint))
        ),
        checked=None if kind is ItemRecord else _checked_fields(kind),
    )


def _field_slices(kind: type[Any]) -> tuple[tuple[str, type[Any] | None, slice], ...]:
    found: list[tuple[str, type[Any] | None, slice]] = []
    start = 0
    for name, hint in _fields(kind):
        held = cast(type[Any], hint) if dataclasses.is_dataclass(hint) else None
        width = 1 if held is None else len(_fields(held))
        found.append((name, held, slice(start, start + width)))
        start += width
    return tuple(found)


def _is_enum(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, StrEnum)


def _decoder(hint: Any) -> Callable[[str], Any]:
    return msgspec.json.Decoder(hint).decode if _is_json(hint) else hint


def _record(kind: type[R], row: list[Any]) -> R:
    shape = _layout(kind)
    for index, decode in shape.decoders:
        row[index] = decode(row[index])
    values: dict[str, Any] = {}
    for name, held, columns in shape.fields:
        if held is None:
            values[name] = row[columns.start]
        else:
            names = (field.name for field in dataclasses.fields(held))
            values[name] = held(**dict(zip(names, row[columns], strict=True)))
    return kind(**values)


class Tables:
    """The records of one database: full-record writes, filtered reads. Knows nothing of payload."""

    def __init__(self, engine: sa.Engine, writer: sa.Connection | None = None) -> None:
        """writer: the only connection that commits, if it holds the ledger's lock."""
        self._engine = engine
        self._writer = writer or engine.connect()
        self._reads = ReadPool(engine)
        self._is_closed = False
        self._statements = {
            kind: _Statement(kind, engine.dialect) for kind in (*RECORDS, *MOVE_RECORDS)
        }
        self._statements[BundleRecord] = _BundleStatement(engine.dialect)
        try:
            with self._begin() as connection:
                if prepare(connection, METADATA):
                    version = MetaRecord(key="format", value=str(FORMAT))
                    self._statements[MetaRecord].execute(connection, [version])
        except BaseException:
            self.close()
            raise

    def commit(self, records: Sequence[Record | Deletion]) -> None:
        """Write all of them in one transaction, deletes last; for equal keys the last record
        wins."""
        newest: dict[type[Record], dict[Any, Record]] = {}
        deletions: list[Deletion] = []
        for record in records:
            if isinstance(record, Deletion):
                deletions.append(record)
                continue
            kind = type(record)
            newest.setdefault(kind, {})[self._statements[kind].key(record)] = record
        with self._begin() as connection:
            for kind, rows in newest.items():
                self._statements[kind].execute(connection, rows.values())
            for erasure in deletions:
                table = TABLES[erasure.kind]
                connection.execute(table.delete().where(sa.text(erasure.where)), erasure.values)

    @contextlib.contextmanager
    def _begin(self) -> Generator[sa.Connection]:
        if self._writer.invalidated:
            raise StoreError(
                "lost the database connection that held the ledger's lock, so another service may "
                "be writing; restart this service"
            )
        with self._writer.begin():
            yield self._writer

    def read(self, kind: type[R], where: str = "", **values: Any) -> list[R]:
        """Records of one table, filtered by an SQL condition with named values."""
        shape = _layout(kind)
        query = f"{shape.select} WHERE {where}" if where else shape.select
        found: list[R] = []
        for *row, checksum in self._reads(query, values):
            for index in shape.bool_columns:
                row[index] = bool(row[index])
            if shape.checked is not None and checksum != _checksum(shape.checked(row)):
                which = ", ".join(map(str, row[:3]))
                table = cast(type[Record], kind).TABLE
                raise StoreError(f"a record of table {table} is damaged: {which}, …")
            found.append(_record(kind, row))
        return found

    def verify(self) -> None:
        """Raise StoreError when the pages of a SQLite file are inconsistent: a record lost from its
        page leaves no checksum behind. Reads the full file, about 2 s per GB, and stops at
        `close()`. Does nothing for a database server, which checks its own pages."""
        if self._engine.dialect.name != "sqlite":
            return
        connection = self._reads.connect()
        connection.set_progress_handler(lambda: self._is_closed, VERIFY_STEPS)
        try:
            [found] = connection.execute("PRAGMA quick_check(1)").fetchone()
        except sqlite3.DatabaseError as error:
            found = str(error)
        finally:
            connection.close()
        if found != "ok" and not self._is_closed:
            raise StoreError(
                f"the ledger's database is damaged: {found}; restore the ledger from a copy"
            )

    def rows(self, query: str, **values: Any) -> list[tuple[Any, ...]]:
        return self._reads(query, values)

    def scalar(self, query: str, **values: Any) -> Any:
        found = self._reads(query, values)
        return found[0][0] if found else None

    def close(self) -> None:
        self._is_closed = True
        self._writer.close()
        self._reads.close()
        self._engine.dispose()


def open_tables(folder: Path, store: str = "sqlite", *, name: str = "penstock") -> Tables:
    """Open a ledger's tables, durable at every commit: in its folder, or in schema `name` of the
    PostgreSQL database at a URL."""
    if store != "sqlite":
        engine, writer = connect(store, name)
        return Tables(engine, writer)
    check_wal(folder / "ledger.db")
    engine = sa.create_engine(f"sqlite:///{folder / 'ledger.db'}")
    event.listen(engine, "connect", _set_pragmas)
    return Tables(engine)


def _set_pragmas(connection: Any, _: Any) -> None:
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "busy_timeout=10000"):
        connection.execute(f"PRAGMA {pragma}")
