# SPDX-License-Identifier: Apache-2.0
"""HTTP server of the gateway: a base URL for agents not written for penstock.

Owns routing, key checks, body limits and quotas. A session is identified by its key, or by its key
and the path `/sessions/{id}/v1`. A call names its role as `model`, or by the path
`/roles/{role}/v1`; the path wins, for agents whose model name is fixed. Engines stay private:
request paths are never forwarded, and nothing here can load, pause or stop an engine. Dialects of
installed packages are served too.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.errors import ConfigError, RequestRejected, WireError
from penstock.gateway.dialects.chat import CHAT
from penstock.gateway.dialects.completions import COMPLETIONS
from penstock.gateway.dialects.dialect import Dialect, ParsedRequest
from penstock.gateway.dialects.messages import MESSAGES
from penstock.gateway.dialects.responses import RESPONSES
from penstock.gateway.exchange import Exchange, error_for_agent
from penstock.gateway.gateway import Gateway, Session
from penstock.gateway.quotas import Quotas
from penstock.plugins import DIALECT_GROUP, load_object, plugin_names
from penstock.types import JsonObject, PolicyName
from penstock.wire.call_budget import CallBudget, Share
from penstock.wire.codec import JSON, decode, encode_json
from penstock.wire.doors import admit
from penstock.wire.json_parts import require_few_parts
from penstock.wire.routes import RawResponse
from penstock.wire.server import has_disconnected, read_body, send_whole, wait_for_disconnect

MAX_BODY_BYTES = 4 << 20
MAX_HELD_BYTES = 512 << 20
"""Bodies of one owner's calls that are in work: read, waiting for their turn or being answered."""
READ, HELD = "read", "held"
"""Two budgets of each owner, over all its sessions and routes."""
DIALECTS = (CHAT, RESPONSES, MESSAGES, COMPLETIONS)
"""The built-in ones."""
SESSION = "/sessions/{session_id}"
ROLE = "/roles/{role}"
PREFIXES = ("", SESSION, ROLE, SESSION + ROLE)
"""Of every route for models."""
CLIENT_CLOSED_REQUEST = 499
"""Non-standard status for a client that disconnected; only logs show it."""


def build_app(gateway: Gateway, quotas: Quotas | None = None) -> Starlette:
    """Build the app. Every route except `/healthz` needs the key of an open session. Quotas apply
    per session."""
    quotas = quotas or Quotas()
    dialects = (*DIALECTS, *_installed_dialects())
    document = openapi_document(dialects)

    async def openapi(session: Session) -> JsonObject:
        return document

    bodies = _BodyBudgets(reading=CallBudget(), held=CallBudget(MAX_HELD_BYTES))
    calls = {dialect.path: _DialectApp(dialect, gateway, quotas, bodies) for dialect in dialects}
    app = _App(
        routes=[
            *(
                Route(prefix + path, call, methods=["POST"])
                for prefix in PREFIXES
                for path, call in calls.items()
            ),
            *(_get(prefix + "/v1/models", _models, gateway) for prefix in PREFIXES),
            _get("/openapi.json", openapi, gateway),
            _exact(Route("/healthz", _healthz, methods=["GET"])),
        ],
        middleware=[Middleware(_RejectEscapedPaths)],
        exception_handlers={HTTPException: _no_such_route},
    )
    app.router.redirect_slashes = False
    app.calls = calls
    return app


def _installed_dialects() -> Iterator[Dialect]:
    """Dialects that installed packages offer; each has a separate path."""
    taken = {dialect.path for dialect in DIALECTS}
    for name in plugin_names(DIALECT_GROUP):
        found: object = load_object(name, DIALECT_GROUP)
        if not isinstance(found, Dialect):
            raise ConfigError(
                f"dialect {name!r} of the entry points {DIALECT_GROUP} is a "
                f"{type(found).__name__}; offer a Dialect, or uninstall its package"
            )
        if found.path in taken:
            raise ConfigError(
                f"dialect {name!r} of the entry points {DIALECT_GROUP} has the path {found.path}, "
                "which another dialect serves; give it another path, or uninstall its package"
            )
        taken.add(found.path)
        yield found


