# SPDX-License-Identifier: Apache-2.0
"""A ledger's database in PostgreSQL: connections, durable commits, and the lock of a single writer.

Each ledger has its own schema, so one database serves many runs and partitions. The writer's
connection holds an advisory lock: a service that loses the connection can no longer commit. To
another host it speaks TLS, with a certificate that this process trusts, or not at all.
"""

from __future__ import annotations

import functools
import getpass
import hashlib
import importlib
import os
import queue
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast
from urllib.parse import parse_qsl, unquote, urlsplit

from penstock.addresses import is_loopback
from penstock.config.store_password import PASSWORD_ENV, password_in, without_password
from penstock.dataflow.ledger.codec import LIST_CONDITION, TYPES, PayloadMove, codec
from penstock.dataflow.records import Record
from penstock.errors import ConfigError, StoreError
from penstock.wire.trust import client_context

native: Any = importlib.import_module("pg8000.native")  # it has no types
LOST = (native.InterfaceError, OSError)
"""What the driver raises when the connection is lost."""
MAX_NAME = 63
"""Maximum length of a PostgreSQL identifier, in bytes."""
MAX_READERS = 10
"""Connections that read at the same time; a server has 100 for all its clients."""
VERIFIED = ("require", "verify-ca", "verify-full")
"""Words for `sslmode` that ask for TLS; all of them get the strongest."""


