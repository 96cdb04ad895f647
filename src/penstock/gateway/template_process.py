# SPDX-License-Identifier: Apache-2.0
"""A model's chat template, rendered in a separate process (`template_worker`), so that it can only
format messages: whatever the template does, the kernel bounds its memory and its processor time.

Owns a process for threads, which wait for it, and one for an event loop, which goes on meanwhile
(`template_queue`). Starts each at its first rendering, ends it with the program, and starts another
one after a death. Holds no prompt against the template: a slow one may be its sender's fault.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
import weakref
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError

from penstock.errors import WeightsError
from penstock.gateway.template_child import (
    WAIT_S,
    ChildDied,
    Reply,
    TemplateChild,
    TemplateSettings,
    did_not_start,
    encode,
)
from penstock.gateway.template_queue import NotAsked, TemplateQueue
from penstock.gateway.template_worker import Status

MAX_RENDER_S = 5.0
"""Processor time of one rendering; a long conversation takes milliseconds."""
MEMORY_BYTES = 1 << 30
"""Of one rendering, beyond what an idle process has."""
MAX_TEXT_BYTES = 64 << 20
"""Of one rendering."""
KEPT = 8
"""Templates whose processes stay, for the next renderer that has the same one."""


class TemplateProcess:
    def __init__(
        self,
        source: str,
        *,
        max_s: float = MAX_RENDER_S,
        max_bytes: int = MAX_TEXT_BYTES,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        self._settings = TemplateSettings(
            source=source, max_s=max_s, max_bytes=max_bytes, memory_bytes=memory_bytes
        )
        self._lock = threading.Lock()
        self._child: TemplateChild | None = None
        self._queue: TemplateQueue | None = None

    @property
    def pid(self) -> int | None:
        """Of the process for threads, if it runs."""
        return self._child.pid if self._child and self._child.lives() else None

    def render(self, **values: Any) -> str:
        """For a thread. Raises TemplateError when the template fails, takes too long or makes too
        much."""
        request = _encode(values)
        with self._lock:
            try:
                reply = self._ask(request)
            except ChildDied as died:
                raise self._error_of(died) from None
        return _text(reply)

    async def render_soon(self, **values: Any) -> str:
        """`render` for an event loop, which goes on meanwhile."""
        request = _encode(values)
        while True:
            try:
                return _text(await self._queue_of_this_loop().ask(request))
            except NotAsked:
                continue
            except ChildDied as died:
                raise self._error_of(died) from None

    def close(self) -> None:
        with self._lock:
            if self._child is not None:
                self._child.end()
        if self._queue is not None:
            self._queue.abandon()

    def _ask(self, request: bytes) -> Reply:
        child = self._child
        if child is None or not child.lives():
            child = self._child = TemplateChild(self._settings)
            try:
                child.receive(time.monotonic() + WAIT_S)
            except (OSError, EOFError) as error:
                raise did_not_start(child.end(error)) from None
        deadline = time.monotonic() + WAIT_S
        try:
            child.send(request, deadline)
            return child.receive(deadline)
        except (OSError, EOFError) as error:
            raise ChildDied(error, child.end(error)) from None

    def _queue_of_this_loop(self) -> TemplateQueue:
        if self._queue is None or not self._queue.serves(asyncio.get_running_loop()):
            self._queue = TemplateQueue(TemplateChild(self._settings))
            weakref.finalize(self, self._queue.abandon)
        return self._queue

    def _error_of(self, died: ChildDied) -> TemplateError:
        if died.code == -signal.SIGPROF:
            most = f"{self._settings.max_s:g} s of processor time"
            return TemplateError(f"the template ran for more than {most}")
        if died.has_timed_out:
            return TemplateError(f"the template gave no answer for {WAIT_S:g} s")
        return TemplateError(f"the process of the template ended with code {died.code}")


@lru_cache(maxsize=KEPT)
def shared_process(source: str) -> TemplateProcess:
    """The one of all renderers of this template."""
    return TemplateProcess(source)


def _encode(values: dict[str, Any]) -> bytes:
    try:
        return encode(values)
    except RecursionError:
        raise TemplateError("the messages are nested too deeply") from None


def _text(reply: Reply) -> str:
    if reply.status is Status.INVALID:
        raise WeightsError(f"the snapshot's chat template does not compile: {reply.text}")
    if reply.status is Status.FAILED:
        raise TemplateError(reply.text)
    return reply.text
