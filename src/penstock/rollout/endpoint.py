# SPDX-License-Identifier: Apache-2.0
"""Serves the embedded gateway over HTTP, for programs that take a base URL: on loopback, and on a
unix socket for programs in a sandbox without a network."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from penstock.gateway.gateway import Gateway
from penstock.gateway.server import build_app
from penstock.wire.serving import serve_on_socket

BACKLOG = 1024


def role_url(base_url: str, role: str) -> str:
    """The `base_url` whose calls are made in this role."""
    return f"{base_url.removesuffix('/v1')}/roles/{role}/v1"


@dataclass(slots=True)
class Endpoint:
    """Starts serving when an address is first read; costs nothing before that."""

    _gateway: Gateway
    _listener: socket.socket | None = None
    _local: socket.socket | None = None
    _folder: TemporaryDirectory[str] | None = None
    _requested: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        """The `base_url` for an OpenAI client; calls queue at the socket until `run()` serves."""
        return f"http://127.0.0.1:{self._open().getsockname()[1]}/v1"

    @property
    def socket_path(self) -> Path:
        """A unix socket to the same, for sandboxes; its folder keeps other users out."""
        self._open()
        assert self._folder is not None
        return Path(self._folder.name) / "socket"

    def _open(self) -> socket.socket:
        if self._listener is None:
            self._listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
            self._folder = TemporaryDirectory(prefix="penstock-gateway-")
            path = Path(self._folder.name) / "socket"
            self._local = socket.socket(socket.AF_UNIX)
            self._local.bind(str(path))
            path.chmod(0o666)  # each sandbox has its own user
            self._local.listen(BACKLOG)
            self._requested.set()
        return self._listener

    async def run(self) -> None:
        """consumes: HTTP calls from agents · produces: turns of their sessions
        waits for: an agent that needs HTTP · woken by: `url`, `socket_path`"""
        await self._requested.wait()
        assert self._listener is not None and self._local is not None and self._folder is not None
        with self._folder, self._listener, self._local:
            await serve_on_socket(build_app(self._gateway), self._listener, also=[self._local])
