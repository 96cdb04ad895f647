# SPDX-License-Identifier: Apache-2.0
"""A real dataflow and weight server in one process, with an interceptor before every handler.

Owns the temporary folder, the listener and the truncated responses. The caller decides what to
check and which faults to inject.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.config import (
    AlgorithmConfig,
    DataflowConfig,
    LeaseConfig,
    ModelConfig,
    RunConfig,
    SamplingConfig,
    SourceConfig,
    TrainingConfig,
)
from penstock.dataflow.service.build import build
from penstock.dataflow.service.coordinator import DataflowService
from penstock.dataflow.service.server import surface
from penstock.errors import ConfigError
from penstock.types import PolicyName
from penstock.weights.serving.origin import Origin
from penstock.weights.serving.server import WeightServer
from penstock.weights.store import DirectoryStore
from penstock.wire.auth import Audience, Role, Signer
from penstock.wire.routes import Call, Route, routes_of
from penstock.wire.server import build_app
from penstock.wire.serving import require_tls_off_loopback, serve_on_socket

RUN = "conformance"
POLICY = PolicyName("policy")
TTL_S = 8.0
HEARTBEAT_S = TTL_S / 4
TOKEN_TTL_S = 3600.0
SUBJECT = "peer"
"""Whom the token of the peer under test is for: a node is `peer` or `peer.SUFFIX`."""

Handler = Callable[[Call], Awaitable[object]]
Interceptor = Callable[[str, Call, Handler], Awaitable[object]]
"""Maps (`METHOD /path`, the call, the real handler) to a response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinInfo:
    """Everything that the peer under test gets."""

    url: str
    token: str
    store: Path
    """Weight store that a trainer writes its versions to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataflowDouble:
    service: DataflowService
    store: Path
    listener: socket.socket
    url: str
    signer: Signer

    def join_info(self, role: Role) -> JoinInfo:
        audiences = (Audience.DATAFLOW, Audience.WEIGHTS)
        token = self.signer.mint(role, audiences, ttl_s=TOKEN_TTL_S, subject=SUBJECT)
        return JoinInfo(url=self.url, token=token, store=self.store)

    @asynccontextmanager
    async def serve(self, interceptor: Interceptor) -> AsyncGenerator[None]:
        """Serve calls, each through `interceptor`, until the block ends."""
        routes = [_intercepted(route, interceptor) for route in self._routes()]
        verifier = self.signer.verifier(Audience.DATAFLOW)
        app = build_app(routes, verifier, title="penstock double", lifespan=self._lifespan)
        # Responses are truncated on purpose; do not log that.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        async with _background(serve_on_socket(app, self.listener)):
            yield

    def _routes(self) -> list[Route]:
        """Both services share one address: the dataflow has the metrics, the weight server the
        blobs."""
        dataflow = surface(self.service, run_config(), self.url).routes()
        weights = routes_of(WeightServer(Origin(DirectoryStore(self.store)), RUN))
        return [
            *(route for route in weights if route.path != "/metrics"),
            *(r for r in dataflow if (r.method, r.path) != ("GET", "/v1/blobs/{digest}")),
        ]

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncGenerator[None]:
        async with _background(self.service.run_timers()):
            yield


@asynccontextmanager
async def _background(work: Coroutine[Any, Any, None]) -> AsyncGenerator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def _intercepted(route: Route, interceptor: Interceptor) -> Route:
    name = f"{route.method} {route.path}"

    async def handler(call: Call) -> object:
        return await interceptor(name, call, route.handler)

    return replace(route, handler=handler)


@asynccontextmanager
async def open_double(host: str, port: int) -> AsyncGenerator[DataflowDouble]:
    """A new run in a temporary folder; it listens on entry but does not respond yet."""
    require_tls_off_loopback(host, None)
    with (
        tempfile.TemporaryDirectory(prefix="penstock-conformance-") as folder,
        _listen(host, port) as listener,
    ):
        root = Path(folder)
        DirectoryStore(root / "store").prepare()
        service = build(run_config(), root / "ledger")
        try:
            yield DataflowDouble(
                service=service,
                store=root / "store",
                listener=listener,
                url=f"http://{host}:{listener.getsockname()[1]}",
                signer=Signer.create(root / "keys", RUN),
            )
        finally:
            service.close()


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port {port}: ports are 0 to 65535")
    try:
        return socket.create_server((host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            why = f"port {port} is taken; choose another with --port, or 0 for a free one"
        else:
            why = f"cannot listen on {host} port {port}: {error.strerror}"
        raise ConfigError(why) from None


def run_config() -> RunConfig:
    """A small run that outlasts any test: two members per group, two groups per batch. Its bound on
    staleness exceeds its number of steps, so no node is ever too stale for a lease."""
    return RunConfig(
        name=RUN,
        models={POLICY: ModelConfig(init="builtin:tiny-qwen3", engine="scripted")},
        sources=(SourceConfig(name="train", task="penstock.tasks.reverse"),),
        reward="penstock.tasks.reverse:reward",
        dataflow=DataflowConfig(lease=LeaseConfig(ttl_s=TTL_S)),
        sampling=SamplingConfig(max_tokens=3),
        algorithm=AlgorithmConfig(num_generations=2),
        training=TrainingConfig(steps=20, groups_per_batch=2, max_staleness=40),
    )


class TruncatedResponse(Response):
    """A lost response: the connection ends in the middle of its body."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"application/msgpack"), (b"content-length", b"64")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"\x83", "more_body": True})
