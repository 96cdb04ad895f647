# SPDX-License-Identifier: Apache-2.0
"""Serves the embedded gateway over HTTP on loopback, for programs that take a base URL."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass, field

from penstock.gateway.gateway import Gateway
from penstock.gateway.server import build_app
from penstock.wire.serving import serve_on_socket

BACKLOG = 1024


@dataclass(slots=True)
class Endpoint:
    """Starts serving when `url` is first read; costs nothing before that."""

    _gateway: Gateway
    _listener: socket.socket | None = None
    _requested: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        """The `base_url` for an OpenAI client; calls queue at the socket until `run()` serves."""
        if self._listener is None:
            self._listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
            self._requested.set()
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"

    async def run(self) -> None:
        """consumes: HTTP calls from agents · produces: turns of their sessions
        waits for: an agent that needs HTTP · woken by: `url`"""
        await self._requested.wait()
        assert self._listener is not None
        with self._listener:
            await serve_on_socket(build_app(self._gateway), self._listener)
