# SPDX-License-Identifier: Apache-2.0
"""A call survives outages and honours Retry-After."""

from __future__ import annotations

import datetime
import socket
import ssl
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from tests.contract.dataflow_server import serving

from penstock.errors import Busy, Fenced, TlsError, Unreachable, WireError
from penstock.wire.auth import Audience, Role, Signer
from penstock.wire.client import AsyncServiceClient, ServiceClient
from penstock.wire.routes import Call, Route
from penstock.wire.server import build_app
from penstock.wire.serving import Tls


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    text: str


@dataclass(slots=True)
class FlakyHandler:
    """Raises its next error, if any is left."""

    pending_errors: list[WireError]
    calls: int = 0

    async def echo(self, call: Call) -> Echo:
        self.calls += 1
        if self.pending_errors:
            raise self.pending_errors.pop(0)
        return call.body


@contextmanager
def flaky_service(
    folder: Path, *pending_errors: WireError
) -> Generator[tuple[FlakyHandler, str, str]]:
    handler = FlakyHandler(list(pending_errors))
    signer = Signer.create(folder, "run")
    route = Route(
        method="POST",
        path="/v1/echo",
        handler=handler.echo,
        roles=frozenset({Role.READER}),
        summary="Says it again.",
        request=Echo,
        response=Echo,
    )
    with serving(build_app([route], signer.verifier(Audience.DATAFLOW), title="flaky")) as url:
        yield handler, url, signer.mint(Role.READER, [Audience.DATAFLOW], ttl_s=3600)


def test_transient_errors_are_retried(tmp_path: Path) -> None:
    trouble = [WireError("oops"), Busy("later", retry_after_s=0.3), Unreachable("not yet")]
    with flaky_service(tmp_path, *trouble) as (handler, url, token):
        caller = ServiceClient(url, token)
        started = time.monotonic()
        assert caller.call("POST", "/v1/echo", Echo(text="hi"), Echo) == Echo(text="hi")
        assert handler.calls == 4 and time.monotonic() - started >= 0.3
        caller.close()


def test_permanent_errors_are_not_retried(tmp_path: Path) -> None:
    with flaky_service(tmp_path, Fenced("you were replaced")) as (handler, url, token):
        caller = ServiceClient(url, token)
        with pytest.raises(Fenced, match="you were replaced"):
            caller.call("POST", "/v1/echo", Echo(text="hi"), Echo)
        assert handler.calls == 1
        caller.close()


async def test_a_missing_service_is_reported_after_the_deadline(tmp_path: Path) -> None:
    caller = AsyncServiceClient("http://127.0.0.1:9", "token")
    started = time.monotonic()
    with pytest.raises(Unreachable, match="check that the service is running"):
        await caller.call("POST", "/v1/echo", Echo(text="hi"), Echo, deadline_s=0.5)
    assert time.monotonic() - started < 30
    await caller.close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """A self-signed certificate, which no client trusts."""
    folder = tmp_path_factory.mktemp("tls")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "somebody")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, SHA256())
    )
    found = Tls(certificate=folder / "cert.pem", key=folder / "key.pem")
    found.certificate.write_bytes(made.public_bytes(Encoding.PEM))
    found.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return found


@contextmanager
def tls_listener(tls: Tls | None) -> Generator[int]:
    """Accepts connections until it is closed; with TLS, or answering in plain HTTP."""
    listener = socket.create_server(("127.0.0.1", 0))
    context = None
    if tls is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls.certificate, tls.key)

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, suppress(OSError):
                if context is not None:
                    context.wrap_socket(connection, server_side=True)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(timeout=60.0)


async def test_an_untrusted_certificate_fails_at_once_and_by_name(certificate: Tls) -> None:
    with tls_listener(certificate) as port:
        url = f"https://127.0.0.1:{port}"
        with pytest.raises(TlsError, match="certificate of the service is not trusted"):
            ServiceClient(url, "token").call("GET", "/healthz", None, Echo)
        client = AsyncServiceClient(url, "token")
        with pytest.raises(TlsError, match="PENSTOCK_CA"):
            await client.call("GET", "/healthz", None, Echo)
        await client.close()


def test_a_service_without_tls_is_named_at_once() -> None:
    with tls_listener(None) as port, pytest.raises(TlsError, match="--tls-cert"):
        ServiceClient(f"https://127.0.0.1:{port}", "token").call("GET", "/healthz", None, Echo)
