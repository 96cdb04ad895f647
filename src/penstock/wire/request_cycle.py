# SPDX-License-Identifier: Apache-2.0
"""One request on a connection and its answer, with few copies, wake-ups and system calls.

The pieces of a body are joined once, when all are here or enough to stop reading; the head of an
answer of known length leaves together with its first bytes. Owns the bytes of one exchange; knows
nothing of routes, and decides neither who may call nor for how long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from logging import Logger
from typing import Any

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

KNOWN_LIMIT = 4 * HIGH_WATER_LIMIT
"""Bytes of a body that wait for the service, of a caller with a credential; reading then pauses."""
_WITHOUT_BODY = frozenset({204, 304})
_TEXT = bytes(byte for byte in range(256) if byte == 9 or (byte >= 32 and byte != 127))
"""What may stand in a line of a head; a line break in a value would end its header."""


class RequestCycle(RequestResponseCycle):
    def __init__(
        self,
        *,
        scope: Any,
        transport: asyncio.Transport,
        flow: FlowControl,
        logger: Logger,
        default_headers: list[tuple[bytes, bytes]],
        expects_continue: bool,
        keep_alive: bool,
        is_known: bool,
        on_response: Callable[[], None],
    ) -> None:
        """`is_known`: a request of this connection was authorised before."""
        super().__init__(
            scope=scope,
            transport=transport,
            flow=flow,
            logger=logger,
            access_logger=logger,
            access_log=False,
            default_headers=default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=expects_continue,
            keep_alive=keep_alive,
            on_response=on_response,
        )
        self._limit = KNOWN_LIMIT if is_known else HIGH_WATER_LIMIT
        self._chunks: list[bytes] = []
        self._num_bytes = 0
        """Of the body, received and not yet taken by the service."""
        self._head = b""
        """Of the answer, not yet sent."""

    # --- the request --------------------------------------------------------------------------

    def add(self, piece: bytes) -> None:
        """The next piece of the body. The service is woken when it is complete, or too long to
        keep more of it."""
        self._chunks.append(piece)
        self._num_bytes += len(piece)
        if self._num_bytes > self._limit:
            self.flow.pause_reading()
            self.message_event.set()

    async def receive(self) -> Any:
        message = await super().receive()
        if message["type"] == "http.request":
            chunks, self._chunks, self._num_bytes = self._chunks, [], 0
            message["body"] = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        return message

    # --- the answer ---------------------------------------------------------------------------

    async def send(self, message: Any) -> None:
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if not self.response_started:
            self._start(message)
        elif not self.response_complete:
            self._continue(message)
        else:
            raise RuntimeError(f"{message['type']} after the end of the answer")

    def _start(self, message: Any) -> None:
        if message["type"] != "http.response.start":
            raise RuntimeError(f"{message['type']} before the start of the answer")
        self.response_started, self.waiting_for_100_continue = True, False
        status: int = message["status"]
        lines = [STATUS_LINE[status]]
        closes = False
        for name, value in (*self.default_headers, *message.get("headers", ())):
            name = name.lower()
            if name == b"content-length" and self.chunked_encoding is None:
                self.expected_content_length, self.chunked_encoding = int(value), False
            elif name == b"transfer-encoding" and value.lower() == b"chunked":
                self.expected_content_length, self.chunked_encoding = 0, True
            elif name == b"connection" and b"close" in value.lower():
                self.keep_alive, closes = False, True
            lines.append(b"%b: %b\r\n" % (name, value))
        if not self.keep_alive and not closes:
            lines.append(b"connection: close\r\n")
        has_body = self.scope["method"] != "HEAD" and status not in _WITHOUT_BODY
        if self.chunked_encoding is None and has_body:
            self.chunked_encoding = True
            lines.append(b"transfer-encoding: chunked\r\n")
        lines.append(b"\r\n")
        head = b"".join(lines)
        if head.translate(None, _TEXT) != b"\r\n" * len(lines):
            raise RuntimeError("a header of the answer has control characters")
        if self.chunked_encoding:
            self.transport.write(head)  # its first bytes may be long in coming
        else:
            self._head = head

    def _continue(self, message: Any) -> None:
        if message["type"] != "http.response.body":
            raise RuntimeError(f"{message['type']} instead of the body of the answer")
        body = message.get("body", b"")
        has_more = message.get("more_body", False)
        if self.scope["method"] == "HEAD":
            self.expected_content_length, body = 0, b""
        elif self.chunked_encoding:
            piece = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            body = piece if has_more else piece + b"0\r\n\r\n"
        else:
            self.expected_content_length -= len(body)
            if self.expected_content_length < 0:
                raise RuntimeError("the answer is longer than its content-length")
        head, self._head = self._head, b""
        if head and body:
            self.transport.writelines((head, body))
        elif head or body:
            self.transport.write(head or body)
        if has_more:
            return
        if self.expected_content_length > 0:
            raise RuntimeError("the answer is shorter than its content-length")
        self.response_complete = True
        self.message_event.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()
