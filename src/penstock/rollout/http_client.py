# SPDX-License-Identifier: Apache-2.0
"""A minimal HTTP/1.1 client for an engine server: pooled connections, full or streamed bodies.

Owns connections and their timeouts. Streamed chunks are passed on in the same call that reads them
from the socket, so callbacks run in order of arrival across all connections. Cancelling a request
closes its connection, so the server stops generating. No TLS and no redirects: the engine is on
this machine, behind a unix socket, or in its private network.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import httptools
import msgspec

from penstock.errors import ConfigError, EngineError

CONNECT_S = 10.0
MAX_IDLE = 512
MAX_SOCKET_PATH_BYTES = 107
"""The kernel's limit for the path of a unix socket."""
KEY_FILE_VARIABLE = "PENSTOCK_ENGINE_KEY_FILE"
"""Names the file with the API key of an engine server that the node did not start."""
OnBody = Callable[[bytes], None]


@dataclass(frozen=True, slots=True)
class HttpReply:
    status: int
    body: bytes
    """Empty if the body was streamed."""


class HttpClient:
    """Requests raise OSError (including TimeoutError) if no complete reply arrives."""

    def __init__(self, url: str, *, key: str = "") -> None:
        """`url`: http://HOST:PORT, or unix:/PATH for a unix socket. `key` is sent as the bearer."""
        self.url = url
        self._socket_path = _socket_path(url)
        parts = urlsplit("http://engine" if self._socket_path else url)
        if parts.scheme != "http" or not parts.hostname:
            raise ConfigError(
                f"engine URL {url!r} is not valid; write it as http://HOST:PORT or unix:/PATH"
            )
        self._host, self._port = parts.hostname, parts.port or 80
        self._prefix = parts.path.rstrip("/")
        self._more_headers = f"authorization: Bearer {key}\r\n" if key else ""
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        timeout_s: float | None = None,
        on_body: OnBody | None = None,
    ) -> HttpReply:
        """`on_body` receives the chunks of a reply with status 200; its errors are raised here."""
        head = (
            f"{method} {self._prefix}{path} HTTP/1.1\r\nhost: {self._host}:{self._port}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            f"{self._more_headers}\r\n"
        )
        data = head.encode("ascii") + body
        async with asyncio.timeout(timeout_s):
            while self._idle:
                connection = self._idle.pop()
                if connection.is_usable:
                    try:
                        return await self._send(connection, data, on_body)
                    except _Stale:  # closed by the server while the request was in flight
                        break
            return await self._send(await self._connect(), data, on_body)

    async def call(
        self,
        server: str,
        method: str,
        path: str,
        body: object = None,
        *,
        timeout_s: float,
        fix: str = "",
    ) -> HttpReply:
        """`request` with a JSON body. Raises EngineError unless the status is 200; `fix` says what
        to do if the server lacks the route."""
        data = b"" if body is None else msgspec.json.encode(body)
        try:
            reply = await self.request(method, path, data, timeout_s=timeout_s)
        except OSError as error:
            why = str(error) or type(error).__name__
            raise EngineError(f"no response from {server} to {method} {path}: {why}") from None
        if reply.status != 200:
            response = reply.body.decode(errors="replace")[:1000]
            hint = f"; {fix}" if fix and reply.status in (403, 404, 405) else ""
            raise EngineError(
                f"{server} returned {reply.status} to {method} {path}: {response}{hint}"
            )
        return reply

    def abort(self, why: str) -> None:
        """Close all connections; waiting requests raise ConnectionError."""
        for connection in list(self._open):
            connection.abort(ConnectionAbortedError(why))

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()

        def make() -> _Connection:
            return _Connection(self._open.discard)

        async with asyncio.timeout(CONNECT_S):
            if self._socket_path:
                _, connection = await loop.create_unix_connection(make, self._socket_path)
            else:
                _, connection = await loop.create_connection(make, self._host, self._port)
        self._open.add(connection)
        return connection

    async def _send(
        self, connection: _Connection, data: bytes, on_body: OnBody | None
    ) -> HttpReply:
        try:
            reply = await connection.send(data, on_body)
        except BaseException:
            connection.abort(ConnectionAbortedError("the request was cancelled"))
            raise
        if connection.is_usable and len(self._idle) < MAX_IDLE:
            self._idle.append(connection)
        else:
            connection.abort(ConnectionAbortedError("closed"))
        return reply


def read_server_key() -> str:
    """The API key of an engine server that the node did not start, from the file that
    PENSTOCK_ENGINE_KEY_FILE names; empty if it names none."""
    name = os.environ.get(KEY_FILE_VARIABLE, "")
    if not name:
        return ""
    try:
        key = Path(name).read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the engine's key in {name}: {error}") from None
    if not key.isprintable() or not key or " " in key:
        raise ConfigError(f"{name} holds no key; write the engine's API key on one line into it")
    return key


def _socket_path(url: str) -> str:
    """The path in a unix:/PATH URL; empty for any other URL."""
    scheme, _, path = url.partition(":")
    if scheme != "unix":
        return ""
    if not path.startswith("/") or len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"engine URL {url!r} is not valid; write unix:/PATH with an absolute path of at most "
            f"{MAX_SOCKET_PATH_BYTES} bytes (for penstock's own engines, set TMPDIR to a shorter "
            "folder)"
        )
    return path


class _Stale(ConnectionError):
    """A reused connection closed before the first byte of this reply."""


class _Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self, on_lost: Callable[[_Connection], None]) -> None:
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[HttpReply] | None = None
        self._on_body: OnBody | None = None
        self._chunks: list[bytes] = []
        self._num_replies = 0
        self._has_started = False
        self._must_close = False

    @property
    def is_usable(self) -> bool:
        is_open = self._transport is not None and not self._transport.is_closing()
        return is_open and not self._must_close and self._waiter is None

    async def send(self, data: bytes, on_body: OnBody | None) -> HttpReply:
        assert self._transport is not None
        self._waiter = asyncio.get_running_loop().create_future()
        self._on_body, self._chunks, self._has_started = on_body, [], False
        self._transport.write(data)
        return await self._waiter

    def abort(self, error: Exception) -> None:
        self._fail(error)
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._has_started = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            self.abort(cause if isinstance(cause, Exception) else error)
        except httptools.HttpParserError as error:
            self.abort(ConnectionError(f"the server's reply is not valid HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost(self)
        kind = ConnectionError if self._has_started or not self._num_replies else _Stale
        self._fail(kind(f"the server closed the connection{f' ({exc})' if exc else ''}"))

    def _fail(self, error: Exception) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)

    # --- httptools --------------------------------------------------------------------------------

    def on_body(self, body: bytes) -> None:
        if self._on_body is not None and self._parser.get_status_code() == 200:
            if self._waiter is not None and not self._waiter.done():
                self._on_body(body)
        else:
            self._chunks.append(body)

    def on_message_complete(self) -> None:
        self._num_replies += 1
        self._must_close = not self._parser.should_keep_alive()
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(HttpReply(self._parser.get_status_code(), b"".join(self._chunks)))
