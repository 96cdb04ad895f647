# SPDX-License-Identifier: Apache-2.0
"""A long link to a server of this loop, in lock step, that counts its round trips.

A round trip begins when both sides are at rest: what the server answered so far arrives, as much as
TCP may have sent, and the client goes on. So handshakes and the slow start of each connection count
as they do over a link whose delay is all there is, and the speed of this machine does not.
"""

from __future__ import annotations

import asyncio
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from anyio.to_thread import current_default_thread_limiter

P = ParamSpec("P")
T = TypeVar("T")
FIRST_WINDOW_BYTES = 10 * 1448
"""What TCP sends on a new or a rested connection before the first acknowledgement."""
TURNS_AT_REST = 50
"""Of the loop, without a byte on the way and without a thread at work."""


class _Threads(ThreadPoolExecutor):
    def __init__(self) -> None:
        super().__init__()
        self._futures: set[Future[Any]] = set()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future = super().submit(fn, *args, **kwargs)
        self._futures = {one for one in self._futures if not one.done()} | {future}
        return future

    @property
    def are_at_work(self) -> bool:
        return not all(future.done() for future in self._futures)


@dataclass(slots=True)
class _Connection:
    client: StreamWriter
    server: StreamWriter
    is_open: bool = False
    """Whether its first round trip is over."""
    sent: bytearray = field(default_factory=bytearray)
    """By the client, before that."""
    answered: bytearray = field(default_factory=bytearray)
    """By the server, and still to arrive."""
    window_bytes: int = FIRST_WINDOW_BYTES

    @property
    def waits(self) -> bool:
        return not self.is_open or bool(self.answered)

    def advance(self) -> None:
        if not self.is_open:
            self.is_open = True
            self.server.write(bytes(self.sent))
            return
        self.client.write(bytes(self.answered[: self.window_bytes]))
        is_full = len(self.answered) >= self.window_bytes
        del self.answered[: self.window_bytes]
        self.window_bytes *= 1 + is_full


class LongLink:
    def __init__(self, port: int, threads: _Threads) -> None:
        self.num_round_trips = 0
        self._port = port
        self._threads = threads
        self._connections: list[_Connection] = []
        self._has_moved = asyncio.Event()

    def rest(self) -> None:
        """Every connection begins anew with a small window, as after a pause."""
        for connection in self._connections:
            connection.window_bytes = FIRST_WINDOW_BYTES

    async def carry(self, from_client: StreamReader, client: StreamWriter) -> None:
        from_server, server = await asyncio.open_connection("127.0.0.1", self._port)
        connection = _Connection(client, server)
        self._connections.append(connection)
        self._has_moved.set()

        async def send() -> None:
            while data := await from_client.read(1 << 16):
                self._has_moved.set()
                if connection.is_open:
                    server.write(data)
                else:
                    connection.sent += data
            server.close()

        async def answer() -> None:
            while data := await from_server.read(1 << 16):
                self._has_moved.set()
                connection.answered += data

        try:
            await asyncio.gather(send(), answer())
        finally:
            self._connections.remove(connection)
            client.close()

    async def run(self) -> None:
        while True:
            await self._rest_of_all()
            waiting = [connection for connection in self._connections if connection.waits]
            for connection in waiting:
                connection.advance()
            self.num_round_trips += bool(waiting)
            if not waiting:
                await self._has_moved.wait()

    async def _rest_of_all(self) -> None:
        turns = 0
        while turns < TURNS_AT_REST:
            self._has_moved.clear()
            await asyncio.sleep(0)
            limiter = current_default_thread_limiter()
            is_at_rest = not (
                self._has_moved.is_set() or self._threads.are_at_work or limiter.borrowed_tokens
            )
            turns = turns + 1 if is_at_rest else 0


@asynccontextmanager
async def long_link(port: int) -> AsyncGenerator[tuple[LongLink, int]]:
    """The link to a port of this machine, and the port of its other end."""
    threads = _Threads()
    asyncio.get_running_loop().set_default_executor(threads)
    link = LongLink(port, threads)
    listener = await asyncio.start_server(link.carry, "127.0.0.1", 0)
    running = asyncio.create_task(link.run())
    try:
        yield link, listener.sockets[0].getsockname()[1]
    finally:
        running.cancel()
        listener.close()
