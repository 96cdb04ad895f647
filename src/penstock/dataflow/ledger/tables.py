# SPDX-License-Identifier: Apache-2.0
"""The records of a ledger as SQL tables: one table per kind, full-record upserts, filtered reads.

One code path for SQLite and PostgreSQL. Knows nothing of payload, threads or the event loop."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from penstock.dataflow.column_records import BundleRecord
from penstock.dataflow.ledger.codec import codec
from penstock.dataflow.ledger.schema import Database, prepare
from penstock.dataflow.ledger.sqlite import DURABLE, MEMORY, SqliteDatabase
from penstock.dataflow.ledger.wal import check_wal
from penstock.dataflow.records import Deletion, Record
from penstock.errors import ConfigError

R = TypeVar("R")
ITEMS = (
    "INSERT INTO items (space, row_id, arrival, at, bundle, checksum) "
    "SELECT b.space, k.value, b.arrival + k.key, b.at, b.arrival, 0 FROM {keys} WHERE TRUE "
    "ON CONFLICT (space, row_id) DO UPDATE SET arrival = excluded.arrival, at = excluded.at, "
    "bundle = excluded.bundle, checksum = 0"
)
"""Writes the item of each key of some bundles; the database reads the keys from the bundles."""


class Tables:
    """The records of one database: full-record writes, filtered reads."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._items = ITEMS.format(keys=database.BUNDLE_KEYS)
        try:
            prepare(database)
        except BaseException:
            database.close()
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
            if kind not in newest:
                newest[kind] = {}
            newest[kind][codec(kind).key(record)] = record
        with self._database.begin():
            for kind, by_key in newest.items():
                self._database.write(kind, codec(kind).encode(by_key.values()))
                if kind is BundleRecord:
                    bundles = msgspec.json.encode([*by_key]).decode()
                    self._database.execute(self._items, {"bundles": bundles})
            for deletion in deletions:
                statement = f'DELETE FROM "{deletion.kind.TABLE}" WHERE {deletion.where}'
                self._database.execute(statement, deletion.values)

    def read(self, kind: type[R], where: str = "", **values: Any) -> list[R]:
        """Records of one table, filtered by an SQL condition with named values."""
        query = codec(kind).select + (f" WHERE {where}" if where else "")
        return codec(kind).decode(self._database.read(query, values))

    def rows(self, query: str, **values: Any) -> list[tuple[Any, ...]]:
        return self._database.read(query, values)

    def scalar(self, query: str, **values: Any) -> Any:
        found = self._database.read(query, values)
        return found[0][0] if found else None

    def verify(self) -> None:
        """Raise StoreError when the pages of the database are inconsistent."""
        self._database.verify()

    def close(self) -> None:
        self._database.close()


def open_tables(folder: Path, store: str = "sqlite", *, name: str = "penstock") -> Tables:
    """Open a ledger's tables, durable at every commit: in its folder, or in schema `name` of the
    PostgreSQL database at a URL."""
    if store != "sqlite":
        try:
            from penstock.dataflow.ledger.postgres import PostgresDatabase
        except ModuleNotFoundError:
            message = "a PostgreSQL store needs its driver; pip install 'penstock-rl[postgres]'"
            raise ConfigError(message) from None
        return Tables(PostgresDatabase(store, name))
    path = folder / "ledger.db"
    check_wal(path)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    return Tables(SqliteDatabase(path.absolute().as_uri(), DURABLE))


def open_memory_tables() -> Tables:
    """Tables of this process alone, gone with it."""
    return Tables(SqliteDatabase(MEMORY))
