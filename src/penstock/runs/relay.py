# SPDX-License-Identifier: Apache-2.0
"""Opens the weights that a relay serves: a cache in front of weight servers, or the run's mirror.

A bad token fails at startup. A weight server that is unreachable is only a warning; it may come
back.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from penstock.errors import ConfigError, Forbidden, NotFound, Unauthorized, Unreachable
from penstock.weights.serving.object_store import ObjectSource
from penstock.weights.serving.relay import Relay
from penstock.weights.serving.sources import Source
from penstock.wire.client import AsyncServiceClient, connect
from penstock.wire.held_token import Token

CONNECT_TIMEOUT_S = 5.0
UNKNOWN_DIGEST = "0" * 64
"""A digest that no manifest has, to test whether a mirror answers."""

Warn = Callable[[str], None]


@asynccontextmanager
async def open_cache(
    urls: Sequence[str], token: Token, cache: Path, *, max_bytes: int, warn: Warn
) -> AsyncGenerator[Source]:
    """A cache on disk in front of these weight servers, in order of preference."""
    async with AsyncExitStack() as clients:
        weight_servers = [await clients.enter_async_context(connect(url, token)) for url in urls]
        for weight_server in weight_servers:
            await _check_reachable(weight_server, warn)
        yield Relay(weight_servers, cache, max_bytes=max_bytes)


@asynccontextmanager
async def open_mirror(url: str, *, warn: Warn) -> AsyncGenerator[Source]:
    """The run's mirror in object storage, read directly."""
    source = ObjectSource(url)
    try:
        await source.manifest(UNKNOWN_DIGEST)
    except NotFound:
        pass
    except Unreachable as error:
        warn(f"{error}; this relay has no weights until {url} answers")
    yield source


async def _check_reachable(weight_server: AsyncServiceClient, warn: Warn) -> None:
    try:
        await weight_server.request(
            "GET", "/openapi.json", deadline_s=CONNECT_TIMEOUT_S, timeout_s=CONNECT_TIMEOUT_S
        )
    except (Forbidden, Unauthorized) as error:
        raise ConfigError(
            f"{error}; a relay needs a token from `penstock token RUN --role relay`"
        ) from None
    except Unreachable as error:
        warn(f"{error}; until it answers, this relay serves only its cache")
