# SPDX-License-Identifier: Apache-2.0
"""A ledger's tables in PostgreSQL: connecting, durable commits, and the lock for a single writer.

Each ledger has its own schema, so one database serves many runs and partitions. The writer's
connection holds an advisory lock: a service that loses the connection can no longer commit.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Iterable
from typing import Any, cast

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError

from penstock.config.store_password import PASSWORD_ENV, password_in
from penstock.errors import ConfigError, StoreError

MAX_NAME = 63
"""Maximum length of a PostgreSQL identifier, in bytes."""


def connect(url: str, name: str) -> tuple[sa.Engine, sa.Connection]:
    """The engine for reading, and the one connection that may write."""
    address = _address(url)
    schema = _schema(name)
    password = password_in(url) or os.environ.get(PASSWORD_ENV, "")
    engine = sa.create_engine(
        address,
        isolation_level="AUTOCOMMIT",
        pool_pre_ping=True,
        connect_args={"password": password},  # the driver fails on a missing database name
    )
    event.listen(engine, "connect", _session_settings(schema))
    where = f"{address.host or 'the local socket'}/{address.database or ''}"
    try:
        writer = engine.connect()
    except DBAPIError as error:
        engine.dispose()
        fix = "" if password else f"; no password was given: set {PASSWORD_ENV}"
        raise StoreError(
            f"PostgreSQL at {where} cannot be reached: {_reason(error)}{fix}"
        ) from error
    try:
        _require_durable(writer, where)
        _lock(writer, schema, where)
        writer.execute(sa.schema.CreateSchema(schema, if_not_exists=True))
        writer.commit()
        writer = writer.execution_options(isolation_level="READ COMMITTED")
    except BaseException:
        writer.close()
        engine.dispose()
        raise
    return engine, writer


def _address(url: str) -> sa.URL:
    if importlib.util.find_spec("pg8000") is None:
        raise ConfigError("a PostgreSQL store needs its driver; pip install 'penstock[postgres]'")
    address = sa.make_url(url)
    if address.get_backend_name() not in ("postgresql", "postgres"):
        raise ConfigError(
            f"unknown ledger store {address.drivername}; use sqlite or a postgresql:// URL"
        )
    return address.set(drivername="postgresql+pg8000")


def _schema(name: str) -> str:
    if len(name.encode()) <= MAX_NAME:
        return name
    return f"{name[:40]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def _session_settings(schema: str) -> Any:
    def set_up(connection: Any, _: Any) -> None:
        cursor = connection.cursor()
        quoted = schema.replace('"', '""')
        cursor.execute(f'SET search_path TO "{quoted}"')
        cursor.execute("SET synchronous_commit TO on")
        connection.commit()
        cursor.close()

    return set_up


def _require_durable(writer: sa.Connection, where: str) -> None:
    if writer.exec_driver_sql("SHOW fsync").scalar() != "on":
        raise StoreError(
            f"PostgreSQL at {where} runs with fsync = off, so no commit there is durable; "
            "set fsync = on in its configuration"
        )


def _lock(writer: sa.Connection, schema: str, where: str) -> None:
    digest = hashlib.sha256(f"penstock ledger {schema}".encode()).digest()
    key = int.from_bytes(digest[:8], "little", signed=True)
    query = sa.text("SELECT pg_try_advisory_lock(:key)").bindparams(key=key)
    if not writer.execute(query).scalar():
        raise StoreError(
            f"another dataflow service has ledger {schema} of PostgreSQL at {where} open; "
            "only one may write a ledger"
        )


def _reason(error: DBAPIError) -> str:
    """The server's message, without the address and the password."""
    detail: Any = error.orig.args[0] if error.orig and error.orig.args else error.orig
    return str(cast(dict[str, str], detail).get("M")) if isinstance(detail, dict) else str(detail)


def array(values: Iterable[Any]) -> str:
    """One column of many records as an array literal. Built here because the driver reads the text
    `null` as NULL."""
    return "{" + ",".join(map(_element, values)) + "}"


def _element(value: Any) -> str:
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    if isinstance(value, bytes):
        return f'"\\\\x{value.hex()}"'
    return "NULL" if value is None else str(value)
