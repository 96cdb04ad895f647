# SPDX-License-Identifier: Apache-2.0
"""Interface of a dialect: it parses a request into calls, and formats answers, streams and errors
for one API. No sessions, no HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.errors import WireError
from penstock.gateway.model_calls import Answer, Call, Delta, RawPrompt
from penstock.gateway.renderer import Renderer
from penstock.types import JsonObject, PolicyName, Turn
from penstock.wire.codec import encode_json


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredTurn:
    """One answer and its turn, which holds the log-probs and the stop string."""

    answer: Answer
    turn: Turn
    renderer: Renderer


class SseWriter(Protocol):
    """Formats the answers to one request as server-sent events. The first call writes the
    header."""

    def write_delta(self, choice: int, delta: Delta) -> bytes: ...

    def write_end(self, choice: int, reply: AnsweredTurn) -> bytes:
        """Write the part of the answer not yet streamed, and its end."""
        ...

    def write_done(self, replies: Sequence[AnsweredTurn]) -> bytes:
        """Called after all answers have ended."""
        ...

    def write_error(self, error: WireError) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    calls: Sequence[Call | RawPrompt]
    """One per choice, all for the same policy."""
    model: PolicyName
    """A policy, or a role."""
    is_stream: bool
    body: Callable[[Sequence[AnsweredTurn]], JsonObject]
    writer: Callable[[], SseWriter]
    is_incremental: bool = True
    """False if the stream needs data that only a complete answer has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    path: str
    summary: str
    request: type[Any]
    """Schema for the OpenAPI document; additional fields are accepted."""
    read: Callable[[JsonObject], ParsedRequest]
    error: Callable[[WireError], JsonObject]


@dataclass(slots=True)
class Progress:
    """Number of characters of an answer already streamed."""

    text_chars: int = 0
    reasoning_chars: int = 0

    def add(self, delta: Delta) -> None:
        self.text_chars += len(delta.text)
        self.reasoning_chars += len(delta.reasoning)

    def remaining(self, answer: Answer) -> Delta:
        return Delta(
            text=answer.text[self.text_chars :], reasoning=answer.reasoning[self.reasoning_chars :]
        )


_LINE_SEPARATORS = tuple(
    (end.encode(), f"\\u{ord(end):04x}".encode()) for end in "\x85\u2028\u2029"
)
"""Not line ends in the SSE standard, but clients that split lines like Python (such as httpx) treat
them as such."""


def sse_event(body: JsonObject, kind: str = "") -> bytes:
    data = encode_json(body)
    if not data.isascii():
        for end, escaped in _LINE_SEPARATORS:
            data = data.replace(end, escaped)
    name = b"event: " + kind.encode() + b"\n" if kind else b""
    return name + b"data: " + data + b"\n\n"
