# SPDX-License-Identifier: Apache-2.0
"""The door of a service: who may stay connected before showing a credential, and for how long.

A connection is a stranger until one of its requests is authorised. Strangers are limited per
address and in total; the oldest one leaves when another arrives, so that a healthy caller always
gets in. Every request has a deadline for its headers and a lowest rate for its body. A connection
waits in the lobby until its first request is here, and work that strangers cause is done in small
portions, so that a flood of them delays no known caller. Owns accepting and closing; knows nothing
of routes.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import resource
import socket
import ssl
import sys
import termios
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from itertools import islice
from typing import Any, Protocol, cast
from urllib.parse import unquote

import httptools
import structlog
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penstock.wire.lobby import (
    ENOUGH_BYTES,
    LOOKS_PER_WAKE,
    Lobby,
    WaitingCaller,
    has_greeting,
    has_headers,
)
from penstock.wire.request_cycle import RequestCycle

MAX_HEADER_BYTES = 64 << 10
"""Of the request line and headers; also of trailers and chunk extensions."""
MAX_PIPELINED = 16
"""Requests of one connection that wait for the answer to an earlier one."""
HEAD_S = 10.0
"""To finish the headers, from their first byte; also how long a stranger may stay silent."""
BODY_GRACE_S = 30.0
MIN_BODY_BYTES_PER_S = 1024
"""A body that is slower than this on average, after the grace, is cut off."""
UNREAD_S = 60.0
"""A caller that reads nothing of an answer for UNREAD_S is cut off."""
HANDSHAKE_S = 10.0
MAX_STRANGERS = 2048
MAX_STRANGERS_PER_ADDRESS = 256
RESERVED_FILES = 512
"""Descriptors that connections leave to the service itself."""
SWEEP_S = 1.0
"""Between two looks at one connection."""
ACCEPTS_PER_WAKE = 16
BACKLOG = 2048
PROBE_AFTER_S, PROBE_EVERY_S = 60, 15
"""The kernel asks silent peers whether they are there: one that vanished holds no connection, and
routers on the way forget none that is kept."""
ACCEPT_PAUSE_S = 0.05

log = structlog.get_logger(__name__)
_requests_log = logging.getLogger("uvicorn.error.requests")
_requests_log.setLevel(logging.ERROR)
"""A line for each bad request of a stranger would fill the disk."""


def admit(scope: Scope, subject: str) -> None:
    """One of the requests of this connection was authorised: it is known from now on."""
    connection = scope.get("connection")
    if connection is not None:
        connection.admit(subject)


def open_door() -> Door:
    """A door for as many connections as this process may have files."""
    files = _allow_many_files()
    return Door(
        max_connections=files - min(RESERVED_FILES, files // 2),
        max_strangers=MAX_STRANGERS,
        max_per_address=MAX_STRANGERS_PER_ADDRESS,
    )


def _allow_many_files() -> int:
    """Raise the limit of open files as far as it goes; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # a container may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class Connection(Protocol):
    """What the door needs to know of a connection, waiting or heard."""

    @property
    def address(self) -> str: ...
    @property
    def subject(self) -> str: ...
    def is_overdue(self, now: float) -> bool: ...
    def read_on(self) -> None:
        """Read what a stranger sent since the last look."""
        ...

    def abort(self) -> None: ...


@dataclass(slots=True, kw_only=True)
class DoorCounts:
    evicted: int = 0
    """Strangers that made room for another."""
    overdue: int = 0
    """Connections that were too slow."""
    turned_away: int = 0
    """Callers that found no room."""


