# SPDX-License-Identifier: Apache-2.0
"""Runs one parsed request and sends its answer, in any dialect.

Owns the choices of a request, the stream of their answers, and the decision whether an answer
reached its agent. A call runs to completion even after the client disconnects: its turn is
recorded, but not trained.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import structlog
from starlette.types import Message

from penstock.errors import BadRequest, EngineError, RequestRejected, WireError
from penstock.gateway.dialects.dialect import AnsweredTurn, ParsedRequest, SseWriter
from penstock.gateway.gateway import Session
from penstock.gateway.model_calls import Answer, Call, Delta, RawPrompt
from penstock.gateway.shared import Shared
from penstock.redaction import excerpt

log = structlog.get_logger(__name__)

Send = Callable[[Message], Awaitable[None]]
IsDisconnected = Callable[[], bool]
Event = tuple[int, Delta | Answer | BaseException]
EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Exchange:
    def __init__(self, session: Session, parsed: ParsedRequest) -> None:
        self.answers: dict[int, Answer] = {}
        self._session = session
        self._request = _with_shared_prompts(parsed)
        self._renderer = session.renderer(parsed.model)

    async def replies(self) -> list[AnsweredTurn]:
        """Answers to all choices. Raises the first error; successful choices then count as
        undelivered."""
        calls = self._request.calls
        if len(calls) == 1:
            self.answers[0] = await self._session.call(calls[0])
            return self._replies()
        results = await asyncio.gather(*map(self._session.call, calls), return_exceptions=True)
        self.answers = _successes(results)
        for result in results:
            if isinstance(result, BaseException):
                self.mark_unreached()
                raise result
        return self._replies()

    async def stream(self, send: Send, is_disconnected: IsDisconnected) -> None:
        """Send events while the answers are generated. An error before the first event is raised; a
        later one is sent as an event."""
        answer_stream = _AnswerStream(self._session, self._request)
        is_reached = False
        try:
            events = await answer_stream.next()
            if isinstance(error := events[0][1], BaseException):
                raise error
            is_reached = await self._send_events(answer_stream, events, send, is_disconnected)
        finally:
            self.answers.update(await answer_stream.wait_all())
            if not is_reached:
                self.mark_unreached()

    def mark_unreached(self) -> None:
        for answer in self.answers.values():
            self._session.mark_unreached(answer.turn)

    async def _send_events(
        self,
        answer_stream: _AnswerStream,
        events: list[Event],
        send: Send,
        is_disconnected: IsDisconnected,
    ) -> bool:
        """True if the agent stayed connected until the answer was complete."""
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
        writer = self._request.writer()
        while True:
            chunk, is_failed = self._write(writer, events)
            is_last = is_failed or len(self.answers) == len(self._request.calls)
            if is_disconnected():
                return False
            if chunk or is_last:
                await send({"type": "http.response.body", "body": chunk, "more_body": not is_last})
            if is_last:
                return not is_failed
            events = await answer_stream.next()

    def _write(self, writer: SseWriter, events: list[Event]) -> tuple[bytes, bool]:
        """Encode the events; also says whether one of them is an error."""
        chunks: list[bytes] = []
        for choice, event in events:
            if isinstance(event, Delta):
                chunks.append(writer.write_delta(choice, event))
            elif isinstance(event, Answer):
                self.answers[choice] = event
                chunks.append(writer.write_end(choice, self._reply(event)))
            else:
                chunks.append(writer.write_error(error_for_agent(event)))
                return b"".join(chunks), True
        if len(self.answers) == len(self._request.calls):
            chunks.append(writer.write_done(self._replies()))
        return b"".join(chunks), False

    def _replies(self) -> list[AnsweredTurn]:
        return [self._reply(self.answers[choice]) for choice in range(len(self._request.calls))]

    def _reply(self, answer: Answer) -> AnsweredTurn:
        turn = self._session.turn(answer.turn)
        return AnsweredTurn(answer=answer, turn=turn, renderer=self._renderer)


def _with_shared_prompts(parsed: ParsedRequest) -> ParsedRequest:
    """Choices of one prompt render and tokenize it once."""
    if len(parsed.calls) == 1:
        return parsed
    shared: defaultdict[int, Shared[Any]] = defaultdict(Shared[Any])

    def share(call: Call | RawPrompt) -> Call | RawPrompt:
        prompt = call.messages if isinstance(call, Call) else call.prompt
        return replace(call, shared_prompt=shared[id(prompt)])

    return replace(parsed, calls=[share(call) for call in parsed.calls])


class _EngineFailed(WireError):
    status, code = 503, "engine_error"


def error_for_agent(error: BaseException) -> WireError:
    """The error as reported to the agent. Internal errors are logged; the agent gets no details."""
    if isinstance(error, WireError):
        return error
    if isinstance(error, RequestRejected):
        return BadRequest(excerpt(str(error)))
    if isinstance(error, EngineError):
        return _EngineFailed(excerpt(str(error)))
    if isinstance(error, RecursionError):
        return BadRequest("the body nests too deeply")
    log.error("model call failed", exc_info=error)
    return WireError("internal error; see this node's log")


def _successes(results: Iterable[Answer | BaseException | None]) -> dict[int, Answer]:
    return {at: result for at, result in enumerate(results) if isinstance(result, Answer)}


class _AnswerStream:
    """Answers still being generated, merged into one stream of events."""

    def __init__(self, session: Session, request: ParsedRequest) -> None:
        self._session = session
        self._request = request
        self._events: list[Event] = []
        self._has_events = asyncio.Event()
        choices = range(len(request.calls))
        self._tasks = [asyncio.create_task(self._run(choice)) for choice in choices]

    async def next(self) -> list[Event]:
        """Wait for events; returns all since the last call, at least one."""
        try:
            await self._has_events.wait()
        except asyncio.CancelledError:
            for task in self._tasks:
                task.cancel()
            raise
        events, self._events = self._events, []
        self._has_events.clear()
        return events

    async def wait_all(self) -> dict[int, Answer]:
        """Wait for all calls to end; returns the answers of those that succeeded."""
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        return _successes(results)

    async def _run(self, choice: int) -> Answer | None:
        on_chunk = partial(self._push, choice) if self._request.is_incremental else None
        try:
            answer = await self._session.call(self._request.calls[choice], on_chunk)
        except Exception as error:
            self._push(choice, error)
            return None
        self._push(choice, answer)
        return answer

    def _push(self, choice: int, event: Delta | Answer | BaseException) -> None:
        self._events.append((choice, event))
        self._has_events.set()
