# SPDX-License-Identifier: Apache-2.0
"""`penstock relay`: a front of a run's weights near to its nodes, over a cache or over the run's
mirror, with a URL, a token and a public key and nothing else."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.weights.serving.sources import Source
    from penstock.wire.client import AsyncCaller

KNOCK_S = 5.0
NOBODY = "0" * 64
"""A digest of nothing."""


def relay(
    url: str,
    /,
    *,
    public_key: str,
    port: int,
    cache: Path | None = None,
    host: str = "127.0.0.1",
    upstream: list[str] | None = None,
    max_gb: float = 100.0,
    token: str | None = None,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
) -> int:
    """Pass weights on until SIGTERM; what was fetched once is served to any number of nodes.

    Parameters
    ----------
    url
        Address of the run's weights front; `penstock token RUN --role relay` prints it. Or the
        run's `weights.mirror`, as s3://bucket/run, with credentials in the environment.
    public_key
        The run's public key, or a file with it; the same command prints it.
    port
        Port to listen on.
    cache
        Folder for what passes through; it survives a restart. Not with a mirror.
    host
        Address to listen on; beyond this machine only with TLS.
    upstream
        Address of another relay to ask before the front; may be given several times.
    max_gb
        Most that the cache may take, in GB; what was used longest ago goes first.
    token
        A relay token; better given as PENSTOCK_TOKEN, which other users cannot see.
    tls_cert
        Certificate file, to listen beyond this machine.
    tls_key
        Its key file.
    """
    import uvloop

    from penstock.cli.relay_options import check_url, num_bytes, read_public_key, relay_note
    from penstock.cli.service_process import address, make_tls
    from penstock.config.base import OBJECT_STORES, is_url
    from penstock.errors import ConfigError
    from penstock.observe import logs
    from penstock.wire.auth import Audience, Verifier
    from penstock.wire.serving import check_bind

    own = token or os.environ.pop("PENSTOCK_TOKEN", "")
    if not own:
        raise ConfigError(
            "no token: set PENSTOCK_TOKEN or give --token; `penstock token RUN --role relay` "
            "mints one where the run was started"
        )
    tls = make_tls(tls_cert, tls_key)
    check_bind(host, tls)
    verifier = Verifier.beside(own, read_public_key(public_key), audience=Audience.RELAY)
    where = address("", host, port)
    if is_url(url, *OBJECT_STORES, "file"):
        if cache or upstream:
            raise ConfigError(f"{url} is read as it is; give neither --cache nor --upstream")
        source = _mirror(url)
    else:
        if cache is None:
            raise ConfigError("give --cache, a folder for the weights that pass through")
        urls = [check_url(each) for each in (*(upstream or ()), url)]
        source = _cached(urls, own, cache, num_bytes(max_gb, cache, "--max-gb"))
    logs.configure("relay")
    relay_note(*where, tls)

    async def serve() -> None:
        from penstock.weights.serving.server import build
        from penstock.wire.serving import serve as serve_app

        async with source as opened:
            await serve_app(build(opened, verifier), *where, tls)

    uvloop.run(serve())
    return 0


@asynccontextmanager
async def _cached(
    urls: Sequence[str], token: str, cache: Path, room: int
) -> AsyncGenerator[Source]:
    from contextlib import AsyncExitStack

    from penstock.weights.serving.relay import Relay
    from penstock.wire.client import connect

    async with AsyncExitStack() as callers:
        fronts = [await callers.enter_async_context(connect(each, token)) for each in urls]
        await _knock(fronts)
        yield Relay(fronts, cache, max_bytes=room)


@asynccontextmanager
async def _mirror(url: str) -> AsyncGenerator[Source]:
    from penstock.cli.output import note
    from penstock.errors import NotFound, Unreachable
    from penstock.weights.serving.object_store import ObjectSource

    source = ObjectSource(url)
    try:
        await source.manifest(NOBODY)
    except NotFound:
        pass
    except Unreachable as error:
        note(f"{error}; until {url} answers, this relay has nothing")
    yield source


async def _knock(fronts: list[AsyncCaller]) -> None:
    """A token that is refused is told at once; a front that is away may come back."""
    from penstock.cli.output import note
    from penstock.errors import ConfigError, Forbidden, Unauthorized, Unreachable

    for front in fronts:
        try:
            await front.request("GET", "/openapi.json", deadline_s=KNOCK_S, timeout_s=KNOCK_S)
        except (Forbidden, Unauthorized) as error:
            raise ConfigError(
                f"{error}; a relay needs a token of `penstock token RUN --role relay`"
            ) from None
        except Unreachable as error:
            note(f"{error}; until it comes back this relay has only what is in its cache")