@dataclass(slots=True, kw_only=True)
class Door:
    """The connections of one server."""

    max_connections: int
    max_strangers: int
    max_per_address: int
    """Strangers."""
    counts: DoorCounts = field(default_factory=DoorCounts)
    _all: dict[Connection, None] = field(default_factory=dict[Connection, None])
    _strangers: dict[Connection, None] = field(default_factory=dict[Connection, None])
    """In the order of their arrival."""
    _by_address: dict[str, dict[Connection, None]] = field(
        default_factory=dict[str, dict[Connection, None]]
    )
    _by_subject: dict[str, int] = field(default_factory=dict[str, int])

    def __len__(self) -> int:
        return len(self._all)

    @property
    def num_strangers(self) -> int:
        return len(self._strangers)

    def enter(self, connection: Connection) -> bool:
        """Let a stranger in, at the cost of an older one if need be; False if all are known."""
        neighbours = self._by_address.get(connection.address, {})
        if len(neighbours) >= self.max_per_address:
            self._evict(next(iter(neighbours)))
        elif self._is_full() and not self.evict_oldest():
            self.counts.turned_away += 1
            return False
        self._all[connection] = None
        self._add_stranger(connection)
        return True

    def exchange(self, caller: WaitingCaller, connection: Connection) -> None:
        """A waiting caller is heard from now on, as a stranger still."""
        self.leave(caller)
        self._all[connection] = None
        self._add_stranger(connection)

    def admit(self, connection: Connection, subject: str) -> bool:
        """Make it a known connection; one subject may have half of them all, beyond that its
        connections stay strangers."""
        known = self._by_subject.get(subject, 0)
        if connection not in self._strangers or known >= self.max_connections // 2:
            return False
        self._by_subject[subject] = known + 1
        self._remove_stranger(connection)
        return True

    def leave(self, connection: Connection) -> None:
        if connection not in self._all:
            return
        del self._all[connection]
        if connection in self._strangers:
            self._remove_stranger(connection)
        elif (left := self._by_subject[connection.subject] - 1) > 0:
            self._by_subject[connection.subject] = left
        else:
            del self._by_subject[connection.subject]

    def evict_oldest(self) -> bool:
        oldest = next(iter(self._strangers), None)
        if oldest is not None:
            self._evict(oldest)
        return oldest is not None

    def sweep(self, now: float) -> Generator[None]:
        """Close what is overdue, and read on from strangers; one connection at a time."""
        for connection in [*self._all]:
            if connection not in self._all:
                continue  # it left meanwhile
            if connection.is_overdue(now):
                self.counts.overdue += 1
                self.leave(connection)
                connection.abort()
            else:
                connection.read_on()
            yield

    def _is_full(self) -> bool:
        return len(self._strangers) >= self.max_strangers or len(self) >= self.max_connections

    def _evict(self, connection: Connection) -> None:
        self.counts.evicted += 1
        self.leave(connection)
        connection.abort()

    def _add_stranger(self, connection: Connection) -> None:
        self._strangers[connection] = None
        self._by_address.setdefault(connection.address, {})[connection] = None

    def _remove_stranger(self, connection: Connection) -> None:
        del self._strangers[connection]
        neighbours = self._by_address[connection.address]
        del neighbours[connection]
        if not neighbours:
            del self._by_address[connection.address]


class _Phase(Enum):
    IDLE = "idle"
    """Between requests."""
    HEAD = "head"
    BODY = "body"
    ANSWERING = "answering"
    """The request is complete; the service takes the time it needs."""


