# SPDX-License-Identifier: Apache-2.0
"""The schema of a ledger on disk: created by the first start, checked by every later one.

Owns the format number in `meta`. A ledger of another format is refused and left untouched.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias

from penstock.dataflow.column_records import BundleRecord, ColumnRecord, ItemRecord
from penstock.dataflow.ledger.codec import CHECKSUM, codec, quoted
from penstock.dataflow.records import (
    FORMAT,
    RECORDS,
    FateRecord,
    GroupRecord,
    MetaRecord,
    Record,
    RowRecord,
)
from penstock.errors import StoreError

if TYPE_CHECKING:
    from penstock.dataflow.ledger.postgres import PostgresDatabase
    from penstock.dataflow.ledger.sqlite import SqliteDatabase

Database: TypeAlias = "SqliteDatabase | PostgresDatabase"
INDEXES: tuple[tuple[str, type[Record], tuple[str, ...]], ...] = (
    ("rows_by_group", RowRecord, ("group_id",)),
    ("rows_by_arrival", RowRecord, ("space", "arrival")),
    ("rows_by_segment", RowRecord, ("segment",)),
    ("items_by_arrival", ItemRecord, ("space", "arrival")),
    ("groups_by_state", GroupRecord, ("partition", "state")),
    ("groups_by_task", GroupRecord, ("task_key",)),
    ("fates_by_state", FateRecord, ("consumer", "state")),
    ("fates_by_arrival", FateRecord, ("consumer", "arrival")),
    ("fates_by_batch", FateRecord, ("consumer", "seq", "group_id")),
    ("columns_by_segment", ColumnRecord, ("segment",)),
    ("bundles_by_segment", BundleRecord, ("segment",)),
)

Columns = Mapping[str, set[str]]
"""Names of the columns of each existing table."""


def prepare(database: Database) -> None:
    """Create the tables of a new ledger, or check the tables of an existing one."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for table, column in database.read(database.COLUMNS, {}):
        found[table].add(column)
    query = "SELECT value FROM meta WHERE key = 'format'"
    formats = database.read(query, {}) if "meta" in found else []
    if not formats:
        _require_empty(database, found)
        _create(database, found)
    elif formats != [(str(FORMAT),)]:
        raise StoreError(
            f"this ledger has format {formats[0][0]}, this penstock reads format {FORMAT}; "
            "continue the run with the penstock that wrote it, or start a new run in another folder"
        )
    else:
        _require_complete(found)


def _require_empty(database: Database, found: Columns) -> None:
    """Tables without a format are left from a first start that was interrupted."""
    for kind in RECORDS:
        if kind.TABLE in found and database.read(f'SELECT 1 FROM "{kind.TABLE}" LIMIT 1', {}):
            raise StoreError(
                f"the ledger database is damaged: table {kind.TABLE} has records, but the ledger "
                "has no format; restore it from a backup"
            )


def _require_complete(found: Columns) -> None:
    """A table or column missing because of corruption must not be recreated empty."""
    for kind in RECORDS:
        columns = {column.name for column in codec(kind).columns}
        if missing := columns - found.get(kind.TABLE, set()):
            raise StoreError(
                f"the ledger database is damaged: table {kind.TABLE} lacks "
                f"{', '.join(sorted(missing))}; restore it from a backup"
            )


def _create(database: Database, found: Columns) -> None:
    """Tables of an interrupted first start are empty, so all are created from scratch."""
    with database.begin():
        for kind in RECORDS:
            if kind.TABLE in found:
                database.execute(f'DROP TABLE "{kind.TABLE}"', {})
        for statement in _definitions(database):
            database.execute(statement, {})
        version = MetaRecord(key="format", value=str(FORMAT))
        database.write(MetaRecord, codec(MetaRecord).encode([version]))


def _definitions(database: Database) -> Iterator[str]:
    for kind in RECORDS:
        columns = "".join(
            f'"{column.name}" {database.TYPES[column.type]}'
            f"{' NOT NULL' * (column.name in kind.KEY)}"
            f"{' DEFAULT 0' * (column.name == CHECKSUM)}, "
            for column in codec(kind).columns
        )
        option = database.ITEMS_OPTION if kind is ItemRecord else ""
        key = f"PRIMARY KEY ({quoted(kind.KEY)})"
        yield f'CREATE TABLE "{kind.TABLE}" ({columns}{key}){option}'
    for name, kind, columns in INDEXES:
        yield f'CREATE INDEX {name} ON "{kind.TABLE}" ({quoted(columns)})'
