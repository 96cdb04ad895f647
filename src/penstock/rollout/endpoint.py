# SPDX-License-Identifier: Apache-2.0
"""The embedded gateway over HTTP on loopback, for programs that only know a base URL."""

from __future__ import annotations

import asyncio
import socket

from penstock.gateway.gateway import Gateway
from penstock.gateway.server import build_app
from penstock.wire.server import serve_on

BACKLOG = 1024


class Endpoint:
    """Serves from the first time somebody asks for its address; until then it costs nothing."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._listener: socket.socket | None = None
        self._serving: asyncio.Task[None] | None = None
        self._url = ""

    @property
    def url(self) -> str:
        """What an OpenAI client calls `base_url`. Connections wait in the backlog until the server
        is up."""
        if self._serving is None:
            self._listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
            self._url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"
            self._serving = asyncio.create_task(
                serve_on(build_app(self._gateway), self._listener), name="gateway"
            )
        return self._url

    async def close(self) -> None:
        if self._serving is not None and self._listener is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
            self._listener.close()