class GuardedConnection(HttpToolsProtocol):
    """One connection: refuses endless headers and any trailer, and knows how long it has waited.

    The fast HTTP parser buffers headers, trailers and chunk extensions without a limit, before any
    credential is checked."""

    def __init__(self, *args: Any, door: Door, address: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = _requests_log
        self.address = address
        self.subject = ""
        self.handshake: asyncio.Task[None] | None = None
        self._door = door
        self._is_known = False
        self._phase = _Phase.IDLE
        self._since = self.loop.time()
        self._num_body_bytes = 0
        self._num_other_bytes = 0
        """Received since the last byte of a body."""
        self._has_trailers = False
        self._num_unread_bytes = 0
        """Of answers, at the last look."""
        self._read_at = self._since
        """When the caller last read something of them, as far as looks tell."""
        self._idle_timer: asyncio.TimerHandle | None = None
        """One for many requests: to set one after each costs more than to look again."""

    def admit(self, subject: str) -> None:
        if not self._is_known:
            self._is_known = self._door.admit(self, subject)
            self.subject = subject if self._is_known else ""

    def abort(self) -> None:
        if self.transport is not None:  # pyright: ignore[reportUnnecessaryComparison]
            self.transport.abort()
        elif self.handshake is not None:
            self.handshake.cancel()

    def is_overdue(self, now: float) -> bool:
        if self._has_stopped_reading(now):
            return True
        waited_s = now - self._since
        match self._phase:
            case _Phase.HEAD:
                return waited_s > HEAD_S
            case _Phase.BODY:
                if self.flow.read_paused:  # the service is slow, not the caller
                    self._since += min(SWEEP_S, waited_s)
                    return False
                slow = self._num_body_bytes < waited_s * MIN_BODY_BYTES_PER_S
                return waited_s > BODY_GRACE_S and slow
            case _Phase.IDLE:
                return not self._is_known and waited_s > HEAD_S
            case _Phase.ANSWERING:
                return False

    def _has_stopped_reading(self, now: float) -> bool:
        """Whether an answer waits and nothing of it moved for UNREAD_S."""
        num_bytes = self._num_waiting_bytes()
        if num_bytes == 0 or num_bytes != self._num_unread_bytes:
            self._num_unread_bytes, self._read_at = num_bytes, now
        return now - self._read_at > UNREAD_S

    def _num_waiting_bytes(self) -> int:
        """Of answers: in memory and, with these, in the kernel. On a slow link the kernel sends for
        minutes before it takes more; TLS does not say what waits below it."""
        if self.transport is None:  # pyright: ignore[reportUnnecessaryComparison]
            return 0
        num_bytes = self.transport.get_write_buffer_size()
        if num_bytes or self.scheme == "https":
            with suppress(OSError, ValueError):  # it was closed, or the kernel does not tell
                descriptor = self.transport.get_extra_info("socket").fileno()
                held = fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4))
                num_bytes += int.from_bytes(held, sys.byteorder)
        return num_bytes

    def read_on(self) -> None:
        """Read what a stranger sent since the last look."""
        if self._phase is _Phase.HEAD and not self._is_known:
            self.flow.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._door.leave(self)
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._num_other_bytes += len(data)
        super().data_received(data)
        if self._has_trailers:
            self.send_400_response("trailers are not supported")
        elif self._num_other_bytes > MAX_HEADER_BYTES:
            self.send_400_response(f"request headers exceed {MAX_HEADER_BYTES} bytes")
        elif self._phase is _Phase.HEAD and not self._is_known and len(data) < ENOUGH_BYTES:
            self.flow.pause_reading()

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("requests without end")  # the parser's error closes the connection
        self._enter(_Phase.HEAD)
        super().on_message_begin()
        if not self._is_known:
            self.scope["connection"] = self  # type: ignore[typeddict-unknown-key]

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase is _Phase.BODY:
            self._has_trailers = True
        else:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._enter(_Phase.BODY)
        self._num_body_bytes = self._num_other_bytes = 0
        parser, app = cast(Any, self.parser), cast(Any, self).app
        version, url = parser.get_http_version(), httptools.parse_url(self.url)
        path = url.path.decode("ascii")
        self.scope.update(
            method=parser.get_method().decode("ascii"),
            http_version=version,
            path=unquote(path) if "%" in path else path,
            raw_path=url.path,
            query_string=url.query or b"",
        )
        previous = self.cycle
        self.cycle = RequestCycle(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            default_headers=self.server_state.default_headers,
            expects_continue=self.expect_100_continue,
            keep_alive=version != "1.0" and parser.should_keep_alive(),
            is_known=self._is_known,
            on_response=self.on_response_complete,
        )
        if previous is None or previous.response_complete:  # pyright: ignore[reportUnnecessaryComparison]
            self._start_asgi_task(self.cycle, app)
        else:  # pipelined
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, app))

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        self._num_other_bytes = 0
        if not self.cycle.response_complete:
            cast(RequestCycle, self.cycle).add(body)

    def on_message_complete(self) -> None:
        self._phase = _Phase.ANSWERING
        self._num_other_bytes = 0
        super().on_message_complete()
        if self.cycle.response_complete and not self.pipeline:
            self._enter(_Phase.IDLE)  # it was answered, say refused, before its body was here

    def on_response_complete(self) -> None:
        if self._phase is _Phase.ANSWERING and not self.pipeline:
            self._enter(_Phase.IDLE)
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self._idle_timer is None:
            self._idle_timer = self.loop.call_later(self.timeout_keep_alive, self._close_if_idle)

    def _unset_keepalive_if_required(self) -> None:
        """Nothing: the timer looks for itself whether a request came."""

    def _close_if_idle(self) -> None:
        self._idle_timer = None
        if self.transport.is_closing() or self._phase is not _Phase.IDLE:
            return  # the end of the next answer sets it again
        left_s = self._since + self.timeout_keep_alive - self.loop.time()
        if left_s <= 0:
            self.transport.close()
        else:
            self._idle_timer = self.loop.call_later(left_s, self._close_if_idle)

    def _enter(self, phase: _Phase) -> None:
        self._phase = phase
        self._since = self.loop.time()


