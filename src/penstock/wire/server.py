# SPDX-License-Identifier: Apache-2.0
"""HTTP base of every service: a table of routes in, a Starlette app and its OpenAPI document
out.

Owns credentials per route, body limits, decoding, error bodies. One declaration per route is the
only source of routing, authorisation, validation and documentation, so none of them can forget a
route.
"""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import socket
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute
from starlette.types import Receive, Scope, Send

from penstock.errors import BadRequest, ConfigError, Forbidden, TooLarge, WireError
from penstock.wire.auth import Credential, Role, Verifier
from penstock.wire.codec import JSON, MSGPACK, decode, encode, encode_json
from penstock.wire.heads import BoundedHeads

log = structlog.get_logger(__name__)

DEFAULT_BODY_BYTES = 1 << 20
LARGE_BLOCK = 31 << 20
"""Bytes; glibc learns from blocks up to 32 MB what is worth keeping."""
EVERYBODY = frozenset(Role)
Lifespan = Callable[[Starlette], AbstractAsyncContextManager[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One authorised request, decoded."""

    body: Any
    credential: Credential
    path: dict[str, str]
    query: dict[str, str]
    headers: dict[str, str]
    is_gone: Callable[[], Awaitable[bool]]
    """Has the caller hung up? Asked before acting for somebody who may not be there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    method: str
    path: str
    handler: Callable[[Call], Awaitable[object]]
    """Returns a record to encode, or a Starlette Response as it is."""
    roles: frozenset[Role]
    summary: str
    request: type[Any] | None = None
    response: type[Any] | None = None
    max_body_bytes: int = DEFAULT_BODY_BYTES
    query: tuple[str, ...] = ()
    is_streamed: bool = False
    """The handler reads the body itself: an async iterator of bytes, however long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBody:
    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorAnswer:
    error: ErrorBody


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    status: str = "ok"


@dataclass(frozen=True, slots=True)
class Raw:
    """An answer that is already msgpack bytes (a sealed manifest, rows)."""

    body: bytes
    media_type: str = MSGPACK
    headers: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class Pieces:
    """An answer that is already msgpack bytes and is sent while it is made."""

    pieces: AsyncGenerator[bytes | memoryview]
    num_bytes: int | None = None
    """Of all of them, when that is known before."""


def build_app(
    routes: Sequence[Route], verifier: Verifier, *, title: str, lifespan: Lifespan | None = None
) -> Starlette:
    """Every route answers only to its roles; `/healthz` alone is open."""
    document: dict[str, Any] = {}

    async def openapi(call: Call) -> object:
        return Raw(encode_json(document), JSON)

    published = [
        *routes,
        Route(
            method="GET",
            path="/openapi.json",
            handler=openapi,
            roles=EVERYBODY,
            summary="This document.",
        ),
    ]
    document.update(_openapi(published, title))
    endpoints = [_Endpoint(route, verifier) for route in published]
    app = _App(
        routes=[
            StarletteRoute("/healthz", _healthz, methods=["GET"]),
            *(endpoint.route() for endpoint in endpoints),
        ],
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # it would answer without a token
    app.direct = _Table(endpoints)
    return app


class _Table:
    """Endpoints by method and path; of several the first that fits, as Starlette would have it."""

    def __init__(self, endpoints: Iterable[_Endpoint]) -> None:
        self._fixed: dict[tuple[str, str], _Endpoint] = {}
        self._named: dict[tuple[str, int], list[tuple[list[str], _Endpoint]]] = {}
        """With `{name}` among their parts, by the number of parts."""
        for endpoint in endpoints:
            method, path = endpoint.table.method, endpoint.table.path
            if "{" in path:
                parts = path.split("/")
                self._named.setdefault((method, len(parts)), []).append((parts, endpoint))
            else:
                self._fixed[method, path] = endpoint

    def find(self, method: str, path: str) -> tuple[_Endpoint, dict[str, str]] | None:
        """And what stands for each name in the path."""
        endpoint = self._fixed.get((method, path))
        if endpoint is not None:
            return endpoint, {}
        parts = path.split("/")
        for template, endpoint in self._named.get((method, len(parts)), ()):
            names = _names(template, parts)
            if names is not None:
                return endpoint, names
        return None


def _names(template: Sequence[str], parts: Sequence[str]) -> dict[str, str] | None:
    names: dict[str, str] = {}
    for wanted, part in zip(template, parts, strict=True):
        if wanted.startswith("{") and part:
            names[wanted[1:-1]] = part
        elif wanted != part:
            return None
    return names


class _App(Starlette):
    """Calls go straight to their endpoint, which answers for its own errors; Starlette's layers
    cost more than a small call. They answer for what is nobody's."""

    direct = _Table(())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not scope.get("root_path"):
            found = self.direct.find(scope["method"], scope["path"])
            if found is not None:
                endpoint, scope["path_params"] = found
                await endpoint(scope, receive, send)
                return
        await super().__call__(scope, receive, send)


async def _healthz(request: Request) -> Response:
    return Response(encode_json(Health()), media_type=JSON)


class _Endpoint:
    """One route as an ASGI app."""

    def __init__(self, table: Route, verifier: Verifier) -> None:
        self.table = table
        self._verifier = verifier

    def route(self) -> StarletteRoute:
        starlette_route = StarletteRoute(self.table.path, self, methods=[self.table.method])
        starlette_route.methods = {
            self.table.method
        }  # Starlette adds HEAD to GET; the table is exact
        return starlette_route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = await self._answer(scope, receive)
        await answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive) -> Response:
        table = self.table
        # The first of several headers with one name counts.
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in reversed(scope["headers"])}
        try:
            credential = _authorise(headers, table, self._verifier)
            request = Request(scope, receive)
            body: Any = request.stream() if table.is_streamed else None
            if table.request is not None and not table.is_streamed:
                body = _decode_body(await _read_body(receive, headers, table), headers, table)
            call = Call(
                body=body,
                credential=credential,
                path={name: str(value) for name, value in request.path_params.items()},
                query=dict(request.query_params) if scope["query_string"] else {},
                headers=headers,
                is_gone=request.is_disconnected,
            )
            return _response(headers, await table.handler(call))
        except WireError as error:
            return error_response(error)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception:
            log.exception("handler failed", method=table.method, path=table.path)
            return error_response(WireError("internal error; see this service's log"))


