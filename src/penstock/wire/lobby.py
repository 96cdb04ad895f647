# SPDX-License-Identifier: Apache-2.0
"""Where callers wait until their first request is here.

Until then a caller is a socket and nothing more: no parser, no buffer, no TLS. One poll watches all
of them and looks at what came without reading it, so that a flood of silent or slow callers costs
the service little. Owns the waiting sockets; decides neither who may come nor for how long.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable

ENOUGH_BYTES = 1024
"""A stranger that sent fewer, and no whole request, is read again at the next look at it."""
LOOKS_PER_WAKE = 16
_TLS_HANDSHAKE = 22
_TLS_RECORD_HEADER_BYTES = 5


def has_headers(start: bytes) -> bool:
    """Is the whole head of a request here, or something that is not HTTP and will be refused?"""
    return not start[:1].isupper() or b"\r\n\r\n" in start or len(start) >= ENOUGH_BYTES


def has_greeting(start: bytes) -> bool:
    """Is the first message of TLS here, or something that is not TLS and will be refused?"""
    if start[0] != _TLS_HANDSHAKE:
        return True
    if len(start) < _TLS_RECORD_HEADER_BYTES:
        return False
    record_bytes = _TLS_RECORD_HEADER_BYTES + int.from_bytes(start[3:5])
    return len(start) >= min(record_bytes, ENOUGH_BYTES)


class WaitingCaller:
    """A caller whose first request is not here yet."""

    subject = ""

    def __init__(self, sock: socket.socket, address: str, leaves_at: float, lobby: Lobby) -> None:
        self.sock = sock
        self.address = address
        self._leaves_at = leaves_at
        self._lobby = lobby

    def is_overdue(self, now: float) -> bool:
        return now > self._leaves_at

    def read_on(self) -> None:
        self._lobby.watch(self)

    def abort(self) -> None:
        self._lobby.release(self)
        self.sock.close()


class Lobby:
    """The waiting callers of one listener."""

    def __init__(
        self,
        is_ready: Callable[[bytes], bool],
        on_ready: Callable[[WaitingCaller], None],
        on_gone: Callable[[WaitingCaller], None],
    ) -> None:
        self._is_ready = is_ready
        self._on_ready = on_ready
        self._on_gone = on_gone
        self._callers: dict[int, WaitingCaller] = {}
        self._poll = select.epoll()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._poll.fileno(), self._wake)

    def add(self, caller: WaitingCaller) -> None:
        self._callers[caller.sock.fileno()] = caller
        self._poll.register(caller.sock, select.EPOLLIN | select.EPOLLONESHOT)

    def watch(self, caller: WaitingCaller) -> None:
        """Look at it once more, when something is here."""
        self._poll.modify(caller.sock, select.EPOLLIN | select.EPOLLONESHOT)

    def release(self, caller: WaitingCaller) -> None:
        del self._callers[caller.sock.fileno()]
        self._poll.unregister(caller.sock)

    def close(self) -> None:
        self._loop.remove_reader(self._poll.fileno())
        for caller in self._callers.values():
            caller.sock.close()
        self._callers.clear()
        self._poll.close()

    def _wake(self) -> None:
        for descriptor, _ in self._poll.poll(0, LOOKS_PER_WAKE):
            if (caller := self._callers.get(descriptor)) is not None:
                self.look(caller)

    def look(self, caller: WaitingCaller) -> None:
        """A caller whose request is not whole is looked at again after `watch`."""
        start = b""
        try:
            start = caller.sock.recv(ENOUGH_BYTES, socket.MSG_PEEK)
        except BlockingIOError:  # nothing is here yet
            return self.watch(caller)
        except OSError:  # it hung up
            pass
        if not start:
            self._on_gone(caller)
        elif self._is_ready(start):
            self.release(caller)
            self._on_ready(caller)
