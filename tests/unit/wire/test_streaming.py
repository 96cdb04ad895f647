# SPDX-License-Identifier: Apache-2.0
"""Streamed responses."""

from __future__ import annotations

import socket
import threading
from collections.abc import AsyncGenerator
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest
from tests.contract.dataflow_server import serving

from penstock.wire.auth import Audience, Role, Signer
from penstock.wire.codec import MSGPACK
from penstock.wire.routes import ALL_ROLES, Call, Route, StreamedResponse
from penstock.wire.server import build_app

PIECE = bytes(range(256)) * 1024


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    return Signer.create(tmp_path, "run")


def token(signer: Signer) -> str:
    return signer.mint(Role.READER, [Audience.DATAFLOW], ttl_s=3600)


@pytest.mark.parametrize("is_announced", [False, True])
def test_the_chunks_form_one_body(signer: Signer, is_announced: bool) -> None:
    async def made() -> AsyncGenerator[bytes | memoryview]:
        for number in range(8):
            yield memoryview(bytearray([number]) + PIECE)

    async def handler(call: Call) -> object:
        return StreamedResponse(made(), 8 * (1 + len(PIECE)) if is_announced else None)

    route = Route(method="GET", path="/pieces", handler=handler, roles=ALL_ROLES, summary="…")
    app = build_app([route], signer.verifier(Audience.DATAFLOW), title="test")
    with serving(app) as url, httpx2.Client(timeout=60) as http:
        for _ in range(2):  # over one connection
            headers = {"authorization": f"Bearer {token(signer)}"}
            answer = http.get(f"{url}/pieces", headers=headers)
            assert answer.content == b"".join(bytes([n]) + PIECE for n in range(8))
            assert answer.headers["content-type"] == MSGPACK
            assert ("content-length" in answer.headers) is is_announced


def test_a_stream_stops_when_the_caller_disconnects(signer: Signer) -> None:
    ended = threading.Event()

    async def endless() -> AsyncGenerator[bytes | memoryview]:
        try:
            while True:
                yield PIECE
        finally:
            ended.set()

    async def handler(call: Call) -> object:
        return StreamedResponse(endless())

    route = Route(method="GET", path="/pieces", handler=handler, roles=ALL_ROLES, summary="…")
    app = build_app([route], signer.verifier(Audience.DATAFLOW), title="test")
    with serving(app) as url:
        where = urlsplit(url)
        assert where.hostname is not None and where.port is not None
        with socket.create_connection((where.hostname, where.port)) as caller:
            lines = ["GET /pieces HTTP/1.1", "host: here", f"authorization: Bearer {token(signer)}"]
            caller.sendall("\r\n".join([*lines, "", ""]).encode())
            assert caller.recv(100)
            assert not ended.is_set()
        assert ended.wait(60)