class _App(Starlette):
    """Dispatches model calls directly to their dialect, which formats its own errors; Starlette
    handles all other requests."""

    calls: Mapping[str, ASGIApp] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = self._find(scope) if scope["type"] == "http" else None
        await (call or super().__call__)(scope, receive, send)

    def _find(self, scope: Scope) -> ASGIApp | None:
        path: str = scope["path"]
        if scope["method"] != "POST" or scope.get("root_path") or b"%" in scope["raw_path"]:
            return None
        call = self.calls.get(path)
        if call is None and path.startswith(("/sessions/", "/roles/")):
            path, params = _split(path)
            call = self.calls.get(path) if all(params.values()) else None
            scope["path_params"] = params
        return call


def _split(path: str) -> tuple[str, dict[str, str]]:
    """The path of a dialect, and what stands before it: session and role."""
    params: dict[str, str] = {}
    for prefix, name in (("/sessions/", "session_id"), ("/roles/", "role")):
        if path.startswith(prefix):
            params[name], _, rest = path.removeprefix(prefix).partition("/")
            path = "/" + rest
    return path, params


# --- calls --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _BodyBudgets:
    """Bytes of bodies that each owner may have in the gateway; its further ones wait unread."""

    reading: CallBudget
    held: CallBudget

    async def read(self, owner: str, num_bytes: int, request: Request) -> bytes:
        who = owner, READ
        await self.reading.enter(who, num_bytes)
        try:
            return await read_body(request, MAX_BODY_BYTES)
        finally:
            self.reading.leave(who, num_bytes)


@dataclass(frozen=True, slots=True)
class _DialectApp:
    """ASGI application of one dialect."""

    _dialect: Dialect
    _gateway: Gateway
    _quotas: Quotas
    _bodies: _BodyBudgets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            response = await self._respond(request, send)
        except ClientDisconnect:
            response = Response(status_code=CLIENT_CLOSED_REQUEST)
        except Exception as error:
            response = _failure(error_for_agent(error), self._dialect)
        if response is not None:
            await response(scope, receive, send)

    async def _respond(self, request: Request, send: Send) -> Response | None:
        """None if the answer was sent."""
        session = _find(self._gateway, request)
        self._quotas.check(session)
        owner, num_bytes = self._gateway.queue_key(session.id), _declared_bytes(request)
        held = Share(self._bodies.held)
        await held.take((owner, HELD), num_bytes)
        try:
            body = await self._bodies.read(owner, num_bytes, request)
            try:
                return await self._answer(session, body, request, send)
            except (WireError, RequestRejected, RecursionError):
                self._quotas.charge_refusal(session, len(body))
                raise
        finally:
            held.give_back()

    async def _answer(
        self, session: Session, body: bytes, request: Request, send: Send
    ) -> Response | None:
        require_few_parts(body)
        parsed = self._dialect.read(decode(body, dict[str, Any], media_type=JSON))
        if role := request.path_params.get("role"):
            parsed = _in_role(parsed, role)
        if has_disconnected(request.receive):  # asked now, its connection is read meanwhile
            raise ClientDisconnect
        exchange = Exchange(session, parsed)
        with self._quotas.reserve(session, len(parsed.calls)):
            try:
                if parsed.is_stream:
                    await _stream(exchange, request, send)
                    return None
                replies = await exchange.replies()
            finally:
                self._quotas.charge(session, exchange.answers.values())
        if has_disconnected(request.receive):
            exchange.mark_unreached()
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        await send_whole(RawResponse(encode_json(parsed.body(replies)), JSON), send)
        return None


async def _stream(exchange: Exchange, request: Request, send: Send) -> None:
    disconnected = asyncio.create_task(wait_for_disconnect(request.receive))
    try:
        await exchange.stream(send, disconnected.done)
    finally:
        disconnected.cancel()


def _in_role(parsed: ParsedRequest, role: str) -> ParsedRequest:
    """The request with the role of its path in place of its `model`."""
    name = PolicyName(role)
    return replace(parsed, model=name, calls=[replace(call, policy=name) for call in parsed.calls])


def _declared_bytes(request: Request) -> int:
    """Most bytes that the body can have; never 0, so that empty ones count too."""
    declared = request.headers.get("content-length", "")
    is_known = declared.isdecimal() and len(declared) < 16
    return min(int(declared) + 1, MAX_BODY_BYTES) if is_known else MAX_BODY_BYTES


