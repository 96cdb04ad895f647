# SPDX-License-Identifier: Apache-2.0
"""Wanted versions become live ones: pull, verify, load, probe, announce.

Each engine is probed by itself, right after its load and before new requests come to it. Announced
is the oldest version that an engine of the policy serves. An engine that died is no part of that;
when it is back it is loaded beside the others.

Whatever goes wrong on the way, the last verified version keeps serving and the next try follows.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import structlog

from penstock.errors import EngineError, WeightsError, WireError, wrap_errors
from penstock.gateway.gateway import Gateway
from penstock.gateway.generation import Completion
from penstock.gateway.renderer import Renderer
from penstock.rollout.engine_pools import EnginePools
from penstock.rollout.engines.base import Engine
from penstock.rollout.membership import Membership
from penstock.rollout.orders import NodeOrders
from penstock.types import (
    PolicyName,
    PublishedVersion,
    SamplingSpec,
    Version,
    view_ids,
    view_log_probs,
)
from penstock.weights.client import Puller, Transfer
from penstock.wire.client import AsyncServiceClient

RETRY_S = 2.0
PROBE_TEXT = "What is a penstock?"
PROBE_TOKENS = 4
"""Of the question and of the answer, at most."""
PROBE_S = 60.0
log = structlog.get_logger(__name__)


class WeightFetcher(Protocol):
    """Brings verified snapshots to this machine."""

    async def __call__(self, weights_url: str, wanted: PublishedVersion) -> Path: ...

    def require_unchanged(self, folder: Path) -> None:
        """WeightsError when a snapshot is not what it was when it was verified."""
        ...

    def prune_except(self, keep: Collection[str]) -> None: ...
    async def close(self) -> None: ...


class WeightServerFetcher:
    """From a weights front, or a relay before it, through a cache on this machine."""

    def __init__(
        self,
        token: str,
        cache: Path,
        *,
        relay: tuple[str, str] | None = None,
        transfer: Transfer = "auto",
    ) -> None:
        """`relay` is a URL and the token shown there."""
        self._token = token
        self._puller = Puller(cache, transfer=transfer)
        self._caller: AsyncServiceClient | None = None
        self._relays = [] if relay is None else [AsyncServiceClient(*relay)]

    async def __call__(self, weights_url: str, wanted: PublishedVersion) -> Path:
        if self._caller is None or self._caller.base_url != weights_url.rstrip("/"):
            if self._caller is not None:
                await self._caller.close()
            self._caller = AsyncServiceClient(weights_url, self._token)
        return await self._puller.pull([*self._relays, self._caller], wanted)

    def require_unchanged(self, folder: Path) -> None:
        self._puller.require_unchanged(folder)

    def prune_except(self, keep: Collection[str]) -> None:
        self._puller.prune(keep)

    async def close(self) -> None:
        for caller in (*self._relays, self._caller):
            if caller is not None:
                await caller.close()


class Loader:
    def __init__(
        self,
        orders: NodeOrders,
        membership: Membership,
        engines: EnginePools,
        gateway: Gateway,
        fetch: WeightFetcher,
    ) -> None:
        self._orders = orders
        self._membership = membership
        self._engines = engines
        self._gateway = gateway
        self._fetch = fetch
        self._loaded: dict[PolicyName, PublishedVersion] = {}
        self._attempted: dict[PolicyName, PublishedVersion] = {}
        self._probes: dict[PolicyName, Sequence[int]] = {}
        self._num_probes = 0

    async def run(self) -> None:
        """consumes: wanted versions · produces: live ones, announced
        waits for: an order, its weights, the engines
        woken by: `NodeOrders.follow()`, the time to look at the engines again"""
        while True:
            self._orders.changed.clear()
            for wanted in self._versions_to_load():
                await self._try(wanted)
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S):
                    await self._orders.changed.wait()

    def _versions_to_load(self) -> list[PublishedVersion]:
        return [
            wanted
            for policy, wanted in self._orders.wanted.items()
            if policy in self._engines.policies
            and (self._loaded.get(policy) != wanted or self._engines.needs_load(version_of(wanted)))
        ]

    async def _try(self, wanted: PublishedVersion) -> None:
        version = version_of(wanted)
        if self._attempted.get(wanted.policy, wanted) != wanted:
            await self._prune_cache()  # what was fetched of a version that nobody wants any more
        self._attempted[wanted.policy] = wanted
        try:
            folder = await self._fetch(self._orders.weights_url, wanted)
            await self._load(folder, version)
        except (WeightsError, EngineError, WireError) as error:
            kept = [f"{live.incarnation}.{live.number}" for live in self._engines.live()]
            log.error("version not loaded", version=str(version), still_live=kept, error=str(error))
            return
        if self._loaded.get(wanted.policy) != wanted:
            log.info("live", version=str(version))
        self._loaded[wanted.policy] = wanted
        live = self._engines.live()
        self._membership.announce(live, is_ready=len(live) == len(self._engines.policies))
        del self._attempted[wanted.policy]
        await self._prune_cache()

    async def _prune_cache(self) -> None:
        """All weights but those that are loaded."""
        keep = [loaded.manifest_digest for loaded in self._loaded.values()]
        await asyncio.to_thread(self._fetch.prune_except, keep)

    async def _load(self, folder: Path, version: Version) -> None:
        # A policy keeps its tokenizer for life, so the first snapshot's renderer serves them all.
        if version.policy not in self._probes:
            renderer = await asyncio.to_thread(Renderer.load, folder)
            self._gateway.set_renderer(version.policy, renderer)
            self._probes[version.policy] = renderer.encode(PROBE_TEXT)[:PROBE_TOKENS] or (0,)

        async def verify(engine: Engine, version: Version) -> None:
            try:
                self._fetch.require_unchanged(folder)
            except WeightsError as error:
                raise EngineError(f"load of {version}: {error}; it is not announced") from error
            await self._probe(engine, version)

        await self._engines.load(folder, version, verify=verify)

    async def _probe(self, engine: Engine, version: Version) -> None:
        """One fixed prompt: weights that are what they should be may still not work here."""
        self._num_probes += 1  # a seed matters only to an engine that draws its failures
        greedy = SamplingSpec(temperature=0.0, max_tokens=PROBE_TOKENS, seed=self._num_probes)
        prompt_ids = self._probes[version.policy]
        with wrap_errors(EngineError, f"probe of {version}"):
            async with asyncio.timeout(PROBE_S):
                answer = await engine(prompt_ids, greedy, policy=version.policy, session="probe")
        if (why := probe_error(answer, version)) is not None:
            raise EngineError(f"probe of {version}: {why}; it is not announced")


def version_of(wanted: PublishedVersion) -> Version:
    return Version(policy=wanted.policy, incarnation=wanted.incarnation, number=wanted.number)


def probe_error(answer: Completion, version: Version) -> str | None:
    """What is wrong with the answer to a probe, if anything."""
    named = {(span.incarnation, span.number) for span in answer.spans}
    if named != {(version.incarnation, version.number)}:
        return f"its tokens are from {sorted(named)}"
    logprobs = view_log_probs(answer.logprobs).tolist()
    if len(logprobs) != len(view_ids(answer.sampled_ids)):
        return f"{len(view_ids(answer.sampled_ids))} tokens have {len(logprobs)} log-probs"
    if not all(map(math.isfinite, logprobs)):
        return f"log-probs are {logprobs}"
    return None
