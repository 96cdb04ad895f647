# SPDX-License-Identifier: Apache-2.0
"""HTTP base of every service: builds a Starlette app from a table of routes.

Owns credentials per route, body limits, decoding and error bodies. One declaration per route is the
only source of routing, authorisation, validation and documentation, so they cannot disagree.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import structlog
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute
from starlette.types import Receive, Scope, Send

from penstock.errors import BadRequest, Forbidden, TooLarge, WireError
from penstock.redaction import excerpt
from penstock.wire.auth import Credential, Verifier
from penstock.wire.call_budget import CALL_BYTES, CallBudget, Share
from penstock.wire.codec import JSON, MSGPACK, decode, encode, encode_json
from penstock.wire.credential_routes import credential_routes
from penstock.wire.doors import admit
from penstock.wire.json_parts import require_few_parts
from penstock.wire.openapi import openapi_document
from penstock.wire.routes import (
    ALL_ROLES,
    Call,
    ErrorBody,
    ErrorResponse,
    Health,
    RawResponse,
    Route,
    StreamedResponse,
    bearer_token,
)

log = structlog.get_logger(__name__)

MAX_JSON_BYTES = 4 << 20
"""JSON is for people; its lists are counted only when they are read."""
MAX_PARAMETER_CHARS = 8192
SMALL_ANSWER_BYTES = 64 << 10
"""The kernel takes so many at once, whether they are read or not."""
Lifespan = Callable[[Starlette], AbstractAsyncContextManager[None]]
OnAction = Callable[[str, Call], Awaitable[None]]
TokenOf = Callable[[Mapping[str, str]], str]


def build_app(
    routes: Sequence[Route],
    verifier: Verifier,
    *,
    title: str,
    lifespan: Lifespan | None = None,
    on_action: OnAction | None = None,
    token_of: TokenOf = bearer_token,
) -> Starlette:
    """Every route requires one of its roles; only `/healthz` is open. `on_action` is called after
    each call of an audited route, before its answer. `token_of`: where requests have the token."""
    document: dict[str, Any] = {}

    async def openapi(call: Call) -> object:
        return RawResponse(encode_json(document), JSON)

    published = [
        *routes,
        *credential_routes(verifier),
        Route(
            method="GET",
            path="/openapi.json",
            handler=openapi,
            roles=ALL_ROLES,
            summary="This document.",
            shares_budget=True,
        ),
    ]
    document.update(openapi_document(published, title))
    budget = CallBudget()
    endpoints = [_Endpoint(route, verifier, budget, on_action, token_of) for route in published]
    app = _App(
        routes=[
            StarletteRoute("/healthz", _healthz, methods=["GET"]),
            *(endpoint.route() for endpoint in endpoints),
        ],
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # redirects would not require a token
    app.route_table = _RouteTable(endpoints)
    return app


class _RouteTable:
    """Endpoints by method and path; the first match wins, as in Starlette."""

    def __init__(self, endpoints: Iterable[_Endpoint]) -> None:
        self._static: dict[tuple[str, str], _Endpoint] = {}
        self._parametric: dict[tuple[str, int], list[tuple[list[str], _Endpoint]]] = {}
        """Paths with a `{name}` part, by the number of parts."""
        for endpoint in endpoints:
            method, path = endpoint.spec.method, endpoint.spec.path
            if "{" in path:
                parts = path.split("/")
                self._parametric.setdefault((method, len(parts)), []).append((parts, endpoint))
            else:
                self._static[method, path] = endpoint

    def find(self, method: str, path: str) -> tuple[_Endpoint, dict[str, str]] | None:
        """The endpoint, and the values of its path parameters."""
        endpoint = self._static.get((method, path))
        if endpoint is not None:
            return endpoint, {}
        parts = path.split("/")
        for template, endpoint in self._parametric.get((method, len(parts)), ()):
            names = _match_path(template, parts)
            if names is not None:
                return endpoint, names
        return None


def _match_path(template: Sequence[str], parts: Sequence[str]) -> dict[str, str] | None:
    names: dict[str, str] = {}
    for expected, part in zip(template, parts, strict=True):
        if expected.startswith("{") and part:
            names[expected[1:-1]] = part
        elif expected != part:
            return None
    return names


class _App(Starlette):
    """Dispatches known routes directly to their endpoint, which handles its own errors: Starlette's
    middleware costs more than a small call. Starlette handles everything else."""

    route_table = _RouteTable(())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not scope.get("root_path"):
            found = self.route_table.find(scope["method"], scope["path"])
            if found is not None:
                endpoint, scope["path_params"] = found
                await endpoint(scope, receive, send)
                return
        await super().__call__(scope, receive, send)


async def _healthz(request: Request) -> Response:
    return Response(encode_json(Health()), media_type=JSON)


class _Endpoint:
    """One route as an ASGI app."""

    def __init__(
        self,
        spec: Route,
        verifier: Verifier,
        budget: CallBudget,
        on_action: OnAction | None,
        token_of: TokenOf,
    ) -> None:
        self.spec = spec
        self._token_of = token_of
        self._on_action = on_action
        self._verifier = verifier
        self._budget = budget

    def route(self) -> StarletteRoute:
        starlette_route = StarletteRoute(self.spec.path, self, methods=[self.spec.method])
        starlette_route.methods = {self.spec.method}  # Starlette adds HEAD to GET
        return starlette_route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        share = Share(self._budget)
        try:
            answer = await self._respond(scope, receive, share)
            if isinstance(answer, Response):
                await answer(scope, receive, send)
            else:
                await send_whole(answer, send)
        finally:
            share.give_back()

    async def _respond(
        self, scope: Scope, receive: Receive, share: Share
    ) -> Response | RawResponse:
        spec = self.spec
        # If a header is repeated, the first one counts.
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in reversed(scope["headers"])}
        try:
            credential = _authorise(self._token_of(headers), spec, self._verifier)
            if "connection" in scope:
                admit(scope, credential.subject)
            if spec.shares_budget or spec.has_body:
                # Apart for each route: an upload must not hold up the heartbeats of its sender.
                await share.take((credential.subject, spec.path), _work_bytes(headers, spec))
            call = await self._read(scope, receive, headers, credential)
            if not spec.shares_budget:
                share.give_back()
            answer = await spec.handler(call)
            if spec.audited and self._on_action is not None:
                await self._on_action(spec.audited, call)
            answer = _response(headers, answer)
            if spec.shares_budget:
                share.resize(max(CALL_BYTES, len(getattr(answer, "body", b""))))
            return answer
        except WireError as error:
            return error_response(error)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception:
            log.exception("handler failed", method=spec.method, path=spec.path)
            return error_response(WireError("internal error; see this service's log"))

    async def _read(
        self, scope: Scope, receive: Receive, headers: dict[str, str], credential: Credential
    ) -> Call:
        spec = self.spec
        request = Request(scope, receive)
        body: Any = request.stream() if spec.is_streamed else None
        if spec.has_body:
            body = _decode_body(await read_body(request, spec.max_body_bytes), headers, spec)
        return Call(
            body=body,
            credential=credential,
            path=_checked(request.path_params),
            query=_checked(request.query_params) if scope["query_string"] else {},
            headers=headers,
            is_disconnected=request.is_disconnected,
        )


async def send_whole(answer: RawResponse, send: Send) -> None:
    """Returns when the caller has read most of it, so that a share of the budget counts until
    then."""
    length = (b"content-length", b"%d" % len(answer.body))
    headers = (length, (b"content-type", answer.media_type.encode()))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    body = answer.body
    if len(body) > SMALL_ANSWER_BYTES:
        await send({"type": "http.response.body", "body": body, "more_body": True})
        body = b""  # to be sent only when there is room behind the others
    await send({"type": "http.response.body", "body": body})


def _authorise(token: str, route: Route, verifier: Verifier) -> Credential:
    credential = verifier.verify(token)
    if credential.role not in route.roles:
        allowed = ", ".join(sorted(route.roles))
        raise Forbidden(
            f"role {credential.role} may not {route.method} {route.path}; allowed: {allowed}. "
            "Mint a token with `penstock token RUN --role ROLE`"
        )
    return credential


def _work_bytes(headers: Mapping[str, str], route: Route) -> int:
    """Bytes of memory and time that a call may cost; a streamed body is never in memory."""
    if not route.has_body:
        return CALL_BYTES + route.answer_bytes
    declared = headers.get("content-length", "")
    size = int(declared) if declared.isdecimal() and len(declared) < 16 else route.max_body_bytes
    return CALL_BYTES + route.answer_bytes + min(size, route.max_body_bytes)


def _checked(parameters: Mapping[str, str]) -> dict[str, str]:
    """Parameters of the path or the query, within the bounds of any text: they reach names, paths
    and the ledger, as fields of a body do."""
    for name, value in parameters.items():
        if len(value) > MAX_PARAMETER_CHARS or not value.isprintable():
            raise BadRequest(
                f"parameter {name[:80]!r} is longer than {MAX_PARAMETER_CHARS} characters or has "
                "characters that cannot be printed"
            )
    return dict(parameters)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The complete body; raises TooLarge, before reading if the declared length is too large."""
    path = request.scope["path"]
    sizes = [value for name, value in request.scope["headers"] if name == b"content-length"]
    declared = sizes[0].decode("latin-1") if sizes else ""
    if declared.isdigit() and int(declared) > max_bytes:
        raise TooLarge(
            f"request body is {declared} bytes; the limit for {path} is {max_bytes} bytes"
        )
    chunks: list[bytes] = []
    size, has_more = 0, True
    while has_more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > max_bytes:
            raise TooLarge(f"request body exceeds the limit for {path}, {max_bytes} bytes")
        has_more = message.get("more_body", False)
    return b"".join(chunks)


