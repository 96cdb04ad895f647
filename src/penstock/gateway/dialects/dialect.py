# SPDX-License-Identifier: Apache-2.0
"""What a dialect is: it reads a request into calls, and writes answers, streams and errors in its
own shape. No session, no HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.errors import ContextOverflow, EngineError, RequestRejected, WireError
from penstock.gateway.model_calls import Answer, Call, Delta
from penstock.gateway.renderer import Renderer
from penstock.gateway.sampling import Overrides
from penstock.types import JsonObject, PolicyName, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class RawPrompt:
    """A call without messages or template."""

    prompt: str | Sequence[int]
    policy: PolicyName
    overrides: Overrides


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredTurn:
    """One answer and the turn behind it, for log-probs and the stop string that ended it."""

    answer: Answer
    turn: Turn
    renderer: Renderer


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """An error before it has a shape."""

    status: int
    code: str
    message: str
    retry_after_s: float | None = None
    overflow: ContextOverflow | None = None


def problem_of(error: BaseException) -> Problem | None:
    """None for an error that says nothing to an agent: a defect of ours."""
    if isinstance(error, WireError):
        return Problem(
            status=error.status,
            code=error.code,
            message=str(error),
            retry_after_s=error.retry_after_s,
            overflow=error if isinstance(error, ContextOverflow) else None,
        )
    if isinstance(error, RequestRejected):
        return Problem(status=400, code="bad_request", message=str(error))
    if isinstance(error, EngineError):
        return Problem(status=503, code="engine_error", message=str(error))
    if isinstance(error, RecursionError):
        return Problem(status=400, code="bad_request", message="the body nests too deeply")
    return None


INTERNAL = Problem(status=500, code="internal", message="internal error; see this node's log")


class SseWriter(Protocol):
    """Server-sent events of the answers to one request, opened by the first that is written."""

    def write_delta(self, choice: int, delta: Delta) -> bytes: ...

    def end(self, choice: int, reply: AnsweredTurn) -> bytes:
        """What `write_delta` did not tell yet, and the end of this answer."""
        ...

    def finish(self, replies: Sequence[AnsweredTurn]) -> bytes:
        """After the end of every answer."""
        ...

    def fail(self, problem: Problem) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """A request, read and checked."""

    calls: Sequence[Call | RawPrompt]
    """One per choice, all of one policy."""
    model: PolicyName
    is_stream: bool
    body: Callable[[Sequence[AnsweredTurn]], JsonObject]
    writer: Callable[[], SseWriter]
    is_incremental: bool = True
    """False: a stream needs what only a complete answer has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    path: str
    summary: str
    request: type[Any]
    """For the published document; fields beyond it are accepted."""
    read: Callable[[JsonObject], ParsedRequest]
    error: Callable[[Problem], JsonObject]


@dataclass(slots=True)
class Progress:
    """How much of an answer was already streamed."""

    text_chars: int = 0
    reasoning_chars: int = 0

    def add(self, delta: Delta) -> None:
        self.text_chars += len(delta.text)
        self.reasoning_chars += len(delta.reasoning)

    def rest(self, answer: Answer) -> Delta:
        return Delta(
            text=answer.text[self.text_chars :], reasoning=answer.reasoning[self.reasoning_chars :]
        )
