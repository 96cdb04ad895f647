# SPDX-License-Identifier: Apache-2.0
"""Serves weights to peer nodes: a relay inside the node, which the node itself also pulls through,
so the weight server sends one copy for all of them.

Owns the relay, its two listeners and its folder. Peers verify what they download, and use a token
that is valid only for relays. If this node dies, they fall back to the weight server.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Collection
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from penstock.errors import WeightsError
from penstock.rollout.weight_loader import WeightServerFetcher
from penstock.types import PublishedVersion
from penstock.weights.client import Transfer, open_weight_server
from penstock.weights.serving.relay import Relay
from penstock.weights.serving.server import build
from penstock.weights.update import SERVER_KEPT_S
from penstock.wire.auth import Audience, Verifier
from penstock.wire.client import AsyncServiceClient
from penstock.wire.held_token import Token, held
from penstock.wire.serving import Tls, serve_on_socket

BACKLOG = 1024
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRelayConfig:
    host: str
    port: int
    tls: Tls | None
    public_key: str
    """The run's public key, to verify the tokens of peers."""
    denied_file: Path
    """The run's deny list; the process keeps it up to date."""
    max_bytes: int
    """Disk limit for relayed blobs, in addition to the node's own cache."""


@dataclass(slots=True)
class PeerRelayFetcher:
    """Fetches through the node's own relay; starts serving peers with the first fetch."""

    _token: Token
    _state_dir: Path
    _sharing: PeerRelayConfig
    _: KW_ONLY
    relay: tuple[str, Token] | None = None
    transfer: Transfer = "auto"
    _origin: str = ""
    _callers: list[AsyncServiceClient] = field(default_factory=list[AsyncServiceClient])
    _serving: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])
    _fetch: WeightServerFetcher | None = None

    async def __call__(self, weights_url: str, target: PublishedVersion) -> Path:
        if self._fetch is None or weights_url != self._origin:
            await self.close()
            self._fetch = self._open(weights_url)
        for task in self._serving:
            if task.done():
                raise WeightsError("this node's weight relay has stopped") from task.exception()
        return await self._fetch(weights_url, target)

    def require_unchanged(self, folder: Path) -> None:
        if self._fetch is not None:
            self._fetch.require_unchanged(folder)

    def make_patch(self, base: Path, folder: Path) -> Path | None:
        return None if self._fetch is None else self._fetch.make_patch(base, folder)

    def prune_except(self, keep: Collection[str]) -> None:
        if self._fetch is not None:
            self._fetch.prune_except(keep)

    async def close(self) -> None:
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        self._serving.clear()
        if self._fetch is not None:
            await self._fetch.close()
        self._fetch = None
        for caller in self._callers:
            await caller.close()
        self._callers.clear()

    def _open(self, weights_url: str) -> WeightServerFetcher:
        sharing = self._sharing
        self._origin = weights_url
        if self.relay is not None:
            self._callers.append(open_weight_server(*self.relay))
        self._callers.append(open_weight_server(weights_url, self._token))
        relay = Relay(self._callers, self._state_dir / "relayed", max_bytes=sharing.max_bytes)
        local_listener = socket.create_server((LOOPBACK, 0), backlog=BACKLOG)
        family = socket.AF_INET6 if ":" in sharing.host else socket.AF_INET
        where = (sharing.host, sharing.port)
        peer_listener = socket.create_server(where, family=family, backlog=BACKLOG)
        for audience, listener, tls in (
            (Audience.WEIGHTS, local_listener, None),
            (Audience.RELAY, peer_listener, sharing.tls),
        ):
            verifier = Verifier.from_token(
                held(self._token).value(),
                sharing.public_key,
                audience=audience,
                denied_file=sharing.denied_file,
            )
            app = build(relay, verifier)
            serving = serve_on_socket(app, listener, tls, idle_s=SERVER_KEPT_S)
            self._serving.append(asyncio.create_task(serving))
        url = f"http://{LOOPBACK}:{local_listener.getsockname()[1]}"
        cache, local_relay = self._state_dir / "weights", (url, self._token)
        return WeightServerFetcher(self._token, cache, relay=local_relay, transfer=self.transfer)
