# SPDX-License-Identifier: Apache-2.0
"""The prompts of one event loop on their way through the process of a chat template.

Owns the socket to one process: sends prompts without waiting, and gives the replies, which come in
the same order, to who waits for them. When the process dies, it died of the first prompt that
waits; the others were not asked yet. How many prompts there are is bounded by who asks.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress

from penstock.gateway.template_child import (
    WAIT_S,
    ChildDied,
    Reply,
    TemplateChild,
    did_not_start,
    frame,
    to_text,
)
from penstock.gateway.template_worker import REPLY

CHUNK_BYTES = 256 << 10


class NotAsked(Exception):
    """The process died of an earlier prompt; another one may be asked."""


class TemplateQueue:
    def __init__(self, child: TemplateChild) -> None:
        """`child` was just started: its first reply says that it is ready."""
        self.child = child
        self._loop = asyncio.get_running_loop()
        self._is_ready = False
        self._waiting: deque[asyncio.Future[Reply]] = deque()
        self._unsent = bytearray()
        self._received = bytearray()
        child.socket.setblocking(False)
        self._loop.add_reader(child.socket.fileno(), self._on_readable)
        self._timer = self._loop.call_later(WAIT_S, self._end, TimeoutError())

    def serves(self, loop: asyncio.AbstractEventLoop) -> bool:
        return loop is self._loop and self.child.lives()

    async def ask(self, request: bytes) -> Reply:
        """Raises ChildDied if the process died of this prompt, NotAsked if of another one."""
        reply: asyncio.Future[Reply] = self._loop.create_future()
        self._waiting.append(reply)
        if self._is_ready and len(self._waiting) == 1:
            self._restart_timer()
        if not self._unsent:
            self._loop.call_soon(self._send)  # together with what others ask meanwhile
        self._unsent += frame(request)
        return await reply

    def abandon(self) -> None:
        """No caller asks again; from any thread."""
        if self._loop.is_closed():
            self.child.end()
            return
        with suppress(RuntimeError):  # closed meanwhile: the process ends with the program
            self._loop.call_soon_threadsafe(self._end, EOFError())

    def _send(self) -> None:
        fileno = self.child.socket.fileno()
        if fileno < 0:
            return
        try:
            num_bytes = self.child.socket.send(self._unsent)
        except BlockingIOError:
            num_bytes = 0
        except OSError:
            return  # it has ended: the reader comes to that after its last reply
        del self._unsent[:num_bytes]
        if self._unsent:
            self._loop.add_writer(fileno, self._send)
        else:
            self._loop.remove_writer(fileno)

    def _on_readable(self) -> None:
        try:
            data = self.child.socket.recv(CHUNK_BYTES)
            if not data:
                raise EOFError
            self._received += data
            while self._take_reply():
                pass
        except BlockingIOError:
            return
        except (OSError, EOFError) as error:
            self._end(error)

    def _take_reply(self) -> bool:
        """Whether one was there, whole."""
        if len(self._received) < REPLY.size:
            return False
        status, length = self.child.read_header(self._received[: REPLY.size])
        end = REPLY.size + length
        if len(self._received) < end:
            return False
        text = to_text(self._received[REPLY.size : end])
        del self._received[:end]
        if self._is_ready:
            if not self._waiting:
                raise OSError("the process breaks its protocol")
            reply = self._waiting.popleft()
            if not reply.done():  # or its caller was cancelled
                reply.set_result(Reply(status, text))
        self._is_ready = True
        self._restart_timer()
        return True

    def _restart_timer(self) -> None:
        self._timer.cancel()
        if self._waiting:
            self._timer = self._loop.call_later(WAIT_S, self._end, TimeoutError())

    def _end(self, error: Exception) -> None:
        fileno = self.child.socket.fileno()
        if fileno < 0:
            return  # done before
        self._timer.cancel()
        self._loop.remove_reader(fileno)
        self._loop.remove_writer(fileno)
        code = self.child.end(error)
        for place, reply in enumerate(self._waiting):
            if reply.done():
                continue
            if not self._is_ready:
                reply.set_exception(did_not_start(code))
            else:
                reply.set_exception(NotAsked() if place else ChildDied(error, code))
