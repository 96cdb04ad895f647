# SPDX-License-Identifier: Apache-2.0
"""From an app to a socket: where it may listen, and how a process serves it."""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import socket
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import uvicorn
from starlette.applications import Starlette

from penstock.errors import ConfigError
from penstock.wire.header_limit import HeaderLimitProtocol

MALLOC_WARMUP_BYTES = 31 << 20
"""Bytes; glibc learns from blocks up to 32 MB what is worth keeping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    certificate: Path
    key: Path


def require_tls_off_loopback(host: str, tls: Tls | None) -> None:
    """Nothing listens beyond loopback without TLS; credentials are part of every app."""
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    if not is_loopback and tls is None:
        raise ConfigError(
            f"refusing to listen on {host} without TLS: tokens would cross the network in clear. "
            "Give --tls-cert and --tls-key, or listen on 127.0.0.1"
        )


def tune_memory() -> None:
    """For a process that is one service, once its state is built: what lives now lives on, so the
    collector of cycles need not walk it again and again; counting references frees the rest. After
    one large block the allocator keeps what large bodies free, and need not ask for it page by page
    with each of them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    bytearray(MALLOC_WARMUP_BYTES)


async def serve(app: Starlette, host: str, port: int, tls: Tls | None = None) -> None:
    """Serve until SIGTERM or cancellation; open long-polls are cut after two seconds."""
    tune_memory()
    await server(app, host, port, tls).serve()


async def serve_on_socket(app: Starlette, listener: socket.socket, tls: Tls | None = None) -> None:
    """Serve inside somebody else's process until cancelled; signals stay the host's business."""
    host, port, *_ = listener.getsockname()
    embedded = _EmbeddedServer(_config(app, host, port, tls))
    try:
        await embedded.serve(sockets=[listener])
    except asyncio.CancelledError:
        if embedded.started:
            await embedded.shutdown(sockets=[listener])
        raise


class _EmbeddedServer(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def server(app: Starlette, host: str, port: int, tls: Tls | None = None) -> uvicorn.Server:
    return uvicorn.Server(_config(app, host, port, tls))


def _config(app: Starlette, host: str, port: int, tls: Tls | None = None) -> uvicorn.Config:
    require_tls_off_loopback(host, tls)
    return uvicorn.Config(
        cast(Any, app),
        host=host,
        port=port,
        loop="uvloop",
        http=HeaderLimitProtocol,
        log_config=None,
        access_log=False,
        proxy_headers=False,
        lifespan="on",
        timeout_graceful_shutdown=2,
        timeout_keep_alive=75,
        ssl_certfile=None if tls is None else str(tls.certificate),
        ssl_keyfile=None if tls is None else str(tls.key),
    )
