# SPDX-License-Identifier: Apache-2.0
"""An HTTP proxy on a unix socket for one attempt: plain requests and CONNECT to granted hosts.

A name is resolved once, and the connection goes to the address that was checked. Each connection
carries one request, written again from its parsed parts, so that the server reads the same end of
it as we do. Redirects go back to the program; what it asks next is checked like the first. Every
request is recorded with the attempt. Refuses requests in origin form, and everything not granted.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import h11
import structlog

from penstock.rollout.egress.rules import (
    HTTP_PORT,
    HTTPS_PORT,
    Denied,
    EgressRules,
    Target,
    read_authority,
)

HEAD_S = 30.0
IDLE_S = 120.0
CONNECT_S = 15.0
MAX_HEAD_BYTES = 64 << 10
MAX_CONNECTIONS = 64
MAX_BYTES = 1 << 30
"""Of one attempt, both ways."""
MAX_RECORDS = 10_000
MAX_RECORDED_CHARS = 300
"""Of a name that the program chose: it is written to the log."""
CHUNK_BYTES = 1 << 16
HOP_HEADERS = frozenset(
    b"connection expect keep-alive proxy-authenticate proxy-authorization proxy-connection te "
    b"trailer upgrade".split()
)
CLOSE = (b"connection", b"close")
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
Connect = Callable[[str, int], Awaitable[Streams]]
log = structlog.get_logger(__name__)


@dataclass(slots=True)
class EgressRecord:
    """One request of a sandboxed program, allowed or not."""

    method: str = ""
    host: str = ""
    status: int = 0
    """What the program was answered; 403: denied."""
    sent_bytes: int = 0
    received_bytes: int = 0
    ms: float = 0.0
    reason: str = ""
    """Why it was denied or failed."""


async def resolve(host: str, port: int) -> Sequence[str]:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


async def connect(address: str, port: int) -> Streams:
    return await asyncio.open_connection(address, port)


@dataclass(slots=True, kw_only=True)
class EgressProxy:
    """`async with EgressProxy(...)`: serves until the attempt ends."""

    path: Path
    """Of the unix socket; its folder must be private."""
    hosts: Iterable[str]
    """Granted hosts; nothing else can be reached."""
    row_id: str
    """The trajectory that its requests are recorded with."""
    is_of_one_attempt: bool = True
    """Whether the limit on bytes holds. The proxy of a reward serves the attempts of a whole run:
    some of them must not use up what the others need."""
    resolve: Resolve = resolve
    connect: Connect = connect
    records: list[EgressRecord] = field(default_factory=list[EgressRecord])
    rules: EgressRules = field(init=False)
    _server: asyncio.Server | None = None
    _running: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])
    _num_bytes: int = 0

    def __post_init__(self) -> None:
        self.rules = EgressRules(self.hosts)

    async def __aenter__(self) -> EgressProxy:
        self._server = await asyncio.start_unix_server(self._accept, self.path)
        os.chmod(self.path, 0o666)  # another user inside the sandbox; the folder is private
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        with suppress(FileNotFoundError):
            os.unlink(self.path)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._running) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.create_task(_Exchange(self, reader, writer).run())
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self.is_of_one_attempt and self._num_bytes > MAX_BYTES:
            raise Denied(f"this attempt moved more than {MAX_BYTES} bytes")

    def note(self, record: EgressRecord) -> None:
        if len(self.records) >= MAX_RECORDS:
            return
        self.records.append(record)
        if len(self.records) == MAX_RECORDS:
            log.warning("egress: later requests are not recorded", row=self.row_id)
        log.info(
            "egress",
            row=self.row_id,
            method=record.method,
            host=record.host,
            status=record.status,
            sent_bytes=record.sent_bytes,
            received_bytes=record.received_bytes,
            ms=round(record.ms, 1),
            reason=record.reason,
        )


class _Exchange:
    """One connection of the program: one request."""

    def __init__(
        self, proxy: EgressProxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._proxy = proxy
        self._reader, self._writer = reader, writer
        self._client = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._record = EgressRecord()

    async def run(self) -> None:
        started_at = time.monotonic()
        try:
            await self._answer()
        except Denied as error:
            await self._refuse(403, str(error))
        except (h11.RemoteProtocolError, h11.LocalProtocolError, UnicodeError) as error:
            await self._refuse(400, f"not a request for a proxy: {error}")
        except (OSError, TimeoutError, EOFError) as error:
            await self._refuse(502, f"the connection failed: {error or type(error).__name__}")
        finally:
            self._record.ms = 1e3 * (time.monotonic() - started_at)
            self._proxy.note(self._record)
            self._writer.close()

    async def _answer(self) -> None:
        async with asyncio.timeout(HEAD_S):
            request = await self._next()
        if not isinstance(request, h11.Request):
            raise EOFError("the program sent no request")
        self._record.method = request.method.decode("ascii")[:MAX_RECORDED_CHARS]
        target, path = self._read_target(request)
        self._record.host = str(target)[:MAX_RECORDED_CHARS]
        self._proxy.rules.check(target, is_tunnel=request.method == b"CONNECT")
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await self._connect(target)
        try:
            if request.method == b"CONNECT":
                await self._tunnel(reader, writer)
            else:
                await self._forward(request, target, path, reader, writer)
        finally:
            writer.close()

    async def _connect(self, target: Target) -> Streams:
        """Resolve once, check every address, and connect to one of those."""
        addresses = await self._proxy.resolve(target.host, target.port)
        problem = OSError("no address")
        for address in self._proxy.rules.check_addresses(target, addresses):
            try:
                return await self._proxy.connect(address, target.port)
            except OSError as error:
                problem = error
        raise problem

    def _read_target(self, request: h11.Request) -> tuple[Target, bytes]:
        """Where the request goes, and its path there; the Host header must agree."""
        if request.method == b"CONNECT":
            target, path = read_authority(request.target.decode("ascii"), default_port=0), b""
            if not target.port:
                raise Denied("CONNECT needs HOST:PORT")
            default_port = HTTPS_PORT
        else:
            scheme, _, rest = request.target.partition(b"://")
            authority, slash, path = rest.partition(b"/")
            if scheme.lower() != b"http":
                raise Denied("a proxy takes http://HOST/PATH, or CONNECT HOST:443 for https")
            default_port = HTTP_PORT
            target = read_authority(authority.decode("ascii"), default_port=default_port)
            path = slash + path or b"/"
        for name, value in request.headers:
            if name == b"host":
                named = read_authority(value.decode("ascii"), default_port=default_port)
                if named.host != target.host or (b":" in value and named.port != target.port):
                    raise Denied(f"the Host header names {named}, the request {target}")
        return target, path

    async def _forward(
        self,
        request: h11.Request,
        target: Target,
        path: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        server = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        host = target.host if target.port == HTTP_PORT else str(target)
        headers = [(b"host", host.encode()), *_end_to_end(request.headers), CLOSE]
        head = h11.Request(method=request.method, target=path, headers=headers)
        self._send_up(server, writer, head)
        if self._client.they_are_waiting_for_100_continue:
            self._send_down(h11.InformationalResponse(status_code=100, headers=[]))
        while not isinstance(event := await self._next(), h11.EndOfMessage):
            if isinstance(event, h11.Data):
                self._send_up(server, writer, h11.Data(data=bytes(event.data)))
                await _drain(writer)
        self._send_up(server, writer, h11.EndOfMessage())
        while not isinstance(event := await _read_event(server, reader), h11.EndOfMessage):
            if isinstance(event, h11.Response):
                self._record.status = event.status_code
                headers = [*_end_to_end(event.headers), CLOSE]
                self._send_down(h11.Response(status_code=event.status_code, headers=headers))
            elif isinstance(event, h11.Data):
                self._received(len(event.data))
                self._send_down(h11.Data(data=bytes(event.data)))
            await _drain(self._writer)
        self._send_down(h11.EndOfMessage())
        await _drain(self._writer)

    async def _tunnel(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._next()  # the end of the request: a tunnel has no body
        self._record.status = 200
        self._send_down(h11.Response(status_code=200, headers=[]))
        early, _ = self._client.trailing_data
        writer.write(early)
        self._sent(len(early))
        both = [
            asyncio.create_task(_pump(self._reader, writer, self._sent)),
            asyncio.create_task(_pump(reader, self._writer, self._received)),
        ]
        try:
            await asyncio.gather(*both)
        finally:
            for task in both:
                task.cancel()

    async def _refuse(self, status: int, why: str) -> None:
        self._record.reason = why[:MAX_RECORDED_CHARS]
        if self._record.status:  # the answer has begun
            self._writer.transport.abort()
            return
        self._record.status = status
        body = f"egress proxy: {why}\n".encode()
        length = (b"content-length", str(len(body)).encode())
        with suppress(h11.LocalProtocolError, OSError, TimeoutError):
            self._send_down(h11.Response(status_code=status, headers=[length, CLOSE]))
            if self._record.method != "HEAD":
                self._send_down(h11.Data(data=body))
            await _drain(self._writer)

    async def _next(self) -> h11.Event:
        return await _read_event(self._client, self._reader)

    def _send_down(self, event: h11.Event) -> None:
        self._writer.write(self._client.send(event) or b"")

    def _send_up(
        self, server: h11.Connection, writer: asyncio.StreamWriter, event: h11.Event
    ) -> None:
        data = server.send(event) or b""
        self._sent(len(data))
        writer.write(data)

    def _sent(self, num_bytes: int) -> None:
        self._record.sent_bytes += num_bytes
        self._proxy.count(num_bytes)

    def _received(self, num_bytes: int) -> None:
        self._record.received_bytes += num_bytes
        self._proxy.count(num_bytes)


async def _read_event(connection: h11.Connection, reader: asyncio.StreamReader) -> h11.Event:
    while (event := connection.next_event()) is h11.NEED_DATA:
        async with asyncio.timeout(IDLE_S):
            connection.receive_data(await reader.read(CHUNK_BYTES))
    if not isinstance(event, h11.Event) or isinstance(event, h11.ConnectionClosed):
        raise EOFError("it ended in mid-message")
    return event


async def _drain(writer: asyncio.StreamWriter) -> None:
    async with asyncio.timeout(IDLE_S):
        await writer.drain()


async def _pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, count: Callable[[int], None]
) -> None:
    while True:
        async with asyncio.timeout(IDLE_S):
            data = await reader.read(CHUNK_BYTES)
        if not data:
            with suppress(OSError):
                writer.write_eof()
            return
        count(len(data))
        writer.write(data)
        await _drain(writer)


def _end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Headers for the other side, without this connection's own headers."""
    pairs = [(bytes(name), bytes(value)) for name, value in headers]
    named = {
        word.strip().lower()
        for name, value in pairs
        if name == b"connection"
        for word in value.split(b",")
    }
    framing = {b"content-length", b"transfer-encoding"}
    dropped = (HOP_HEADERS | named | {b"host"}) - framing
    if any(name == b"transfer-encoding" for name, _ in pairs):
        dropped |= {b"content-length"}
    return [(name, value) for name, value in pairs if name not in dropped]
