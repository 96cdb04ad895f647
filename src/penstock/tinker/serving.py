# SPDX-License-Identifier: Apache-2.0
"""Opens the service of a Tinker server's folder, and serves it on a socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

import structlog
from starlette.applications import Starlette

from penstock.config import LoraConfig
from penstock.hub import parse_hub_model
from penstock.tinker.folder import BASE_ADAPTER, TinkerFolder
from penstock.tinker.limits import Limits
from penstock.tinker.memory import max_answers
from penstock.tinker.models import open_base
from penstock.tinker.samplers import Samplers
from penstock.tinker.server import build
from penstock.tinker.service import TinkerService
from penstock.wire.serving import Tls, require_tls_off_loopback, server

log = structlog.get_logger(__name__)
PRUNE_S = 3600.0
LOOK_S = 60.0


@asynccontextmanager
async def open_service(
    folder: TinkerFolder, *, limits: Limits | None = None, snapshot_every: int = 16
) -> AsyncGenerator[TinkerService]:
    """The service of a prepared and locked folder, with what it had accepted."""
    found = folder.read()
    base = await asyncio.to_thread(open_base, folder.base)
    zeros = folder.path / BASE_ADAPTER
    if not zeros.exists():
        (name, *_) = base.linear_names()
        config = LoraConfig(rank=1, targets=(name,))
        await asyncio.to_thread(base.write_adapter, zeros, config, 0)
    service = TinkerService(
        folder.path,
        base,
        Samplers(
            threads=found.threads,
            is_deterministic=found.is_deterministic,
            num_answers=max_answers(base.window * base.token_bytes),
        ),
        model_name=found.model,
        threads=found.threads,
        snapshot_every=snapshot_every,
        limits=limits,
    )
    try:
        await service.start()
        yield service
    finally:
        await service.close()


def app_of(folder: TinkerFolder, service: TinkerService) -> Starlette:
    found = folder.read()
    is_named = parse_hub_model(found.init) is not None
    tokenizer = found.init if is_named else str(folder.base.absolute())
    return build(service, folder.verifier(), tokenizer=tokenizer)


async def serve(
    folder: TinkerFolder,
    listener: socket.socket,
    *,
    tls: Tls | None = None,
    limits: Limits | None = None,
    snapshot_every: int = 16,
) -> None:
    """Until SIGTERM or SIGINT; raises what ended it otherwise, such as a full disk."""
    host, port, *_ = listener.getsockname()
    require_tls_off_loopback(host, tls)
    async with open_service(folder, limits=limits, snapshot_every=snapshot_every) as service:
        served = server(app_of(folder, service), host, port, tls)
        serving = asyncio.create_task(served.serve(sockets=[listener]))
        pruning = asyncio.create_task(_prune(service))
        ends = {serving, pruning, service.failed}
        while not any(one.done() for one in ends):
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED, timeout=LOOK_S)
        served.should_exit = True
        await serving
        pruning.cancel()
        with suppress(asyncio.CancelledError):
            await pruning
        if service.failed.done():
            await service.failed


async def _prune(service: TinkerService) -> None:
    while True:
        try:
            await service.prune()
        except OSError as error:
            log.warning("could not delete what is over, trying again later", error=str(error))
        await asyncio.sleep(PRUNE_S)