class Listener:
    """Accepts connections at the door, before TLS and HTTP; has the methods of an asyncio.Server
    that uvicorn calls."""

    def __init__(
        self,
        listener: socket.socket,
        door: Door,
        make_connection: Callable[[str], GuardedConnection],
        tls: ssl.SSLContext | None,
    ) -> None:
        self.sockets = (listener,)
        self._socket = listener
        self._door = door
        self._make_connection = make_connection
        self._tls = tls
        self._lobby = Lobby(
            has_headers if tls is None else has_greeting, self._on_ready, self._on_gone
        )
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._reported = DoorCounts()
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._loop.add_reader(listener, self._accept)
        self._looks = door.sweep(self._loop.time())
        self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)

    def close(self) -> None:
        self._sweeper.cancel()
        self._loop.remove_reader(self._socket)
        self._socket.close()
        self._lobby.close()

    async def wait_closed(self) -> None:
        """Nothing is left open by `close()`."""

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_WAKE):
            try:
                caller, where = self._socket.accept()
            except (BlockingIOError, ConnectionAbortedError, InterruptedError):
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    raise
                self._pause()
                return
            self._receive(caller, str(where[0]) if where else "")

    def _pause(self) -> None:
        """Out of descriptors: let a stranger go, and accept again when that has happened."""
        self._door.evict_oldest()
        self._loop.remove_reader(self._socket)
        self._loop.call_later(ACCEPT_PAUSE_S, self._resume)

    def _resume(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.add_reader(self._socket, self._accept)

    def _receive(self, sock: socket.socket, address: str) -> None:
        sock.setblocking(False)
        caller = WaitingCaller(sock, address, self._loop.time() + HEAD_S, self._lobby)
        if self._door.enter(caller):
            self._lobby.add(caller)
        else:
            sock.close()

    def _on_gone(self, caller: WaitingCaller) -> None:
        self._door.leave(caller)
        caller.abort()

    def _on_ready(self, caller: WaitingCaller) -> None:
        connection = self._make_connection(caller.address)
        self._door.exchange(caller, connection)
        if caller.sock.family != socket.AF_UNIX:
            with suppress(OSError):  # it hung up
                caller.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                caller.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                caller.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_AFTER_S)
                caller.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_EVERY_S)
        task = self._loop.create_task(self._connect(caller.sock, connection))
        connection.handshake = task
        self._tasks.add(task)
        task.add_done_callback(partial(self._on_connected, caller.sock, connection))

    async def _connect(self, caller: socket.socket, connection: GuardedConnection) -> None:
        deadline_s = HANDSHAKE_S if self._tls is not None else None
        await self._loop.connect_accepted_socket(
            lambda: connection, caller, ssl=self._tls, ssl_handshake_timeout=deadline_s
        )

    def _on_connected(
        self, caller: socket.socket, connection: GuardedConnection, task: asyncio.Task[None]
    ) -> None:
        self._tasks.discard(task)
        connection.handshake = None
        if task.cancelled() or task.exception() is not None:  # evicted, no TLS, or too late
            self._door.leave(connection)
            caller.close()

    def _sweep(self) -> None:
        """Look at the next few connections; at all of them in SWEEP_S."""
        pause_s = SWEEP_S * min(1.0, LOOKS_PER_WAKE / max(1, len(self._door)))
        self._sweeper = self._loop.call_later(pause_s, self._sweep)  # first: the log may fail
        num_looks = sum(1 for _ in islice(self._looks, LOOKS_PER_WAKE))
        if num_looks < LOOKS_PER_WAKE:
            self._looks = self._door.sweep(self._loop.time())
            self._report()

    def _report(self) -> None:
        counts = self._door.counts
        if counts == self._reported:
            return
        log.warning(
            "closed connections without a credential, or slow ones",
            evicted=counts.evicted - self._reported.evicted,
            slow=counts.overdue - self._reported.overdue,
            turned_away=counts.turned_away - self._reported.turned_away,
            strangers=self._door.num_strangers,
            open=len(self._door),
        )
        self._reported = replace(counts)
