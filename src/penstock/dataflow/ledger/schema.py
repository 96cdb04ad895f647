# SPDX-License-Identifier: Apache-2.0
"""The schema of a ledger on disk: created by the first start, checked by every later one.

Owns the format number in `meta`. A ledger of another format is refused and left untouched.
"""

from __future__ import annotations

import sqlalchemy as sa

from penstock.dataflow.records import FORMAT
from penstock.errors import StoreError


def prepare(connection: sa.Connection, metadata: sa.MetaData) -> bool:
    """Create the tables of a new ledger, or check the tables of an existing one. Returns True for a
    new ledger; the caller then writes its format."""
    found = _ExistingSchema(connection, metadata)
    if found.format is None:
        found.require_empty()
        found.create_missing()
        return True
    if found.format != str(FORMAT):
        raise StoreError(
            f"this ledger has format {found.format}, this penstock reads format {FORMAT}; continue "
            "the run with the penstock that wrote it, or start a new run in another folder"
        )
    found.require_complete()
    return False


class _ExistingSchema:
    """The tables that exist, read in three queries, since a server may be far away."""

    def __init__(self, connection: sa.Connection, metadata: sa.MetaData) -> None:
        self._connection = connection
        self._metadata = metadata
        self._columns = {
            table: {column["name"] for column in columns}
            for (_, table), columns in sa.inspect(connection).get_multi_columns().items()
        }
        self.format = self._format()

    def _format(self) -> str | None:
        if "meta" not in self._columns:
            return None
        query = sa.text("SELECT value FROM meta WHERE key = 'format'")
        return self._connection.execute(query).scalar()

    def require_complete(self) -> None:
        """A table or column missing because of corruption must not be recreated empty."""
        for name, table in self._metadata.tables.items():
            if missing := set(table.columns.keys()) - self._columns.get(name, set()):
                raise StoreError(
                    f"table {name} of this ledger lacks {', '.join(sorted(missing))}: the ledger's "
                    "database is damaged; restore the ledger from a copy"
                )

    def require_empty(self) -> None:
        """Tables without a format are left from a first start that was interrupted."""
        for name in self._columns.keys() & self._metadata.tables.keys():
            if self._connection.execute(sa.text(f"SELECT 1 FROM {name} LIMIT 1")).scalar():
                raise StoreError(
                    f"this ledger has records in table {name} but no format: its database is "
                    "damaged; restore the ledger from a copy"
                )

    def create_missing(self) -> None:
        """Tables of an interrupted first start are empty, so all are created from scratch."""
        old = [table for name, table in self._metadata.tables.items() if name in self._columns]
        self._metadata.drop_all(self._connection, tables=old, checkfirst=False)
        self._metadata.create_all(self._connection, checkfirst=False)
