# SPDX-License-Identifier: Apache-2.0
"""Route declarations of a service with their roles and types, the input of handlers, and special
responses."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, TypeVar, get_type_hints

from msgspec import Meta

from penstock.wire.auth import Credential, Role
from penstock.wire.codec import MSGPACK

DEFAULT_MAX_BODY_BYTES = 1 << 20
ALL_ROLES = frozenset(Role)
Handler = TypeVar("Handler", bound=Callable[..., Awaitable[object]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One authorised request, decoded."""

    body: Any
    credential: Credential
    path: dict[str, str]
    query: dict[str, str]
    headers: dict[str, str]
    is_disconnected: Callable[[], Awaitable[bool]]
    """Whether the caller has disconnected; check it before acting on a long-held request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    method: str
    path: str
    handler: Callable[[Call], Awaitable[object]]
    """Returns a record to encode, or a Starlette Response that is sent unchanged."""
    roles: frozenset[Role]
    summary: str
    request: type[Any] | None = None
    """What a body is decoded to; `bytes`: it is passed on as it is."""
    response: type[Any] | None = None
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    check_parts: Callable[[bytes], None] | None = None
    """Looks at a msgpack body before it is decoded; raises BadRequest for one of too many parts,
    each of which costs time, while no other call is answered."""
    query: tuple[str, ...] = ()
    shares_budget: bool = False
    """Calls of one credential have a limited number of bytes in work at a time, until their answers
    are read; the others wait their turn. Of other calls only the bodies count, while they are
    read."""
    answer_bytes: int = 0
    """Of an answer, which count while it is made; then its true size counts. Only where calls share
    a budget."""
    audited: str = ""
    """What a call does, for the log of operators' actions; empty for none of them."""
    is_streamed: bool = False
    """The handler reads the body itself, as an async iterator of bytes of any length."""

    @property
    def has_body(self) -> bool:
        """Whether a body is read into memory before the handler is called."""
        return self.request is not None and not self.is_streamed


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBody:
    code: Annotated[str, Meta(max_length=128)]
    message: Annotated[str, Meta(max_length=100_000)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorResponse:
    error: ErrorBody


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    status: str = "ok"


@dataclass(frozen=True, slots=True)
class RawResponse:
    """A response that is already encoded (a sealed manifest, rows)."""

    body: bytes
    media_type: str = MSGPACK
    headers: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class StreamedResponse:
    """A response that is sent while it is produced."""

    chunks: AsyncGenerator[bytes | memoryview]
    num_bytes: int | None = None
    """Total size, if known in advance."""
    media_type: str = MSGPACK


def bearer_token(headers: Mapping[str, str]) -> str:
    """The token of a request; empty if it has none."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def route(
    method: str, path: str, roles: frozenset[Role], **options: Any
) -> Callable[[Handler], Handler]:
    """Declares a method as the handler of a route: its docstring is the summary, the type of its
    parameter `body` (if it has one) the request, its return type the response. `options`: further
    fields of `Route`."""

    def declare(handler: Handler) -> Handler:
        summary = " ".join((handler.__doc__ or "").split())
        required = {"method": method, "path": path, "roles": roles, "summary": summary}
        vars(handler)["route"] = required | options
        return handler

    return declare


def routes_of(service: object) -> list[Route]:
    """The routes declared by methods of this object, bound to it."""
    found: list[Route] = []
    for name, function in vars(type(service)).items():
        if hasattr(function, "route"):
            types = get_type_hints(function)
            handler = getattr(service, name)
            if "body" in types:
                handler = partial(_with_body, handler)
            fields = {"request": types.get("body"), "response": types["return"]} | function.route
            found.append(Route(handler=handler, **fields))
    return found


def _with_body(handler: Callable[[Call, Any], Awaitable[object]], call: Call) -> Awaitable[object]:
    return handler(call, call.body)