class PostgresDatabase:
    """As SqliteDatabase."""

    TYPES = TYPES | {bytes: "BYTEA"}
    COLUMNS = (
        "SELECT table_name, column_name FROM information_schema.columns "
        "WHERE table_schema = current_schema()"
    )
    BUNDLE_KEYS = (
        "json_array_elements(CAST(:bundles AS json)) w JOIN bundles b ON b.space = w->>0 "
        "AND b.arrival = CAST(w->>1 AS bigint) CROSS JOIN LATERAL (SELECT value, n - 1 AS key FROM "
        "json_array_elements_text(CAST(b.keys AS json)) WITH ORDINALITY AS o (value, n)) k"
    )
    ITEMS_OPTION = ""

    def __init__(self, url: str, name: str) -> None:
        self._address = _address(url)
        self._schema = _schema(name)
        self._readers: queue.LifoQueue[_Connection | None] = queue.LifoQueue()
        """The connections for reading that are idle; None for one that is not open."""
        for _ in range(MAX_READERS):
            self._readers.put(None)
        where = f"{urlsplit(url).hostname or 'the local socket'}/{self._address['database']}"
        try:
            self._writer = self._connect()
        except (native.Error, OSError) as error:
            fix = self._fix(error)
            raise StoreError(
                f"PostgreSQL at {where} cannot be reached: {_reason(error)}{fix}"
            ) from error
        try:
            self._prepare_writer(where)
        except BaseException:
            self._writer.close()
            raise

    def _fix(self, error: Exception) -> str:
        is_answer = isinstance(error, native.DatabaseError)  # of a server that was reached
        if self._address["ssl_context"] and not is_answer and "SSL" in str(error):
            return (
                "; the ledger and its password cross a network over TLS only: set ssl = on at the "
                "server, with a certificate for this name of an authority that this host trusts "
                "(SSL_CERT_FILE names one), or use a tunnel and postgresql://127.0.0.1"
            )
        return "" if self._address["password"] else f"; no password was given: set {PASSWORD_ENV}"

    def _connect(self) -> _Connection:
        connection = _Connection(native.Connection(**self._address))
        schema = native.identifier(self._schema)
        connection.run(f"SET search_path TO {schema}; SET synchronous_commit TO on", {})
        return connection

    def _prepare_writer(self, where: str) -> None:
        if self._writer.run("SHOW fsync", {}) != [("on",)]:
            raise StoreError(
                f"PostgreSQL at {where} runs with fsync = off, so no commit there is durable; "
                "set fsync = on in its configuration"
            )
        digest = hashlib.sha256(f"penstock ledger {self._schema}".encode()).digest()
        key = int.from_bytes(digest[:8], "little", signed=True)
        if self._writer.run(f"SELECT pg_try_advisory_lock({key})", {}) != [(True,)]:
            raise StoreError(
                f"ledger {self._schema} of PostgreSQL at {where} is already open in another "
                "dataflow service; stop that one first (a ledger can have only one writer)"
            )
        self._writer.run(f"CREATE SCHEMA IF NOT EXISTS {native.identifier(self._schema)}", {})

    @contextmanager
    def begin(self) -> Generator[None]:
        try:
            self._writer.run("BEGIN ISOLATION LEVEL READ COMMITTED", {})
            yield
            self._writer.run("COMMIT", {})
        except BaseException as error:
            if not self._writer.is_closed:
                self._writer.run("ROLLBACK", {})
                raise
            raise StoreError(
                "lost the database connection that held the ledger's lock, so another service may "
                "be writing; restart this service"
            ) from error

    def execute(self, statement: str, values: Mapping[str, Any]) -> None:
        self._writer.run(statement, {name: _bindable(value) for name, value in values.items()})

    def write(self, kind: type[Record], rows: Sequence[Sequence[Any]]) -> None:
        """All records in one round trip, an array per column."""
        names = (column.name for column in codec(kind).columns)
        arrays = map(_array, zip(*rows, strict=True))
        self._writer.run(_statement(kind), dict(zip(names, arrays, strict=True)))

    def read(self, query: str, values: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        sql = LIST_CONDITION.sub(r"= ANY(:\1)", query)
        values = {name: _bindable(value) for name, value in values.items()}
        connection = self._readers.get()
        try:
            if connection is not None:
                with suppress(*LOST):  # the server may have closed it while it was idle
                    return connection.run(sql, values)
            connection = self._connect()
            return connection.run(sql, values)
        finally:
            self._readers.put(None if connection is None or connection.is_closed else connection)

    def verify(self) -> None:
        """A server checks its own pages."""

    def close(self) -> None:
        for connection in (self._writer, *self._readers.queue):
            if connection is not None:
                connection.close()


class _Connection:
    """Prepares each statement once: from then on, running it takes one round trip."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._prepared: dict[str, Any] = {}
        self.is_closed = False

    def run(self, sql: str, values: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """An error that is not the server's answer closes the connection: what the server did is
        unknown."""
        try:
            if values and sql not in self._prepared:
                self._prepared[sql] = self._connection.prepare(sql)
            rows = self._prepared[sql].run(**values) if values else self._connection.run(sql)
        except BaseException as error:
            if not isinstance(error, native.DatabaseError):
                self.close()
            raise
        return [tuple(row) for row in rows or ()]

    def close(self) -> None:
        self.is_closed = True
        with suppress(*LOST):
            self._connection.close()


def _address(url: str) -> dict[str, Any]:
    """The driver's arguments; options of the URL are passed on."""
    parts = urlsplit(without_password(url))
    if parts.scheme != "postgresql":
        raise ConfigError(f"unknown ledger store {parts.scheme}; use sqlite or a postgresql:// URL")
    options = dict(parse_qsl(parts.query))
    mode = options.pop("sslmode", "")
    address = {
        "user": unquote(parts.username or "") or getpass.getuser(),
        "host": parts.hostname or "localhost",
        "port": parts.port or 5432,
        "database": parts.path.strip("/"),
        # Never None, on which the driver fails.
        "password": password_in(url) or os.environ.get(PASSWORD_ENV, ""),
        **options,
    }
    return address | {"ssl_context": _encryption(address, mode)}


def _encryption(address: Mapping[str, Any], mode: str) -> Any:
    """How the driver speaks to this server: by itself it would send everything in clear text to
    one that says that it has no TLS, and verify no certificate."""
    host = str(address["host"])
    if mode in VERIFIED or not (is_loopback(host) or "unix_sock" in address):
        if mode not in ("", *VERIFIED):
            raise ConfigError(
                f"sslmode={mode} in the URL of the ledger would let others on the way to {host} "
                "read it and its password; remove it: to another host only TLS is spoken"
            )
        return client_context(f"https://{host}")
    return False if mode == "disable" else None


def _schema(name: str) -> str:
    if len(name.encode()) <= MAX_NAME:
        return name
    return f"{name[:40]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def _reason(error: Exception) -> str:
    """The server's message, without the address and the password."""
    detail = error.args[0] if error.args else ""
    return cast(dict[str, str], detail)["M"] if isinstance(detail, dict) else str(error)


@functools.cache
def _statement(kind: type[Record]) -> str:
    own, types = codec(kind), PostgresDatabase.TYPES
    arrays = ", ".join(f"CAST(:{c.name} AS {types[c.type]}[])" for c in own.columns)
    new = f"unnest({arrays}) AS new ({own.names})"
    if not issubclass(kind, PayloadMove):
        return f'INSERT INTO "{kind.TABLE}" ({own.names}) SELECT * FROM {new} {own.on_conflict()}'
    is_same = " AND ".join(f'old."{name}" = new."{name}"' for name in kind.KEY)
    change = 'segment = new.to_segment, "offset" = new.to_offset'
    return f'UPDATE "{kind.TABLE}" old SET {change} FROM {new} WHERE {is_same}'


def _bindable(value: Any) -> Any:
    """No stored text has a NUL, which the server would refuse; so nothing equals one that has."""
    if isinstance(value, str):
        return value.replace("\0", "\ufffd")
    return _array(cast(list[Any], value)) if isinstance(value, list) else value


def _array(values: Iterable[Any]) -> str:
    """One column of many records as an array literal. Built here because the driver reads the text
    `null` as NULL."""
    return "{" + ",".join(map(_element, values)) + "}"


def _element(value: Any) -> str:
    if isinstance(value, str):
        escaped = value.replace("\0", "\ufffd").replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    if isinstance(value, bytes):
        return f'"\\\\x{value.hex()}"'
    return "NULL" if value is None else str(value)
