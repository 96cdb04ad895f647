# SPDX-License-Identifier: Apache-2.0
"""The endpoint called through ASGI, with requests that a well-behaved client would not send."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette

from penstock.errors import Busy
from penstock.wire.auth import Audience, Role, Signer
from penstock.wire.codec import MSGPACK, decode, encode
from penstock.wire.routes import Call, Health, Route
from penstock.wire.server import build_app


async def echo(call: Call) -> Health:
    if call.body.status == "busy":
        raise Busy("too much at once", retry_after_s=0.5)
    return Health(status=f"{call.body.status} {call.path.get('name', '-')}")


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    return Signer.create(tmp_path, "run")


@pytest.fixture
def app(signer: Signer) -> Starlette:
    def route(path: str) -> Route:
        return Route(
            method="POST",
            path=path,
            handler=echo,
            roles=frozenset({Role.ROLLOUT}),
            summary="Echo.",
            request=Health,
            response=Health,
            max_body_bytes=100,
        )

    routes = [route("/fixed"), route("/named/{name}")]
    return build_app(routes, signer.verifier(Audience.DATAFLOW), title="test")


async def send_request(
    app: Starlette, path: str, headers: list[tuple[bytes, bytes]], chunks: list[bytes]
) -> tuple[int, dict[bytes, bytes], bytes]:
    sent: list[dict[str, Any]] = []
    left = [
        {"type": "http.request", "body": chunk, "more_body": chunk is not chunks[-1]}
        for chunk in chunks
    ]

    async def receive() -> dict[str, Any]:
        return left.pop(0) if left else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "root_path": ""}
    await app({**scope, "headers": headers}, receive, send)
    return sent[0]["status"], dict(sent[0]["headers"]), sent[1]["body"]


def auth_headers(signer: Signer, role: Role = Role.ROLLOUT) -> list[tuple[bytes, bytes]]:
    token = signer.mint(role, [Audience.DATAFLOW], ttl_s=3600)
    return [(b"authorization", f"Bearer {token}".encode()), (b"accept", MSGPACK.encode())]


PATHS = pytest.mark.parametrize("path", ["/fixed", "/named/x"], ids=["fixed", "named"])


@PATHS
async def test_a_body_may_arrive_in_chunks(app: Starlette, signer: Signer, path: str) -> None:
    body = encode(Health(status="hello"))
    status, _, answer = await send_request(
        app, path, auth_headers(signer), [body[:3], body[3:7], body[7:]]
    )
    name = path.rpartition("/")[2] if path != "/fixed" else "-"
    assert (status, decode(answer, Health)) == (200, Health(status=f"hello {name}"))


@PATHS
async def test_a_body_without_a_length_is_limited_too(
    app: Starlette, signer: Signer, path: str
) -> None:
    status, _, answer = await send_request(
        app, path, auth_headers(signer), [b"x" * 60, b"x" * 60, b""]
    )
    assert status == 413 and b"100 bytes" in answer


@PATHS
async def test_the_first_of_two_credentials_counts(
    app: Starlette, signer: Signer, path: str
) -> None:
    body = [encode(Health(status="hello"))]
    good, reader = auth_headers(signer), auth_headers(signer, Role.READER)
    assert (await send_request(app, path, good + reader, body))[0] == 200
    assert (await send_request(app, path, reader + good, body))[0] == 403
    assert (await send_request(app, path, [], body))[0] == 401


@PATHS
async def test_a_busy_response_has_retry_after(app: Starlette, signer: Signer, path: str) -> None:
    body = [encode(Health(status="busy"))]
    status, headers, _ = await send_request(app, path, auth_headers(signer), body)
    assert (status, headers[b"retry-after"]) == (429, b"0.5")


@PATHS
async def test_a_disconnect_is_not_an_error(app: Starlette, signer: Signer, path: str) -> None:
    assert (await send_request(app, path, auth_headers(signer), []))[0] == 499


@pytest.mark.parametrize("path", ["/named", "/named/", "/named/x/y", "/fixed/", "named/x"])
async def test_an_unknown_route_is_not_found(app: Starlette, signer: Signer, path: str) -> None:
    assert (await send_request(app, path, auth_headers(signer), [b""]))[0] == 404
