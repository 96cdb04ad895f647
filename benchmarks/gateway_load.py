# SPDX-License-Identifier: Apache-2.0
"""Clients that think, ask and wait, over one connection each; when each answer began and ended.

Lean, because a slow client would hide what lies between it and the engine. Knows neither gateway
nor engine."""

from __future__ import annotations

import asyncio
import gc
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools

from benchmarks.harness import Server

_NUM_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')


@dataclass(frozen=True, slots=True)
class Request:
    data: bytes = field(repr=False)
    delay_s: float
    """What the engine itself was told to wait."""

    @classmethod
    def make(cls, path: str, key: str, body: bytes, *, delay_s: float) -> Request:
        head = (
            f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return cls(head.encode() + body, delay_s)


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    first_s: float
    """Until the first byte of the body, less the engine's own delay; the whole answer likewise."""
    whole_s: float
    body: bytes = field(repr=False)

    @property
    def num_tokens(self) -> int:
        """As either side writes it."""
        told = _NUM_TOKENS.findall(self.body)
        return int(told[-1]) if told else self.body.count(b'"token_id":')


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One load on one side."""

    seconds: float
    cpu_s: float
    """Of the server."""
    calls: Sequence[TimedAnswer] = field(repr=False)

    @property
    def calls_per_s(self) -> float:
        return len(self.calls) / self.seconds

    @property
    def tokens_per_s(self) -> float:
        return sum(call.num_tokens for call in self.calls) / self.seconds

    def first_ms(self, share: float) -> float:
        return _percentile_ms([call.first_s for call in self.calls], share)

    def whole_ms(self, share: float) -> float:
        return _percentile_ms([call.whole_s for call in self.calls], share)


def _percentile_ms(seconds: Sequence[float], share: float) -> float:
    ordered = sorted(seconds)
    return 1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._ended: asyncio.Future[float] | None = None
        self._pieces: list[bytes] = []
        self._first_at = 0.0

    @classmethod
    async def open(cls, url: str) -> Connection:
        loop = asyncio.get_running_loop()
        if url.startswith("unix:"):
            _, connection = await loop.create_unix_connection(cls, url.removeprefix("unix:"))
            return connection
        parts = urlsplit(url)
        assert parts.hostname is not None and parts.port is not None
        _, connection = await loop.create_connection(cls, parts.hostname, parts.port)
        return connection

    async def ask(self, request: Request) -> TimedAnswer:
        assert self._transport is not None
        self._ended = asyncio.get_running_loop().create_future()
        self._pieces = []
        began_at = time.perf_counter()
        self._transport.write(request.data)
        ended_at = await self._ended
        body = b"".join(self._pieces)
        if self._parser.get_status_code() != 200:
            raise RuntimeError(f"{self._parser.get_status_code()}: {body[:500]!r}")
        own_s = began_at + request.delay_s
        return TimedAnswer(self._first_at - own_s, ended_at - own_s, body)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(ConnectionError(f"closed in mid-answer: {exc}"))

    def on_body(self, body: bytes) -> None:
        if not self._pieces:
            self._first_at = time.perf_counter()
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(time.perf_counter())


async def load(
    server: Server, requests: Sequence[Request], *, num_clients: int, think_s: float = 0.0
) -> Window:
    """Each client thinks, so long on average, before it takes the next request."""
    connections = [await Connection.open(server.url) for _ in range(num_clients)]
    waiting = iter(requests)
    calls: list[TimedAnswer] = []

    async def client(connection: Connection, draw: random.Random) -> None:
        while True:
            if think_s:
                await asyncio.sleep(draw.expovariate(1 / think_s))
            request = next(waiting, None)
            if request is None:
                return
            calls.append(await connection.ask(request))

    gc.collect()
    gc.disable()
    cpu_s, began_at = server.cpu_s(), time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for at, connection in enumerate(connections):
                group.create_task(client(connection, random.Random(at)))
        seconds = time.perf_counter() - began_at
    finally:
        gc.enable()
        for connection in connections:
            connection.close()
    return Window(seconds=seconds, cpu_s=server.cpu_s() - cpu_s, calls=calls)