def _authorise(headers: Mapping[str, str], route: Route, verifier: Verifier) -> Credential:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    credential = verifier.verify(token.strip() if scheme.lower() == "bearer" else "")
    if credential.role not in route.roles:
        allowed = ", ".join(sorted(route.roles))
        raise Forbidden(
            f"role {credential.role} may not {route.method} {route.path}; this takes {allowed}: "
            "mint one with `penstock token RUN --role ROLE`"
        )
    return credential


async def _read_body(receive: Receive, headers: Mapping[str, str], route: Route) -> bytes:
    limit = route.max_body_bytes
    declared = headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise TooLarge(f"body of {declared} bytes; {route.path} takes at most {limit}")
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise TooLarge(f"body over {limit} bytes at {route.path}")
        chunks.append(chunk)
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _decode_body(body: bytes, headers: Mapping[str, str], route: Route) -> Any:
    assert route.request is not None
    media_type = headers.get("content-type", MSGPACK).split(";")[0].strip().lower()
    if media_type not in (MSGPACK, JSON):
        raise BadRequest(f"content-type {media_type!r}; send {MSGPACK} or {JSON}")
    return decode(body, route.request, media_type=media_type)


def _response(headers: Mapping[str, str], value: object) -> Response:
    if isinstance(value, Response):
        return value
    if isinstance(value, Raw):
        return Response(value.body, media_type=value.media_type, headers=value.headers)
    if isinstance(value, Pieces):
        return _Streamed(value)
    if MSGPACK in headers.get("accept", ""):
        return Response(encode(value), media_type=MSGPACK)
    return Response(encode_json(value), media_type=JSON)


class _Streamed(Response):
    """As Starlette's own, without its task group, which costs more than a small answer."""

    media_type = MSGPACK

    def __init__(self, answer: Pieces) -> None:
        self._pieces = answer.pieces
        self.status_code = 200
        self.background = None
        size = answer.num_bytes
        self.init_headers({} if size is None else {"content-length": str(size)})

    def render(self, content: Any) -> bytes:
        raise NotImplementedError("this answer is never in memory as a whole")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        hung_up = asyncio.create_task(_hung_up(receive))
        try:
            await send(start)
            async for piece in self._pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                await asyncio.sleep(0)  # while the socket takes all, nobody else had a turn
                if hung_up.done():
                    return  # nobody is there for the rest
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            hung_up.cancel()
            await self._pieces.aclose()


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def error_response(error: WireError) -> Response:
    headers = {} if error.retry_after_s is None else {"retry-after": f"{error.retry_after_s:g}"}
    body = ErrorAnswer(error=ErrorBody(code=error.code, message=str(error)))
    return Response(encode_json(body), status_code=error.status, media_type=JSON, headers=headers)


