# SPDX-License-Identifier: Apache-2.0
"""Serves an app on a socket, and decides where it may listen."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import uvicorn
from starlette.applications import Starlette

from penstock.addresses import is_loopback
from penstock.errors import ConfigError
from penstock.wire.doors import GuardedConnection, Listener, open_door

STARTUP_FAILURE = 3
IDLE_S = 75
"""A connection without a request for this long is closed; clients close theirs sooner."""
MALLOC_WARMUP_BYTES = 31 << 20
"""Freeing a block of this size raises glibc's dynamic mmap threshold (32 MB at most), so that the
allocator keeps and reuses freed memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    certificate: Path
    key: Path
    client_ca: Path | None = None
    """Accept only callers with a certificate of this authority."""


def require_tls_off_loopback(host: str, tls: Tls | None) -> None:
    """Raise ConfigError for a listener outside loopback without TLS."""
    if tls is None and not is_loopback(host):
        raise ConfigError(
            f"refusing to listen on {host} without TLS: tokens would be sent in clear text. "
            "Pass --tls-cert and --tls-key, or listen on 127.0.0.1"
        )


def tune_memory() -> None:
    """Tune a service process after its state is built. Freeze current objects so that the garbage
    collector skips them; reference counting frees most others. Then allocate one large block, so
    that the allocator reuses the memory of large bodies instead of requesting it page by page."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    bytearray(MALLOC_WARMUP_BYTES)


async def serve(
    app: Starlette, host: str, port: int, tls: Tls | None = None, *, idle_s: int = IDLE_S
) -> None:
    """Serve until SIGTERM or cancellation; open long polls are closed after two seconds."""
    tune_memory()
    await server(app, host, port, tls, idle_s=idle_s).serve()


async def serve_on_socket(
    app: Starlette,
    listener: socket.socket,
    tls: Tls | None = None,
    *,
    also: Sequence[socket.socket] = (),
    idle_s: int = IDLE_S,
) -> None:
    """Serve inside another process until cancelled; that process handles signals. `also`: unix
    sockets to serve on."""
    host, port, *_ = listener.getsockname()
    embedded = _EmbeddedServer(_config(app, host, port, tls, idle_s))
    try:
        await embedded.serve(sockets=[listener, *also])
    except asyncio.CancelledError:
        if embedded.started:
            await embedded.shutdown(sockets=[listener, *also])
        raise


class _GuardedServer(uvicorn.Server):
    """Accepts connections at a Door."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(STARTUP_FAILURE)
        config, door = self.config, open_door()

        def make_connection(address: str) -> GuardedConnection:
            return GuardedConnection(
                config, self.server_state, self.lifespan.state, door=door, address=address
            )

        listeners = sockets or [socket.create_server((config.host, config.port))]
        self.servers = cast(
            Any, [Listener(listener, door, make_connection, config.ssl) for listener in listeners]
        )
        self.started = True


class _EmbeddedServer(_GuardedServer):
    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def server(
    app: Starlette, host: str, port: int, tls: Tls | None = None, *, idle_s: int = IDLE_S
) -> uvicorn.Server:
    return _GuardedServer(_config(app, host, port, tls, idle_s))


def _config(app: Starlette, host: str, port: int, tls: Tls | None, idle_s: int) -> uvicorn.Config:
    require_tls_off_loopback(host, tls)
    return uvicorn.Config(
        cast(Any, app),
        host=host,
        port=port,
        loop="uvloop",
        ws="none",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        lifespan="on",
        timeout_graceful_shutdown=2,
        timeout_keep_alive=idle_s,
        ssl_certfile=None if tls is None else str(tls.certificate),
        ssl_keyfile=None if tls is None else str(tls.key),
        ssl_ca_certs=None if tls is None or tls.client_ca is None else str(tls.client_ca),
        ssl_cert_reqs=ssl.CERT_NONE if tls is None or tls.client_ca is None else ssl.CERT_REQUIRED,
    )