def _decode_body(body: bytes, headers: Mapping[str, str], route: Route) -> Any:
    assert route.request is not None
    if route.request is bytes:
        return body
    media_type = headers.get("content-type", MSGPACK).split(";")[0].strip().lower()
    if media_type not in (MSGPACK, JSON):
        raise BadRequest(f"unsupported content-type {media_type!r}; send {MSGPACK} or {JSON}")
    if media_type == JSON:
        if len(body) > MAX_JSON_BYTES:
            raise TooLarge(f"JSON of {len(body)} bytes; above {MAX_JSON_BYTES}, send {MSGPACK}")
        require_few_parts(body)
    elif route.check_parts is not None:
        route.check_parts(body)
    return decode(body, route.request, media_type=media_type)


def _response(headers: Mapping[str, str], value: object) -> Response | RawResponse:
    """What is only bytes is sent without Starlette's response, which costs more than a small
    one."""
    if isinstance(value, Response):
        return value
    if isinstance(value, RawResponse):
        if not value.headers:
            return value
        return Response(value.body, media_type=value.media_type, headers=value.headers)
    if isinstance(value, StreamedResponse):
        return _ChunkedResponse(value)
    if MSGPACK in headers.get("accept", ""):
        return RawResponse(encode(value))
    return RawResponse(encode_json(value), JSON)


