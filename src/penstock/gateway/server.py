# SPDX-License-Identifier: Apache-2.0
"""The gateway over HTTP: an OpenAI base URL for agents that were not written for penstock.

Owns routes, session keys, body limits and OpenAI's error shape. A session is named by its key,
or by its key and the path `/sessions/{id}/v1`. Engines stay private: nothing here can load,
pause or stop one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec
import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from penstock.errors import EngineError, TooLarge, WireError
from penstock.gateway.dialects import chat
from penstock.gateway.gateway import Answer, Gateway, Session
from penstock.types import JsonObject, PolicyName
from penstock.wire.codec import JSON, decode, encode_json

log = structlog.get_logger(__name__)

MAX_BODY_BYTES = 1 << 20
Handler = Callable[[Session, Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Endpoint:
    method: str
    path: str
    handler: Handler
    summary: str
    request: type[Any] | None = None


def build_app(gateway: Gateway) -> Starlette:
    """Every route but `/healthz` answers only to the key of an open session."""
    document: JsonObject = {}

    async def openapi(session: Session, request: Request) -> Response:
        return Response(encode_json(document), media_type=JSON)

    endpoints = [
        _Endpoint(
            method=method, path=prefix + path, handler=handler, summary=summary, request=request
        )
        for prefix in ("", "/sessions/{session_id}")
        for method, path, handler, summary, request in (
            ("POST", "/v1/chat/completions", _chat, "OpenAI chat.", chat.ChatRequest),
            ("GET", "/v1/models", _models, "The policies of this session.", None),
        )
    ]
    endpoints.append(
        _Endpoint(method="GET", path="/openapi.json", handler=openapi, summary="This document.")
    )
    document.update(_openapi(endpoints))
    return Starlette(
        routes=[
            _exact(Route("/healthz", _healthz, methods=["GET"])),
            *(_route(endpoint, gateway) for endpoint in endpoints),
        ],
        exception_handlers={HTTPException: _no_such_route},
    )


# --- handlers -----------------------------------------------------------------------------------


async def _chat(session: Session, request: Request) -> Response:
    body = decode(await _read_body(request), chat.ChatRequest, media_type=JSON)
    chat.check(body)
    renderer = session.renderer(PolicyName(body.model))
    messages = chat.plain_messages(body)
    answers = await _ask(session, messages, body)
    reply = chat.Reply(
        model=body.model,
        choices=[chat.Choice(answer=answer, turn=session.turn(answer.turn)) for answer in answers],
        renderer=renderer,
        has_logprobs=bool(body.logprobs),
    )
    if await request.is_disconnected():
        _mark_unreached(session, reply)
        return Response(status_code=499)
    if not body.stream:
        return Response(encode_json(chat.completion_body(reply)), media_type=JSON)
    include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    return StreamingResponse(
        _stream(session, reply, include_usage=include_usage), media_type="text/event-stream"
    )


async def _ask(
    session: Session, messages: list[JsonObject], body: chat.ChatRequest
) -> list[Answer]:
    """All choices, or the first error; then the choices that did succeed reach nobody."""
    results = await asyncio.gather(
        *(
            session.chat_with(messages, chat.overrides_of(body, choice), PolicyName(body.model))
            for choice in range(body.num_choices)
        ),
        return_exceptions=True,
    )
    answers = [result for result in results if isinstance(result, Answer)]
    for result in results:
        if isinstance(result, BaseException):
            for answer in answers:
                session.mark_unreached(answer.turn)
            raise result
    return answers


async def _stream(
    session: Session, reply: chat.Reply, *, include_usage: bool
) -> AsyncIterator[bytes]:
    try:
        for event in chat.stream_events(reply, include_usage=include_usage):
            yield event
    except BaseException:  # cancelled or closed by the server because the client went away
        _mark_unreached(session, reply)
        raise


def _mark_unreached(session: Session, reply: chat.Reply) -> None:
    for choice in reply.choices:
        session.mark_unreached(choice.answer.turn)


async def _models(session: Session, request: Request) -> Response:
    models = [
        {"id": policy, "object": "model", "created": 0, "owned_by": "penstock"}
        for policy in session.policies
    ]
    return Response(encode_json({"object": "list", "data": models}), media_type=JSON)


async def _healthz(request: Request) -> Response:
    return Response(encode_json({"status": "ok"}), media_type=JSON)


# --- routing, keys, errors ----------------------------------------------------------------------


def _route(endpoint: _Endpoint, gateway: Gateway) -> Route:
    async def handle(request: Request) -> Response:
        try:
            session = gateway.find(_key(request), request.path_params.get("session_id"))
            return await endpoint.handler(session, request)
        except WireError as error:
            code = _OPENAI_CODES.get(error.code, error.code)
            return _error(error.status, code, str(error))
        except EngineError as error:
            return _error(503, "engine_error", str(error))
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception:
            log.exception("handler failed", method=endpoint.method, path=endpoint.path)
            return _error(500, "internal", "internal error; see this node's log")

    return _exact(Route(endpoint.path, handle, methods=[endpoint.method]))


def _exact(route: Route) -> Route:
    assert route.methods is not None
    route.methods.discard("HEAD")  # Starlette adds HEAD to GET; the document lists every method
    return route


def _key(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


async def _read_body(request: Request) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > MAX_BODY_BYTES:
        raise TooLarge(f"body of {declared} bytes; the gateway takes at most {MAX_BODY_BYTES}")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise TooLarge(f"body over {MAX_BODY_BYTES} bytes; shorten the conversation")
    return bytes(body)


_OPENAI_CODES = {"unauthorized": "invalid_api_key", "not_found": "model_not_found"}


def _error(status: int, code: str, message: str) -> Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return Response(encode_json(body), status_code=status, media_type=JSON)


async def _no_such_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reason = HTTPStatus(error.status_code).phrase.lower()
    message = f"{request.method} {request.url.path}: {reason}; see /openapi.json for the routes"
    return _error(error.status_code, reason.replace(" ", "_"), message)


def _openapi(endpoints: list[_Endpoint]) -> JsonObject:
    template = "#/components/schemas/{name}"
    (request,), components = msgspec.json.schema_components(
        [chat.ChatRequest], ref_template=template
    )
    paths: JsonObject = {
        "/healthz": {
            "get": {
                "summary": "Alive; the only route without a key.",
                "security": [],
                "responses": {"200": {"description": "alive"}},
            }
        }
    }
    for endpoint in endpoints:
        operation: JsonObject = {
            "summary": endpoint.summary,
            "responses": {"200": {"description": "done"}, "4XX": {"description": "OpenAI error"}},
        }
        if "{session_id}" in endpoint.path:
            parameter = {"name": "session_id", "in": "path", "required": True}
            operation["parameters"] = [{**parameter, "schema": {"type": "string"}}]
        if endpoint.request is not None:
            content = {JSON: {"schema": request}}
            operation["requestBody"] = {"required": True, "content": content}
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "penstock gateway", "version": "1"},
        "paths": paths,
        "security": [{"key": []}],
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
