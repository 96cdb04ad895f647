# SPDX-License-Identifier: Apache-2.0
"""Makes target versions live: fetch, verify, load, probe, announce.

Each engine is probed right after its load, before it gets new requests. The node announces the
oldest version served by any engine of the policy. Dead engines are not counted; a restarted one is
loaded in the background.

If any step fails, the last verified version keeps serving, and the step is retried.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import structlog

from penstock.errors import EngineError, WeightsError, WireError, wrap_errors
from penstock.gateway.gateway import Gateway
from penstock.gateway.generation import Completion, GenerationRequest
from penstock.gateway.template_probe import load_probed
from penstock.rollout.activities import Activities
from penstock.rollout.engine import Engine
from penstock.rollout.engine_pool import EnginePools
from penstock.rollout.membership import Membership, NodeOrders
from penstock.rollout.pinned_engines import PinnedEngines
from penstock.rollout.rolling_swap import VerifyEngine
from penstock.types import (
    PolicyName,
    PublishedVersion,
    SamplingSpec,
    Version,
    view_ids,
    view_log_probs,
)
from penstock.weights.client import Puller, Transfer, open_weight_server
from penstock.wire.client import AsyncServiceClient
from penstock.wire.held_token import Token

RETRY_S = 2.0
PROBE_TEXT = "What is a penstock?"
PROBE_TOKENS = 4
"""Most tokens of the prompt and of the answer."""
PROBE_S = 60.0
log = structlog.get_logger(__name__)


class WeightFetcher(Protocol):
    async def __call__(self, weights_url: str, target: PublishedVersion) -> Path: ...

    def require_unchanged(self, folder: Path) -> None:
        """Raise WeightsError if a snapshot has changed since it was verified."""
        ...

    def make_patch(self, base: Path, folder: Path) -> object:
        """Write the patch between two fetched versions, if there can be one. Blocking."""
        ...

    def prune_except(self, keep: Collection[str]) -> None: ...
    async def close(self) -> None: ...


class WeightServerFetcher:
    """Fetches from the weight server, or from a relay first, through a local cache."""

    def __init__(
        self,
        token: Token,
        cache: Path,
        *,
        relay: tuple[str, Token] | None = None,
        transfer: Transfer = "auto",
        store_root: Path | None = None,
    ) -> None:
        """`relay` is a URL and the token to use there; `store_root` as in `Puller`."""
        self._token = token
        self._puller = Puller(cache, transfer=transfer, store_root=store_root)
        self._caller: AsyncServiceClient | None = None
        self._relays = [] if relay is None else [open_weight_server(*relay)]

    async def __call__(self, weights_url: str, target: PublishedVersion) -> Path:
        if self._caller is None or self._caller.base_url != weights_url.rstrip("/"):
            if self._caller is not None:
                await self._caller.close()
            self._caller = open_weight_server(weights_url, self._token)
        return await self._puller.pull([*self._relays, self._caller], target)

    def require_unchanged(self, folder: Path) -> None:
        self._puller.require_unchanged(folder)

    def make_patch(self, base: Path, folder: Path) -> Path | None:
        return self._puller.make_patch(base, folder)

    def prune_except(self, keep: Collection[str]) -> None:
        self._puller.prune(keep)

    async def close(self) -> None:
        for caller in (*self._relays, self._caller):
            if caller is not None:
                await caller.close()


_Versions = dict[PolicyName, PublishedVersion]


@dataclass(slots=True)
class Loader:
    _orders: NodeOrders
    _membership: Membership
    _engines: EnginePools
    _gateway: Gateway
    _fetch: WeightFetcher
    _pinned: PinnedEngines | None = None
    """Engines for evaluations; None if this node does none."""
    _on_first_pinned: Callable[[], None] | None = None
    """Called once, when the engines of the first evaluation answer."""
    activities: Activities = field(default_factory=Activities)
    """Where its waits are shown."""
    _loaded: _Versions = field(default_factory=_Versions)
    _attempted: _Versions = field(default_factory=_Versions)
    _probes: dict[PolicyName, Sequence[int]] = field(
        default_factory=dict[PolicyName, Sequence[int]]
    )
    _num_probes: int = 0
    _is_paused: bool = False
    """Whether the engines have stopped, as ordered."""
    _has_tried: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait_until_current(self) -> None:
        """Wait until every version that the orders name is live; failed loads are retried."""
        while self._versions_to_load():
            self._has_tried.clear()
            await self._has_tried.wait()

    async def run(self) -> None:
        """consumes: target versions · produces: live ones, announced
        waits for: an order, its weights, the engines
        woken by: `NodeOrders.apply()`, the timer for the next check of the engines"""
        while True:
            self._orders.changed.clear()
            await self._follow_pause()
            for target in () if self._is_paused else self._versions_to_load():
                await self._try(target)
                self._has_tried.set()
            if self._pinned is not None:
                await self._update_pinned(self._pinned)
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S):
                    await self._orders.changed.wait()

    async def _follow_pause(self) -> None:
        """Stop the engines, or let them go on, as ordered. Between two loads, which need them."""
        is_wanted = bool(self._orders.pause)
        if is_wanted == self._is_paused:
            return
        began_at = time.monotonic()
        try:
            num_tokens = await self._engines.pause() if is_wanted else 0
            if not is_wanted:
                await self._engines.resume()
        except EngineError as error:
            log.error("engines not paused", trigger=self._orders.pause, error=str(error))
            return
        log.info(
            "engines paused" if is_wanted else "engines resumed",
            trigger=self._orders.pause,
            seconds=round(time.monotonic() - began_at, 4),
            num_tokens=num_tokens,
        )
        self._is_paused = is_wanted
        self._membership.announce_pause(is_wanted)

    def _versions_to_load(self) -> list[PublishedVersion]:
        return [
            target
            for policy, target in self._orders.targets.items()
            if policy in self._engines.policies
            and (self._loaded.get(policy) != target or self._engines.needs_load(version_of(target)))
        ]

    async def _try(self, target: PublishedVersion) -> None:
        version = version_of(target)
        if self._attempted.get(target.policy, target) != target:
            await self._prune_cache()  # delete partial downloads of the previous target
        self._attempted[target.policy] = target
        try:
            with self.activities.busy("the weight server", f"version {version}"):
                folder = await self._fetch(self._orders.weights_url, target)
            with self.activities.busy(f"the engine of {target.policy}, load", f"version {version}"):
                await self._load(folder, version)
        except (WeightsError, EngineError, WireError) as error:
            kept = [f"{live.incarnation}.{live.number}" for live in self._engines.live()]
            log.error("load failed", version=str(version), still_live=kept, error=str(error))
            return
        if self._loaded.get(target.policy) != target:
            log.info("version live", version=str(version))
        self._loaded[target.policy] = target
        live = self._engines.live()
        self._membership.announce(live, is_ready=len(live) == len(self._engines.policies))
        del self._attempted[target.policy]
        await self._prune_cache()

    async def _update_pinned(self, pinned: PinnedEngines) -> None:
        """Load the versions of the evaluation in progress, or end the engines of the last one.
        After the newest versions, which have priority; not while its attempts run."""
        targets = self._orders.pinned
        if pinned.num_running and targets != pinned.loaded:
            return  # tried again at the next check
        if not targets:
            if pinned.loaded:
                await pinned.free()
                self._membership.announce_pinned(())
                await self._prune_cache()
            return
        policies = [target.policy for target in targets]
        for target in targets:
            version = version_of(target)
            if not pinned.needs_load(target, version):
                continue
            try:
                folder = await self._fetch(self._orders.weights_url, target)
                verify = await self._prepare(folder, version, (self._gateway, pinned.gateway))
                await pinned.load(folder, version, policies, verify=verify)
            except (WeightsError, EngineError, WireError) as error:
                log.error("load for an evaluation failed", version=str(version), error=str(error))
                return
            log.info("version pinned for an evaluation", version=str(version))
        if pinned.loaded != targets:
            pinned.loaded = targets
            await self._prune_cache()
        if (live := pinned.live()) != self._membership.pinned:
            self._membership.announce_pinned(live)
            if self._on_first_pinned is not None:
                self._on_first_pinned()
                self._on_first_pinned = None

    async def _prune_cache(self) -> None:
        """Delete all cached weights except the loaded ones."""
        keep = [loaded.manifest_digest for loaded in self._loaded.values()]
        keep += [pinned.manifest_digest for pinned in self._orders.pinned if self._pinned]
        await asyncio.to_thread(self._fetch.prune_except, keep)

    async def _load(self, folder: Path, version: Version) -> None:
        verify = await self._prepare(folder, version, (self._gateway,))
        for base in self._engines.loaded(version.policy) - {folder}:
            try:
                await asyncio.to_thread(self._fetch.make_patch, base, folder)
            except WeightsError as error:
                log.warning("no patch, full files are loaded", base=base.name, error=str(error))
        await self._engines.load(folder, version, verify=verify)

    async def _prepare(
        self, folder: Path, version: Version, gateways: Sequence[Gateway]
    ) -> VerifyEngine:
        """Give the gateways a renderer if they have none; returns what checks a loaded engine."""
        # A policy never changes its tokenizer, so the first snapshot's renderer fits all versions.
        lacking = [gateway for gateway in gateways if not gateway.has_renderer(version.policy)]
        if lacking:
            renderer = await asyncio.to_thread(load_probed, folder)
            for gateway in lacking:
                gateway.set_renderer(version.policy, renderer)
            self._probes[version.policy] = renderer.encode(PROBE_TEXT)[:PROBE_TOKENS] or (0,)

        async def verify(engine: Engine, version: Version) -> None:
            try:
                self._fetch.require_unchanged(folder)
            except WeightsError as error:
                raise EngineError(f"load of {version}: {error}; not announced") from error
            await self._probe(engine, version)

        return verify

    async def _probe(self, engine: Engine, version: Version) -> None:
        """Generate from a fixed prompt: verified weights may still fail on this engine."""
        self._num_probes += 1  # the seed matters only to engines that simulate failures
        greedy = SamplingSpec(temperature=0.0, max_tokens=PROBE_TOKENS, seed=self._num_probes)
        request = GenerationRequest(
            self._probes[version.policy], greedy, policy=version.policy, session="probe"
        )
        with wrap_errors(EngineError, f"probe of {version}"):
            async with asyncio.timeout(PROBE_S):
                answer = await engine(request)
        if (why := probe_error(answer, version)) is not None:
            raise EngineError(f"probe of {version}: {why}; not announced")


def version_of(target: PublishedVersion) -> Version:
    return Version(policy=target.policy, incarnation=target.incarnation, number=target.number)


def probe_error(answer: Completion, version: Version) -> str | None:
    """Why the answer to a probe is wrong; None if it is right."""
    named = {(span.incarnation, span.number) for span in answer.spans}
    if named != {(version.incarnation, version.number)}:
        return f"its tokens were sampled by {sorted(named)}"
    logprobs = view_log_probs(answer.logprobs).tolist()
    if len(logprobs) != len(view_ids(answer.sampled_ids)):
        return f"{len(view_ids(answer.sampled_ids))} tokens have {len(logprobs)} log-probs"
    if not all(map(math.isfinite, logprobs)):
        return f"log-probs are {logprobs}"
    return None
