# SPDX-License-Identifier: Apache-2.0
"""The ledger's database is as safe as its connection, and no name that a caller chose ends it."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.attacks.in_process import dataflow_door

from penstock.dataflow.ledger.codec import codec
from penstock.dataflow.ledger.postgres import PostgresDatabase
from penstock.dataflow.records import MetaRecord
from penstock.errors import ConfigError, StoreError
from penstock.wire.auth import Role
from penstock.wire.certificates import Authority
from penstock.wire.trust import CA_ENV

SECRET = "canary-of-the-database"
ASKS_FOR_TLS = b"\x00\x00\x00\x08\x04\xd2\x16\x2f"
"""A client's first message, if it wants TLS."""


class FakeServer:
    """Answers a client that asks for TLS, and keeps what it says in clear text."""

    def __init__(self, answer: bytes, context: ssl.SSLContext | None) -> None:
        self.heard = b""
        self._answer, self._context = answer, context
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            connection.settimeout(60)
            first = connection.recv(8)
            self.heard += first if first != ASKS_FOR_TLS else b""
            connection.sendall(self._answer)
            try:
                stream = connection
                if self._context is not None:
                    stream = self._context.wrap_socket(connection, server_side=True)
                with stream:
                    stream.settimeout(60)
                    self.heard += stream.recv(1 << 16)
            except (OSError, ssl.SSLError):
                return

    def close(self) -> None:
        self._listener.close()
        self._thread.join(60)
        assert not self._thread.is_alive()


@contextmanager
def fake_server(answer: bytes, context: ssl.SSLContext | None = None) -> Generator[FakeServer]:
    server = FakeServer(answer, context)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """`db.example` is another host; here its name leads to a server of the test."""
    resolve = socket.create_connection

    def connect(address: tuple[str, int], *rest: object, **options: object) -> socket.socket:
        host = "127.0.0.1" if address[0] == "db.example" else address[0]
        return resolve((host, address[1]), *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "create_connection", connect)


def url(port: int, options: str = "") -> str:
    return f"postgresql://me:{SECRET}@db.example:{port}/run{options}"


@pytest.mark.usefixtures("elsewhere")
def test_the_ledger_is_not_sent_in_clear_text_to_another_host() -> None:
    """The one between says that the server has no TLS: the driver alone would go on without."""
    refused = pytest.raises(StoreError, match=r"over TLS only: set ssl = on")
    with fake_server(b"N") as server, refused as told:
        PostgresDatabase(url(server.port), "run")
    assert server.heard == b""
    assert SECRET not in str(told.value)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("name", "is_known", "is_accepted"),
    [("db.example", False, False), ("other.example", True, False), ("db.example", True, True)],
)
def test_the_server_of_the_ledger_shows_who_it_is(
    name: str,
    is_known: bool,
    is_accepted: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A certificate by nobody we know, one of another name, and the right one."""
    authority = Authority.create(tmp_path)
    issued = authority.issue("server", [name], days=1)
    if is_known:
        monkeypatch.setenv(CA_ENV, str(authority.certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(issued.certificate, issued.key)
    with fake_server(b"S", context) as server, pytest.raises(StoreError) as told:
        PostgresDatabase(url(server.port), "run")
    assert (b"me" in server.heard) == is_accepted
    assert ("an authority that this host trusts" in str(told.value)) != is_accepted


@pytest.mark.parametrize("mode", ["disable", "allow", "prefer", "anything"])
def test_no_option_of_the_url_turns_encryption_off(mode: str) -> None:
    with pytest.raises(ConfigError, match=f"sslmode={mode} .* to another host only TLS"):
        PostgresDatabase(url(5432, f"?sslmode={mode}"), "run")


@pytest.mark.usefixtures("elsewhere")
def test_another_host_in_the_options_is_another_host() -> None:
    with fake_server(b"N") as server:
        hidden = f"postgresql://me:{SECRET}@127.0.0.1:{server.port}/run?host=db.example"
        with pytest.raises(StoreError, match="over TLS only"):
            PostgresDatabase(hidden, "run")
    assert server.heard == b""


@pytest.mark.parametrize("name", ["a\0", "\0", "a\0b"])
async def test_a_column_has_no_name_that_the_store_changes(name: str, tmp_path: Path) -> None:
    """Stored, a NUL becomes U+FFFD: two columns would be one, and PostgreSQL ends a transaction
    that writes one twice, and with it the service."""
    async with dataflow_door(tmp_path) as door:
        rows = {"rows": [{"key": "k", "columns": {"x": 1.0}}]}
        assert (await door.call("POST", "/v1/spaces/s/rows", Role.STAGE, body=rows)).is_success
        twice = {name: 1.0, name.replace("\0", "\ufffd"): 2.0}
        rows = {"rows": [{"key": "k", "columns": twice}]}
        answer = await door.call("POST", "/v1/spaces/s/rows", Role.STAGE, body=rows)
        assert answer.status_code == 400, answer.text
        assert "NUL" in answer.text


@pytest.mark.parametrize("name", ["c@\0", "c@a\0b"])
async def test_a_failed_column_has_no_name_that_the_store_changes(
    name: str, tmp_path: Path
) -> None:
    """As above, by the other way that names come in: a version of a column that a reader writes."""
    async with dataflow_door(tmp_path) as door:
        terms = {"reads": ["x"], "writes": ["c"], "space": "mine"}
        assert (await door.call("PUT", "/v1/readers/mine", Role.STAGE, body=terms)).is_success
        claim = {"row_id": "k", "arrival": 1, "epoch": 1}
        failed = {name: "a", name.replace("\0", "\ufffd"): "b"}
        body = {"reader": "mine", "worker": "w", "results": [{"claim": claim, "failed": failed}]}
        answer = await door.call("PUT", "/v1/rows/columns", Role.STAGE, body=body)
        assert answer.status_code == 400, answer.text
        assert "NUL" in answer.text


def test_a_record_whose_key_the_store_changes_is_written_once() -> None:
    """Whatever door such a key came through: PostgreSQL refuses to write a record twice in one
    statement."""
    written = [MetaRecord(key=key, value=key) for key in ("k\0", "k\ufffd")]
    assert [row[:2] for row in codec(MetaRecord).encode(written)] == [("k\ufffd", "k\ufffd")]
