# SPDX-License-Identifier: Apache-2.0
"""The records of a ledger as SQL tables: one table per kind, upserted whole, read by condition.

Knows SQL and nothing of payload, threads or the event loop."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects.sqlite import insert as upsert

from penstock.dataflow.records import RECORDS, Record, RowRecord

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


def open_tables(folder: Path) -> Tables:
    """The tables of a ledger folder, durable at every commit."""
    engine = sa.create_engine(f"sqlite:///{folder / 'ledger.db'}")
    event.listen(engine, "connect", _set_pragmas)
    return Tables(engine)


def _set_pragmas(connection: Any, _: Any) -> None:
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "busy_timeout=10000"):
        connection.execute(f"PRAGMA {pragma}")
