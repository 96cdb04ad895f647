# SPDX-License-Identifier: Apache-2.0
"""Formats of a ledger on disk: a newer one is refused untouched, an older one gets what it lacks.

A format adds tables, indexes and columns to the one before; a column has the default of its
record's field. What the added ones must hold is filled in by one step per format, in one commit
with the new number. An upgrade that was interrupted is simply continued by the next start.
Records that a step changed have the checksum 0 until the caller gives them theirs.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence, Set
from enum import Enum
from typing import Any

import sqlalchemy as sa

from penstock.dataflow.records import FORMAT, Record, RowRecord
from penstock.errors import StoreError
from penstock.wire.codec import encode, encode_json

NO_FORMAT = 0
"""Of a database that has no ledger yet."""
INSERT_FORMAT = f"INSERT INTO meta (key, value) VALUES ('format', '{FORMAT}')"


def prepare(
    connection: sa.Connection, metadata: sa.MetaData, kinds: Sequence[type[Record]]
) -> bool:
    """Make the database one of this format, new or old; True when it changed."""
    found = _ExistingSchema(connection, metadata)
    if found.format == FORMAT:
        found.require_complete()
    elif found.format == NO_FORMAT:
        found.require_empty()
    elif found.format > FORMAT:
        raise StoreError(
            f"this ledger has format {found.format}, this penstock reads up to {FORMAT}; "
            "run the newer penstock that wrote it"
        )
    _create_missing(connection, metadata, kinds, found)
    if found.format == NO_FORMAT:
        connection.exec_driver_sql(INSERT_FORMAT)
    if found.format == 1:
        _from_1(connection)
    if found.format in (1, 2):
        for statement in FROM_2:
            connection.exec_driver_sql(statement)
    if found.format in (1, 2, 3):
        connection.exec_driver_sql(FROM_3)
    return found.format != FORMAT


class _ExistingSchema:
    """What is there, in three questions, since a server is far away. What a flipped bit hid behind
    another name must not be made anew, empty."""

    def __init__(self, connection: sa.Connection, metadata: sa.MetaData) -> None:
        self._connection = connection
        self._tables = metadata.tables
        known = sa.inspect(connection)
        self.columns = {
            table: {column["name"] for column in columns}
            for (_, table), columns in known.get_multi_columns().items()
        }
        self.indexes = {
            index["name"] for indexes in known.get_multi_indexes().values() for index in indexes
        }
        self.format = self._format()

    def _format(self) -> int:
        if "meta" not in self.columns:
            return NO_FORMAT
        query = sa.text("SELECT value FROM meta WHERE key = 'format'")
        return int(self._connection.execute(query).scalar() or NO_FORMAT)

    def require_complete(self) -> None:
        """A ledger of this format has everything."""
        for name, table in self._tables.items():
            if missing := set(table.columns.keys()) - self.columns.get(name, set()):
                raise StoreError(
                    f"table {name} of this ledger lacks {', '.join(sorted(missing))}: the ledger's "
                    "database is damaged; restore the ledger from a copy"
                )

    def require_empty(self) -> None:
        """Tables without a format are those of a first start that was cut off."""
        for name in self.columns.keys() & self._tables.keys():
            if self._connection.execute(sa.text(f"SELECT 1 FROM {name} LIMIT 1")).scalar():
                raise StoreError(
                    f"this ledger has records in table {name} but no format: its database is "
                    "damaged; restore the ledger from a copy"
                )


def _create_missing(
    connection: sa.Connection,
    metadata: sa.MetaData,
    kinds: Sequence[type[Record]],
    found: _ExistingSchema,
) -> None:
    """Make the tables, columns and indexes that are not there yet."""
    new = [table for table in metadata.sorted_tables if table.name not in found.columns]
    metadata.create_all(connection, tables=new, checkfirst=False)
    for kind in kinds:
        if known := found.columns.get(kind.TABLE):
            _add_columns(connection, kind, metadata.tables[kind.TABLE], known)
    for table in metadata.tables.values():
        for index in table.indexes:
            if table not in new and index.name not in found.indexes:
                index.create(connection)


def _add_columns(
    connection: sa.Connection, kind: type[Record], table: sa.Table, known: Set[str]
) -> None:
    defaults = _defaults(kind)
    for column in table.columns:
        if column.name in known:
            continue
        if column.primary_key or column.name not in defaults:
            raise StoreError(
                f"table {kind.TABLE} of this ledger has no column {column.name}, and rows without "
                "it mean nothing; the ledger is damaged or was never one of penstock"
            )
        _add_column(connection, table, column, defaults[column.name])
    if not known >= set(table.columns.keys()):  # checksums of records without it say nothing
        connection.execute(table.update().values(checksum=0))


def _defaults(kind: type[Any]) -> dict[str, Any]:
    return {
        field.name: field.default
        for field in dataclasses.fields(kind)
        if field.default is not dataclasses.MISSING
    } | {"checksum": 0}


def _add_column(
    connection: sa.Connection, table: sa.Table, column: sa.Column[Any], default: Any
) -> None:
    dialect = connection.dialect
    quote = dialect.identifier_preparer.quote
    statement = (
        f"ALTER TABLE {quote(table.name)} ADD COLUMN {quote(column.name)} "
        f"{column.type.compile(dialect=dialect)} DEFAULT {_literal(default, column, dialect)}"
    )
    connection.exec_driver_sql(statement)


def _literal(default: Any, column: sa.Column[Any], dialect: sa.Dialect) -> str:
    if isinstance(default, bytes):  # as text it would come back as text
        is_sqlite = dialect.name == "sqlite"
        return f"X'{default.hex()}'" if is_sqlite else f"'\\x{default.hex()}'::bytea"
    value = default.value if isinstance(default, Enum) else default
    literal = sa.literal(value, column.type)
    return str(literal.compile(dialect=dialect, compile_kwargs={"literal_binds": True}))


# --- from format 3 to 4 -----------------------------------------------------------------------

FROM_3 = "UPDATE meta SET value = '4', checksum = 0 WHERE key = 'format'"
"""Rows say what a trainer computes of them; older ones do not."""

# --- from format 2 to 3 -----------------------------------------------------------------------

FROM_2 = (
    # Leases that run are slots of grants; the table of leases holds those that ended.
    "INSERT INTO grants (group_id, slot, epoch, num_slots, attempt, node_id, session, request_id, "
    "granted_at) SELECT group_id, slot, epoch, 1, attempt, node_id, session, request_id, "
    "granted_at FROM leases WHERE ended = ''",
    "DELETE FROM leases WHERE ended = ''",
    "UPDATE meta SET value = '3', checksum = 0 WHERE key = 'format'",
)

# --- from format 1 to 2 -----------------------------------------------------------------------

FROM_1 = (
    # Home has a table of its own for what it issued.
    "INSERT INTO issued (group_id, issue, partition, source, ordinal, task_key, why, judged, at) "
    "SELECT group_id, issue, partition, source, ordinal, task_key, '{}', state <> 'open', "
    "issued_at FROM groups",
    # Groups that nobody wanted were kept; their payload may go now.
    "INSERT INTO freed (group_id, at) SELECT group_id, ended_at FROM groups g "
    "WHERE state <> 'open' AND NOT EXISTS (SELECT 1 FROM fates f "
    "WHERE f.group_id = g.group_id AND f.state <> 'dropped')",
    "UPDATE fates SET arrival = rowid, uses = CASE state WHEN 'sealed' THEN 1 ELSE 0 END",
    "UPDATE rows SET arrival = rowid",
    "UPDATE meta SET value = '2' WHERE key = 'format'",
)


def _from_1(connection: sa.Connection) -> None:
    """Format 1 was always SQLite, and asked the rows of an admitted group what a fate says now."""
    admitted = connection.exec_driver_sql(
        "SELECT f.consumer, f.group_id, g.task_key, g.source FROM fates f "
        "JOIN groups g ON g.group_id = f.group_id WHERE f.state = 'admitted'"
    ).all()
    for consumer, group_id, task_key, source in admitted:
        rows = connection.execute(
            sa.text("SELECT * FROM rows WHERE group_id = :g AND reward IS NOT NULL ORDER BY slot"),
            {"g": group_id},
        )
        names = [field.name for field in dataclasses.fields(RowRecord)]
        found = [RowRecord(**{n: row[n] for n in names}).summary for row in rows.mappings()]
        members = [row for row in found if row.sampled.get(consumer, 0) > 0]
        versions = sorted({version for row in members for version in row.versions[consumer]})
        rewards = array("d", (row.score for row in members))
        connection.exec_driver_sql(
            "UPDATE fates SET rows = ?, rewards = ?, versions = ?, task_key = ?, source = ? "
            "WHERE consumer = ? AND group_id = ?",
            (
                encode(members),
                rewards.tobytes(),
                encode_json(versions).decode(),
                task_key,
                source,
                consumer,
                group_id,
            ),
        )
    for statement in FROM_1:
        connection.exec_driver_sql(statement)
