# SPDX-License-Identifier: Apache-2.0
"""Wanted versions become live ones: pull, verify, load, announce.

Whatever goes wrong on the way, the last verified version keeps serving and the next try follows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import structlog

from penstock.errors import EngineError, WeightsError, WireError
from penstock.gateway.gateway import Gateway
from penstock.gateway.renderer import Renderer
from penstock.rollout.membership import Membership
from penstock.rollout.orders import StandingOrders
from penstock.rollout.serving import Engines
from penstock.types import PolicyName, PublishedVersion, Version
from penstock.weights.client import prune, pull
from penstock.wire.client import AsyncCaller

RETRY_S = 2.0
log = structlog.get_logger(__name__)


class Fetch(Protocol):
    """Brings verified snapshots to this machine."""

    async def __call__(self, weights_url: str, wanted: PublishedVersion) -> Path: ...
    def forget_but(self, keep: Collection[str]) -> None: ...


class FrontFetch:
    """From a weights front, through a cache on this machine."""

    def __init__(self, token: str, cache: Path) -> None:
        self._token = token
        self._cache = cache
        self._caller: AsyncCaller | None = None

    async def __call__(self, weights_url: str, wanted: PublishedVersion) -> Path:
        if self._caller is None or self._caller.base_url != weights_url.rstrip("/"):
            await self.close()
            self._caller = AsyncCaller(weights_url, self._token)
        return await pull(self._caller, wanted, self._cache)

    def forget_but(self, keep: Collection[str]) -> None:
        prune(self._cache, keep)

    async def close(self) -> None:
        if self._caller is not None:
            await self._caller.close()


class Loader:
    def __init__(
        self,
        orders: StandingOrders,
        membership: Membership,
        engines: Engines,
        gateway: Gateway,
        fetch: Fetch,
    ) -> None:
        self._orders = orders
        self._membership = membership
        self._engines = engines
        self._gateway = gateway
        self._fetch = fetch
        self._loaded: dict[PolicyName, PublishedVersion] = {}
        self._rendered: set[PolicyName] = set()

    async def run(self) -> None:
        """consumes: wanted versions · produces: live ones, announced
        waits for: an order, its weights, the engine
        woken by: `StandingOrders.follow()`, the time of a retry"""
        while True:
            self._orders.changed.clear()
            for wanted in self._behind():
                await self._try(wanted)
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S if self._behind() else None):
                    await self._orders.changed.wait()

    def _behind(self) -> list[PublishedVersion]:
        return [
            wanted
            for policy, wanted in self._orders.wanted.items()
            if policy in self._engines.policies and self._loaded.get(policy) != wanted
        ]

    async def _try(self, wanted: PublishedVersion) -> None:
        version = Version(
            policy=wanted.policy, incarnation=wanted.incarnation, number=wanted.number
        )
        try:
            folder = await self._fetch(self._orders.weights_url, wanted)
            await self._load(folder, version)
        except (WeightsError, EngineError, WireError) as error:
            kept = [f"{live.incarnation}.{live.number}" for live in self._engines.live()]
            log.error("version not loaded", version=str(version), still_live=kept, error=str(error))
            return
        self._loaded[wanted.policy] = wanted
        live = self._engines.live()
        self._membership.announce(live, is_ready=len(live) == len(self._engines.policies))
        log.info("live", version=str(version))
        keep = [loaded.manifest_digest for loaded in self._loaded.values()]
        await asyncio.to_thread(self._fetch.forget_but, keep)

    async def _load(self, folder: Path, version: Version) -> None:
        # A policy keeps its tokenizer for life, so the first snapshot's renderer serves them all.
        if version.policy not in self._rendered:
            renderer = await asyncio.to_thread(Renderer.load, folder)
            self._gateway.set_renderer(version.policy, renderer)
            self._rendered.add(version.policy)
        await self._engines.load(folder, version)