# --- OpenAPI ----------------------------------------------------------------------------------


def _openapi(routes: Sequence[Route], title: str) -> dict[str, Any]:
    kinds = [kind for r in routes for kind in (r.request, r.response) if kind is not None]
    schemas, components = msgspec.json.schema_components(
        [*kinds, Health, ErrorAnswer], ref_template="#/components/schemas/{name}"
    )
    by_kind = dict(zip([*kinds, Health, ErrorAnswer], schemas, strict=True))
    paths: dict[str, Any] = {
        "/healthz": {
            "get": {
                "summary": "Alive; the only route without a credential.",
                "security": [],
                "responses": {"200": _content(by_kind[Health])},
            }
        }
    }
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, by_kind)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": "1"},
        "paths": paths,
        "security": [{"token": []}],
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route, schemas: dict[Any, Any]) -> dict[str, Any]:
    names = [part[1:-1] for part in route.path.split("/") if part.startswith("{")]
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in names
    ] + [{"name": name, "in": "query", "schema": {"type": "string"}} for name in route.query]
    answer = (
        {"description": "done"} if route.response is None else _content(schemas[route.response])
    )
    operation: dict[str, Any] = {
        "summary": route.summary,
        "x-roles": sorted(route.roles),
        "parameters": parameters,
        "responses": {"200": answer, "4XX": _content(schemas[ErrorAnswer])},
    }
    if route.request is not None:
        schema = {"schema": schemas[route.request]}
        operation["requestBody"] = {"required": True, "content": {MSGPACK: schema, JSON: schema}}
    return operation


def _content(schema: Any) -> dict[str, Any]:
    return {"description": "done", "content": {JSON: {"schema": schema}}}


# --- listening --------------------------------------------------------------------------------


def check_bind(host: str, tls: Tls | None) -> None:
    """Nothing listens beyond loopback without TLS; credentials are part of every app."""
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    if not is_loopback and tls is None:
        raise ConfigError(
            f"refusing to listen on {host} without TLS: tokens would cross the network in clear. "
            "Give --tls-cert and --tls-key, or listen on 127.0.0.1"
        )


def calm_collector() -> None:
    """For a process that is one service, once its state is built: what lives now lives on, so the
    collector of cycles need not walk it again and again; counting references frees the rest. After
    one large block the allocator keeps what large bodies free, and need not ask for it page by page
    with each of them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    bytearray(LARGE_BLOCK)


async def serve(app: Starlette, host: str, port: int, tls: Tls | None = None) -> None:
    """Serve until SIGTERM or cancellation; open long-polls are cut after two seconds."""
    calm_collector()
    await server(app, host, port, tls).serve()


async def serve_on(app: Starlette, listener: socket.socket, tls: Tls | None = None) -> None:
    """Serve inside somebody else's process until cancelled; signals stay the host's business."""
    host, port, *_ = listener.getsockname()
    guest = _Guest(_config(app, host, port, tls))
    try:
        await guest.serve(sockets=[listener])
    except asyncio.CancelledError:
        if guest.started:
            await guest.shutdown(sockets=[listener])
        raise


class _Guest(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def server(app: Starlette, host: str, port: int, tls: Tls | None = None) -> uvicorn.Server:
    return uvicorn.Server(_config(app, host, port, tls))


def _config(app: Starlette, host: str, port: int, tls: Tls | None = None) -> uvicorn.Config:
    check_bind(host, tls)
    return uvicorn.Config(
        cast(Any, app),
        host=host,
        port=port,
        loop="uvloop",
        http=BoundedHeads,
        log_config=None,
        access_log=False,
        proxy_headers=False,
        lifespan="on",
        timeout_graceful_shutdown=2,
        timeout_keep_alive=75,
        ssl_certfile=None if tls is None else str(tls.certificate),
        ssl_keyfile=None if tls is None else str(tls.key),
    )