# --- other routes -------------------------------------------------------------------------------


async def _models(session: Session) -> JsonObject:
    """Response that both OpenAI and Anthropic clients accept."""
    models = [
        {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "penstock",
            "type": "model",
            "display_name": name,
            "created_at": "1970-01-01T00:00:00Z",
            "lifecycle": "active",
        }
        for name in session.model_names
    ]
    ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"], "has_more": False}
    return {"object": "list", "data": models, **ends}


async def _healthz(request: Request) -> Response:
    return Response(encode_json({"status": "ok"}), media_type=JSON)


def _get(path: str, answer: Callable[[Session], Awaitable[JsonObject]], gateway: Gateway) -> Route:
    async def handle(request: Request) -> Response:
        try:
            body = await answer(_find(gateway, request))
        except Exception as error:
            return _failure(error_for_agent(error), CHAT)
        return Response(encode_json(body), media_type=JSON)

    return _exact(Route(path, handle, methods=["GET"]))


def _exact(route: Route) -> Route:
    assert route.methods is not None
    route.methods.discard("HEAD")  # Starlette adds HEAD to GET; the document lists every method
    return route


def openapi_document(dialects: Sequence[Dialect]) -> JsonObject:
    """Paths and request schemas."""
    template = "#/components/schemas/{name}"
    requests, components = msgspec.json.schema_components(
        [dialect.request for dialect in dialects], ref_template=template
    )
    paths: JsonObject = {
        "/healthz": {"get": {**_operation("Liveness check; needs no key."), "security": []}},
        "/openapi.json": {"get": _operation("This document.")},
    }
    for prefix in PREFIXES:
        models = _operation("List the roles and policies of this session.")
        paths[f"{prefix}/v1/models"] = {"get": _in_session(models, prefix)}
        for dialect, request in zip(dialects, requests, strict=True):
            operation = _operation(dialect.summary)
            content = {JSON: {"schema": request}}
            operation["requestBody"] = {"required": True, "content": content}
            paths[prefix + dialect.path] = {"post": _in_session(operation, prefix)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "penstock gateway", "version": "1"},
        "paths": paths,
        "security": [{"bearer": []}, {"key": []}],
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(summary: str) -> JsonObject:
    responses = {
        "200": {"description": "done"},
        "4XX": {"description": "client error, in the format of the API that was called"},
        "503": {"description": "no engine available"},
    }
    return {"summary": summary, "responses": responses}


def _in_session(operation: JsonObject, prefix: str) -> JsonObject:
    if not prefix:
        return operation
    names = [name for name in ("session_id", "role") if f"{{{name}}}" in prefix]
    schema = {"in": "path", "required": True, "schema": {"type": "string"}}
    return {**operation, "parameters": [{"name": name, **schema} for name in names]}


# --- keys, paths, errors ------------------------------------------------------------------------


def read_key(request: Request) -> str:
    """The bearer token, or Anthropic's `x-api-key` header; empty if there is neither."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


def _find(gateway: Gateway, request: Request) -> Session:
    session = gateway.find(read_key(request), request.path_params.get("session_id"))
    if "connection" in request.scope:
        admit(request.scope, gateway.queue_key(session.id))
    return session


class _RejectEscapedPaths:
    """Rejects percent-encoded paths: no route needs them, and they could hide another path."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or b"%" not in scope.get("raw_path", b""):
            await self._app(scope, receive, send)
            return
        response = await _no_such_route(Request(scope), HTTPException(HTTPStatus.NOT_FOUND))
        await response(scope, receive, send)


def _failure(error: WireError, dialect: Dialect) -> Response:
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    body = encode_json(dialect.error(error))
    return Response(body, status_code=error.status, headers=headers, media_type=JSON)


async def _no_such_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reason = HTTPStatus(error.status_code).phrase.lower()
    failure = WireError(
        f"{request.method} {request.url.path}: {reason}; see /openapi.json for the routes"
    )
    failure.status = error.status_code
    failure.code = reason.replace(" ", "_") if error.status_code != 404 else "no_such_route"
    return _failure(failure, MESSAGES if MESSAGES.path in request.url.path else CHAT)