class _ChunkedResponse(Response):
    """Like Starlette's StreamingResponse, without its task group, which costs more than a small
    response."""

    def __init__(self, answer: StreamedResponse) -> None:
        self._chunks = answer.chunks
        self.media_type = answer.media_type
        self.status_code = 200
        self.background = None
        size = answer.num_bytes
        self.init_headers({} if size is None else {"content-length": str(size)})

    def render(self, content: Any) -> bytes:
        raise NotImplementedError("a streamed response is never fully in memory")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        disconnected = asyncio.create_task(wait_for_disconnect(receive))
        try:
            await send(start)
            async for chunk in self._chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await asyncio.sleep(0)  # a fast socket never blocks; let other tasks run
                if disconnected.done():
                    return
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            disconnected.cancel()
            await self._chunks.aclose()


async def wait_for_disconnect(receive: Receive) -> None:
    """To be run as one task per call: polling after every chunk costs more than the chunk."""
    while (await receive())["type"] != "http.disconnect":
        pass


def has_disconnected(receive: Receive) -> bool:
    """Whether the caller has gone, by now; after its whole body was read. Costs less than a task
    that waits for it."""
    waiting = receive().__await__()
    try:
        next(waiting)
    except StopIteration as received:
        return received.value["type"] == "http.disconnect"
    waiting.close()
    return False


def error_response(error: WireError) -> Response:
    headers = {} if error.retry_after_s is None else {"retry-after": f"{error.retry_after_s:g}"}
    body = ErrorResponse(error=ErrorBody(code=error.code, message=excerpt(str(error))))
    return Response(encode_json(body), status_code=error.status, media_type=JSON, headers=headers)
