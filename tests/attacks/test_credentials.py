# SPDX-License-Identifier: Apache-2.0
"""Credentials hold: what is not exactly the token that the run issued, unexpired and unrevoked, is
refused; and no token leaves by a proxy, a command line, an environment, a log or clear text."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.errors import Unauthorized, Unreachable
from penstock.wire.auth import Audience, Role, Signer
from penstock.wire.client import ServiceClient
from penstock.wire.routes import Health

B64 = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"


@contextmanager
def answering(response: bytes) -> Generator[tuple[str, list[bytes]]]:
    """A server that gives one response to everything, and what it was sent."""
    seen: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                seen.append(connection.recv(65536))
                connection.sendall(response)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", seen
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


OK = (
    b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: application/json\r\n"
    b'content-length: 15\r\n\r\n{"status":"ok"}'
)


@pytest.mark.finding(11)
@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_a_proxy_of_the_environment_gets_no_token(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """Proves that variables of the environment cannot redirect calls that carry a token."""
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with answering(OK) as (proxy, at_proxy), answering(OK) as (service, at_service):
        monkeypatch.setenv(variable, proxy)
        with closing(ServiceClient(service, "penstock.SECRET")) as client:
            client.call("GET", "/healthz", None, Health, deadline_s=5.0)
    assert at_proxy == []
    assert b"SECRET" in at_service[0]


@pytest.mark.finding(13)
@pytest.mark.parametrize(
    "value", ["1.2.3", "nan", "inf", "-1", "1e999", "9" * 400, "٣", "Wed, 21 Oct 2026 07:28:00 GMT"]
)
def test_a_bad_retry_after_neither_raises_nor_freezes(value: str) -> None:
    """Proves that a hostile Retry-After costs at most a bounded wait, and is a typed error."""
    head = (
        f"HTTP/1.1 503 x\r\nconnection: close\r\ncontent-length: 0\r\nretry-after: {value}\r\n\r\n"
    )
    started = time.monotonic()
    with (
        answering(head.encode()) as (url, seen),
        closing(ServiceClient(url, "token")) as client,
        pytest.raises(Unreachable),
    ):
        client.call("GET", "/healthz", None, Health, deadline_s=0.3)
    assert len(seen) >= 1
    assert time.monotonic() - started < 60.0


@pytest.mark.finding(18)
def test_only_one_form_of_a_token_verifies(tmp_path: Path) -> None:
    """Proves that no second spelling of a valid token is accepted: one token, one form."""
    signer = Signer.create(tmp_path, "run")
    verifier = signer.verifier(Audience.DATAFLOW)
    token = signer.mint(Role.READER, [Audience.DATAFLOW], ttl_s=60)
    head, _, last = token.rpartition(".")
    forms = {head + "." + last[:-1] + letter for letter in B64} - {token}
    forms |= {token + "=", token + "==", token + "\n", f"{token}.", token + "!", f" {token}"}
    forms |= {head + "." + last[:5] + extra + last[5:] for extra in ("!", "\n", " ", "=", "é")}
    forms |= {token.replace(".", "..", 1), token.upper(), token + ".x"}
    accepted = [form for form in forms if _is_accepted(verifier.verify, form)]
    assert accepted == []
    verifier.verify(token)


def _is_accepted(verify: object, token: str) -> bool:
    assert callable(verify)
    try:
        verify(token)
    except Unauthorized:
        return False
    return True


@pytest.mark.finding(12)
@pytest.mark.parametrize(
    "words",
    [
        ("join", "http://10.9.8.7:1"),
        ("join", "http://127.0.0.1.example.org:1"),
        ("join", "http://localhost@10.9.8.7:1"),
        ("relay", "http://10.9.8.7:1", "--public-key=x", "--cache=cache", "--port=18999"),
        ("gateway", "http://10.9.8.7:1", "--public-key=x", "--port=18999"),
    ],
)
def test_no_service_sends_its_token_in_clear_text(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: tuple[str, ...],
) -> None:
    """Proves that join, relay and gateway refuse http:// beyond this machine."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "token").write_text("x")
    monkeypatch.setenv("PENSTOCK_TOKEN_FILE", str(tmp_path / "token"))
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert ended.value.code == 1
    assert "clear text" in capsys.readouterr().err
