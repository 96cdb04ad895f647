# SPDX-License-Identifier: Apache-2.0
"""Route declarations of a service with their roles and types, the input of handlers, and special
responses."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.wire.auth import Credential, Role
from penstock.wire.codec import MSGPACK

DEFAULT_MAX_BODY_BYTES = 1 << 20
ALL_ROLES = frozenset(Role)


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
    response: type[Any] | None = None
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    query: tuple[str, ...] = ()
    is_streamed: bool = False
    """The handler reads the body itself, as an async iterator of bytes of any length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBody:
    code: str
    message: str


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
    """A response of msgpack bytes that is sent while it is produced."""

    chunks: AsyncGenerator[bytes | memoryview]
    num_bytes: int | None = None
    """Total size, if known in advance."""
