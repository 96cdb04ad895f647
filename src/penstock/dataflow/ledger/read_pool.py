# SPDX-License-Identifier: Apache-2.0
"""Read queries that bypass SQLAlchemy for SQLite files, to keep small ones at microseconds.

SQLite files are read through pooled driver connections; other databases through their engine, where
the round trip dominates anyway. Read-only, thread-safe, and independent of any table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
import sqlalchemy as sa

_IN_PARAMETER = re.compile(r"\bIN :(\w+)")


class ReadPool:
    """A list value expands `IN :name`."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._is_file = engine.dialect.name == "sqlite" and isinstance(engine.pool, sa.QueuePool)
        self._idle: list[Any] = []
        """Idle connections; at most as many as there were concurrent queries."""
        self._rewritten: dict[str, str] = {}

    def __call__(self, query: str, values: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        if not self._is_file:
            with self._engine.connect() as connection:
                return [tuple(row) for row in connection.execute(_text(query, values), values)]
        sql = self._rewritten.get(query)
        if (
            sql is None
        ):  # a list is passed as one JSON text, so the statement does not depend on its length
            sql = _IN_PARAMETER.sub(r"IN (SELECT value FROM json_each(:\1))", query)
            self._rewritten[query] = sql
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self.connect()
        try:
            found = connection.execute(sql, {name: _bindable(v) for name, v in values.items()})
            rows: list[tuple[Any, ...]] = found.fetchall()
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        return rows

    def connect(self) -> Any:
        """A driver connection outside the engine's small pool."""
        pooled = self._engine.raw_connection()
        pooled.detach()
        return pooled.dbapi_connection

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()


def _bindable(value: Any) -> Any:
    return msgspec.json.encode(value).decode() if isinstance(value, list) else value


def _text(query: str, values: Mapping[str, Any]) -> sa.TextClause:
    lists = [name for name, value in values.items() if isinstance(value, list)]
    expanding: list[Any] = [sa.bindparam(name, expanding=True) for name in lists]
    return sa.text(query).bindparams(*expanding)
