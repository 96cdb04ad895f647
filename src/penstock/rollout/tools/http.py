# SPDX-License-Identifier: Apache-2.0
"""MCP over HTTP to hosts that this node grants, and to no others.

A name is resolved once and the connection goes to an address that was checked, so that neither a
run file of others nor a name server leads a node into its own network. Bounds each response and the
parts of its messages, and refuses compressed ones, whose size is not known before they are read.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import httpcore2
import httpx2
from mcp.client._transport import TransportStreams
from mcp.client.streamable_http import streamable_http_client

from penstock.errors import BadRequest, ConfigError
from penstock.redaction import register_secret
from penstock.rollout.egress.proxy import CONNECT_S, Resolve, resolve
from penstock.rollout.egress.rules import Denied, EgressRules, Target, read_authority
from penstock.rollout.tools.mcp_session import Ending
from penstock.wire.json_parts import require_few_parts

MAX_RESPONSE_BYTES = 8 << 20
MAX_EVENT_BYTES = 4 << 20
MIN_STREAM_S = 1.0
"""Until a stream of events (GET) ends: the SDK opens the next as soon as the server likes."""
MAX_EVENT_LINES = 4096
_EVENT_END = re.compile(rb"\n\n|\n\r|\r\r")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpServer:
    """A server by its URL."""

    url: str
    hosts: tuple[str, ...]
    """Granted hosts, as in `EgressRules`."""
    timeout_s: float
    token_file: Path | None = None
    """Its content is sent as the bearer."""
    resolve: Resolve = resolve

    @asynccontextmanager
    async def connect(self, ending: Ending) -> AsyncGenerator[TransportStreams]:
        """The streams of a new MCP session."""
        transport = GuardedTransport(self.url, self.hosts, self.resolve, ending)
        timeout = httpx2.Timeout(CONNECT_S, read=self.timeout_s + CONNECT_S)
        client = httpx2.AsyncClient(
            transport=transport, timeout=timeout, headers=self._headers(), trust_env=False
        )
        async with client:
            streams = streamable_http_client(
                self.url, http_client=client, max_sse_event_size=MAX_EVENT_BYTES
            )
            async with streams as both:
                yield both

    def _headers(self) -> dict[str, str]:
        headers = {"accept-encoding": "identity"}
        if self.token_file is not None:
            token = self.token_file.read_text().strip()
            register_secret(token)
            headers["authorization"] = f"Bearer {token}"
        return headers


def check_url(url: str, hosts: Iterable[str]) -> Target:
    """The host and port of a URL that is granted. Raises Denied."""
    parts = urlsplit(url)
    is_tls = parts.scheme == "https"
    target = read_authority(parts.netloc, default_port=443 if is_tls else 80)
    EgressRules(hosts).check(target, is_tunnel=is_tls)
    return target


class _GuardedBackend(httpcore2.AsyncNetworkBackend):
    """Connects to checked addresses of granted hosts."""

    def __init__(self, url: str, hosts: tuple[str, ...], resolve: Resolve) -> None:
        self._is_tls = urlsplit(url).scheme == "https"
        self._rules = EgressRules(hosts)
        self._resolve = resolve
        self._inner = cast(httpcore2.AsyncNetworkBackend, httpcore2.AnyIOBackend())

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - as in the base class
        local_address: str | None = None,
        socket_options: Any = None,
    ) -> httpcore2.AsyncNetworkStream:
        target = read_authority(f"{host}:{port}", default_port=port)
        self._rules.check(target, is_tunnel=self._is_tls)
        addresses = self._rules.check_addresses(target, await self._resolve(host, port))
        problem: Exception = httpcore2.ConnectError(f"{host} has no address")
        for address in addresses:
            try:
                return await self._inner.connect_tcp(
                    address, port, timeout, local_address, socket_options
                )
            except httpcore2.ConnectError as error:
                problem = error
        raise problem

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ASYNC109 - as in the base class
        socket_options: Any = None,
    ) -> httpcore2.AsyncNetworkStream:
        raise httpcore2.ConnectError("unix sockets are not granted")

    async def sleep(self, seconds: float) -> None:
        await self._inner.sleep(seconds)


class GuardedTransport(httpx2.AsyncBaseTransport):
    """Requests to one granted URL, with bounded responses."""

    def __init__(self, url: str, hosts: tuple[str, ...], resolve: Resolve, ending: Ending) -> None:
        self._ending = ending
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=ssl.create_default_context(),
            network_backend=_GuardedBackend(url, hosts, resolve),
        )

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        outgoing = httpcore2.Request(
            method=request.method,
            url=httpcore2.URL(
                scheme=request.url.raw_scheme,
                host=request.url.raw_host,
                port=request.url.port,
                target=request.url.raw_path,
            ),
            headers=request.headers.raw,
            content=cast("AsyncIterator[bytes]", request.stream),
            extensions=request.extensions,
        )
        ends_at = time.monotonic() + MIN_STREAM_S if request.method == "GET" else 0.0
        try:
            response = await self._pool.handle_async_request(outgoing)
        except Denied as error:
            raise self._error(str(error)) from None
        except (httpcore2.NetworkError, httpcore2.ProtocolError, OSError) as error:
            raise self._error(f"the connection failed: {error}") from None
        except httpcore2.TimeoutException as error:
            raise self._error(f"the connection timed out: {error}") from None
        encodings = [v for k, v in response.headers if k.lower() == b"content-encoding"]
        if any(encoding != b"identity" for encoding in encodings):
            await response.aclose()
            raise self._error("its response is compressed, which is not accepted")
        headers = [(name, _without_charset(name, value)) for name, value in response.headers]
        kind = b"".join(v for k, v in headers if k.lower() == b"content-type")
        has_events = kind.strip().lower() == b"text/event-stream"
        stream = _Bounded(response, self._error, ends_at, has_events=has_events)
        return httpx2.Response(response.status, headers=headers, stream=stream)

    def _error(self, why: str) -> httpx2.TransportError:
        self._ending.why = why
        return httpx2.TransportError(why)

    async def aclose(self) -> None:
        await self._pool.aclose()


def _without_charset(name: bytes, value: bytes) -> bytes:
    """MCP is UTF-8; some codecs that a server could name take the square of the text."""
    return value.partition(b";")[0] if name.lower() == b"content-type" else value


class _Bounded(httpx2.AsyncByteStream):
    """A response, in messages: each is passed on when its parts were counted."""

    def __init__(
        self, response: httpcore2.Response, error: Any, ends_at: float, *, has_events: bool
    ) -> None:
        """ends_at: not before this time of the monotonic clock."""
        self._response, self._error, self._ends_at = response, error, ends_at
        self._has_events = has_events

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num_bytes, held = 0, bytearray()
        try:
            async for chunk in self._response.aiter_stream():
                num_bytes += len(chunk)
                if num_bytes > MAX_RESPONSE_BYTES:
                    raise self._error(f"it sent more than {MAX_RESPONSE_BYTES:,} bytes")
                num_old = len(held)
                held += chunk
                if self._has_events and (end := _last_event_end(held, num_old)):
                    yield self._counted(bytes(held[:end]))
                    del held[:end]
            yield self._counted(bytes(held))
            await asyncio.sleep(self._ends_at - time.monotonic())
        except (httpcore2.NetworkError, httpcore2.ProtocolError) as error:
            raise self._error(f"the connection failed: {error}") from None
        except httpcore2.TimeoutException:
            raise self._error("its response took too long") from None

    def _counted(self, content: bytes) -> bytes:
        try:
            for event in _EVENT_END.split(content) if self._has_events else ():
                require_few_parts(_with_closed_quotes(event))
            if not self._has_events:
                require_few_parts(content)
        except BadRequest as error:
            raise self._error(f"it sent {error}") from None
        return content

    async def aclose(self) -> None:
        await self._response.aclose()


def _last_event_end(held: bytearray, num_old: int) -> int:
    """Where the last complete event ends; 0 if none does behind the first `num_old` bytes."""
    ends = [found.end() for found in _EVENT_END.finditer(held, max(0, num_old - 1))]
    return ends[-1] if ends else 0


def _with_closed_quotes(event: bytes) -> bytes:
    """No text of JSON goes on in the next line: a quote left open, say in a comment, must hide
    nothing behind it."""
    if b'"' not in event:
        return event
    lines = event.splitlines()
    if len(lines) > MAX_EVENT_LINES:
        raise BadRequest(f"an event of {len(lines):,} lines; at most {MAX_EVENT_LINES:,} are read")
    return b"\n".join([line + b' "' if _has_open_quote(line) else line for line in lines])


def _has_open_quote(line: bytes) -> bool:
    return line.replace(rb"\\", b"").replace(rb"\"", b"").count(b'"') % 2 == 1


def secret_file(secrets: Mapping[str, Path], name: str, server: str) -> Path:
    """The file that this node grants under this name."""
    if name not in secrets:
        raise ConfigError(
            f"tools.{server}.token names the secret {name!r}, which this machine does not grant; "
            f"add it under sandbox.servers.secrets as {name}: FILE"
        )
    return secrets[name]
