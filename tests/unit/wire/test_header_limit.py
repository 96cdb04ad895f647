# SPDX-License-Identifier: Apache-2.0
"""A caller without a credential cannot fill the memory of a service with headers."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.contract.dataflow_server import serving

from penstock.wire.auth import Audience, Signer
from penstock.wire.doors import MAX_HEADER_BYTES
from penstock.wire.server import build_app

LINE = b"GET /healthz HTTP/1.1\r\nhost: x\r\n"
ENDLESS = {
    "many headers": (LINE, b"x-more: " + b"y" * 1000 + b"\r\n"),
    "one header": (LINE + b"x-long: ", b"y" * 1000),
    "the request line": (b"GET /", b"y" * 1000),
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_an_endless_head_is_refused(tmp_path: Path, kind: str) -> None:
    begin, more = ENDLESS[kind]
    app = build_app([], Signer.create(tmp_path, "run").verifier(Audience.DATAFLOW), title="test")
    with serving(app) as url:
        address = urlsplit(url)
        with socket.create_connection((str(address.hostname), address.port or 0), 60) as caller:
            caller.settimeout(5)
            caller.sendall(begin)
            with suppress(ConnectionError):  # rejected in the middle of it
                for _ in range(2 * MAX_HEADER_BYTES // len(more)):
                    caller.sendall(more)
                while caller.recv(1 << 16):  # a connection that stays open ends in a TimeoutError
                    pass


def test_long_headers_and_long_bodies_are_accepted(tmp_path: Path) -> None:
    app = build_app([], Signer.create(tmp_path, "run").verifier(Audience.DATAFLOW), title="test")
    with serving(app) as url:
        address = urlsplit(url)
        with socket.create_connection((str(address.hostname), address.port or 0), 60) as caller:
            for _ in range(3):  # over one connection, so that each request is counted separately
                body = b"b" * (2 * MAX_HEADER_BYTES)
                size = b"content-length: %d\r\n" % len(body)
                caller.sendall(LINE + b"x-long: " + b"y" * (MAX_HEADER_BYTES // 2) + b"\r\n")
                caller.sendall(size + b"\r\n" + body)
                answer = b""
                while not answer.endswith(b"}"):
                    answer += caller.recv(1 << 16) or pytest.fail(f"closed after {answer!r}")
                assert answer.startswith(b"HTTP/1.1 200"), answer
