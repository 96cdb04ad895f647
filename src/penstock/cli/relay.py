# SPDX-License-Identifier: Apache-2.0
"""`penstock relay`: a cache of a run's weights near to its nodes, with a URL, a token and a public
key and nothing else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.wire.client import AsyncCaller

KNOCK_S = 5.0


def relay(
    url: str,
    /,
    *,
    public_key: str,
    cache: Path,
    port: int,
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
        Address of the run's weights front; `penstock token RUN --role relay` prints it.
    public_key
        The run's public key, or a file with it; the same command prints it.
    cache
        Folder for what passes through; it survives a restart.
    port
        Port to listen on.
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

    from penstock.cli.service import address, make_tls
    from penstock.cli.sharing import check_url, num_bytes, read_public_key, relay_note
    from penstock.errors import ConfigError
    from penstock.observe import logs
    from penstock.wire.auth import Audience, Verifier
    from penstock.wire.listening import check_bind

    own = token or os.environ.pop("PENSTOCK_TOKEN", "")
    if not own:
        raise ConfigError(
            "no token: set PENSTOCK_TOKEN or give --token; `penstock token RUN --role relay` "
            "mints one where the run was started"
        )
    urls = [check_url(each) for each in (*(upstream or ()), url)]
    tls = make_tls(tls_cert, tls_key)
    check_bind(host, tls)
    verifier = Verifier.beside(own, read_public_key(public_key), audience=Audience.RELAY)
    where = address("", host, port)
    room = num_bytes(max_gb, cache, "--max-gb")
    logs.configure("relay")
    relay_note(*where, tls)

    async def serve() -> None:
        from contextlib import AsyncExitStack

        from penstock.weights.fronts.relay import Relay
        from penstock.weights.fronts.server import build
        from penstock.wire.client import connect
        from penstock.wire.listening import serve as serve_app

        async with AsyncExitStack() as callers:
            fronts = [await callers.enter_async_context(connect(each, own)) for each in urls]
            await _knock(fronts)
            await serve_app(build(Relay(fronts, cache, max_bytes=room), verifier), *where, tls)

    uvloop.run(serve())
    return 0


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
