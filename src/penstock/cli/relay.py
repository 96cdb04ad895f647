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
    from penstock.wire.client import AsyncServiceClient

CONNECT_TIMEOUT_S = 5.0
NULL_DIGEST = "0" * 64
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

    from penstock.cli.relay_options import check_url, num_bytes, print_relay_hint, read_public_key
    from penstock.cli.service_process import address, make_tls
    from penstock.config.base import OBJECT_STORES, is_url
    from penstock.errors import ConfigError
    from penstock.observe import logs
    from penstock.wire.auth import Audience, Verifier
    from penstock.wire.serving import require_tls_off_loopback

    own_token = token or os.environ.pop("PENSTOCK_TOKEN", "")
    if not own_token:
        raise ConfigError(
            "no token: set PENSTOCK_TOKEN or give --token; `penstock token RUN --role relay` "
            "mints one where the run was started"
        )
    tls = make_tls(tls_cert, tls_key)
    require_tls_off_loopback(host, tls)
    verifier = Verifier.from_token(own_token, read_public_key(public_key), audience=Audience.RELAY)
    where = address("", host, port)
    if is_url(url, *OBJECT_STORES, "file"):
        if cache or upstream:
            raise ConfigError(f"{url} is read as it is; give neither --cache nor --upstream")
        source = _open_mirror(url)
    else:
        if cache is None:
            raise ConfigError("give --cache, a folder for the weights that pass through")
        urls = [check_url(each) for each in (*(upstream or ()), url)]
        source = _open_cache(urls, own_token, cache, num_bytes(max_gb, cache, "--max-gb"))
    logs.configure("relay")
    print_relay_hint(*where, tls)

    async def serve() -> None:
        from penstock.weights.serving.server import build
        from penstock.wire.serving import serve as serve_app

        async with source as opened:
            await serve_app(build(opened, verifier), *where, tls)

    uvloop.run(serve())
    return 0


@asynccontextmanager
async def _open_cache(
    urls: Sequence[str], token: str, cache: Path, max_bytes: int
) -> AsyncGenerator[Source]:
    from contextlib import AsyncExitStack

    from penstock.weights.serving.relay import Relay
    from penstock.wire.client import connect

    async with AsyncExitStack() as callers:
        weight_servers = [await callers.enter_async_context(connect(each, token)) for each in urls]
        await _check_reachable(weight_servers)
        yield Relay(weight_servers, cache, max_bytes=max_bytes)


@asynccontextmanager
async def _open_mirror(url: str) -> AsyncGenerator[Source]:
    from penstock.cli.output import note
    from penstock.errors import NotFound, Unreachable
    from penstock.weights.serving.object_store import ObjectSource

    source = ObjectSource(url)
    try:
        await source.manifest(NULL_DIGEST)
    except NotFound:
        pass
    except Unreachable as error:
        note(f"{error}; until {url} answers, this relay has nothing")
    yield source


async def _check_reachable(weight_servers: list[AsyncServiceClient]) -> None:
    """A token that is refused is told at once; a front that is away may come back."""
    from penstock.cli.output import note
    from penstock.errors import ConfigError, Forbidden, Unauthorized, Unreachable

    for weight_server in weight_servers:
        try:
            await weight_server.request(
                "GET", "/openapi.json", deadline_s=CONNECT_TIMEOUT_S, timeout_s=CONNECT_TIMEOUT_S
            )
        except (Forbidden, Unauthorized) as error:
            raise ConfigError(
                f"{error}; a relay needs a token of `penstock token RUN --role relay`"
            ) from None
        except Unreachable as error:
            note(f"{error}; until it comes back this relay has only what is in its cache")
