# SPDX-License-Identifier: Apache-2.0
"""What a service declares: its routes with their roles and types, what a handler gets, and the
answers it may give beside a record to encode."""

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
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    query: tuple[str, ...] = ()
    is_streamed: bool = False
    """The handler reads the body itself: an async iterator of bytes, however long."""


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
    """An answer that is already msgpack bytes (a sealed manifest, rows)."""

    body: bytes
    media_type: str = MSGPACK
    headers: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class StreamedResponse:
    """An answer that is already msgpack bytes and is sent while it is made."""

    chunks: AsyncGenerator[bytes | memoryview]
    num_bytes: int | None = None
    """Of all of them, when that is known before."""
