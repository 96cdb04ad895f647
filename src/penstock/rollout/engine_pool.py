# SPDX-License-Identifier: Apache-2.0
"""Makes the engines of one policy look like one: requests survive the loss of an engine, and
weights are swapped a few engines at a time.

Owns routing and the retry of lost answers; `rolling_swap` owns the order of swaps. Does not start
or restart engines: an engine that cannot answer has `live` None, and the loader updates it when it
is back. The rules:

- A lost answer continues on another engine (see `partial_completion`). A rejected request
  (`RequestRejected`) is not retried, nor one that failed MAX_FAILURES times without a new token.
- With no engine available, a request waits for `hold_s`, then fails.
- `live` is the oldest version that any engine serves: a new answer is at least this recent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import structlog

from penstock.dataflow.core.leasing import LiveVersion
from penstock.errors import EngineError, RequestRejected, wrap_errors
from penstock.gateway.generation import Completion, GenerationRequest, TokenChunk
from penstock.rollout.activities import busy_with
from penstock.rollout.engine import (
    CLOSED,
    AnswerLost,
    Engine,
    Patchable,
    Pausable,
    Shareable,
    live_for,
)
from penstock.rollout.partial_completion import PartialCompletion
from penstock.rollout.rolling_swap import PoolStats, Replica, RollingSwap, VerifyEngine
from penstock.rollout.routing import choose
from penstock.rollout.snapshot import Snapshot, read_snapshot
from penstock.types import FinishReason, PolicyName, Version

MAX_PAUSED = 0.25
HOLD_S = 120.0
MAX_FAILURES = 5
"""Most consecutive failures of one request without a new token."""
BACKOFF_S = 0.25
"""How long a request avoids an engine after a failure; doubles with each failure."""
POLL_S = 0.05
"""Recovered engines send no notification, so waiting requests poll."""
log = structlog.get_logger(__name__)


class EnginePool:
    def __init__(
        self, engines: Sequence[Engine], *, max_paused: float = MAX_PAUSED, hold_s: float = HOLD_S
    ) -> None:
        assert engines, "a pool has at least one engine"
        self._replicas = [Replica(engine) for engine in engines]
        self.stats = PoolStats(self._replicas)
        num_paused = max(1, int(max_paused * len(engines)))
        self._rolling_swap = RollingSwap(
            self._replicas, self.stats, num_paused, self._notify_changed
        )
        self._hold_s = hold_s
        self._model: Snapshot | None = None
        self._is_closed = False
        self._changed = asyncio.Event()

    @property
    def live(self) -> Version | None:
        served = [
            version
            for replica in self._replicas
            if (version := replica.serving_version) is not None
        ]
        return min(served, key=lambda version: (version.incarnation, version.number), default=None)

    @property
    def loaded(self) -> set[Path]:
        """Folders that engines of this pool have loaded, and can patch."""
        engines = [replica.engine for replica in self._replicas]
        folders = [engine.loaded for engine in engines if isinstance(engine, Patchable)]
        return {folder for folder in folders if folder is not None}

    async def pause(self) -> int:
        """Sample nothing until `resume`; how many tokens have to be computed again. EngineError if
        an engine cannot be paused."""
        return sum([await _pausable(replica.engine).pause() for replica in self._replicas])

    async def resume(self) -> None:
        for replica in self._replicas:
            await _pausable(replica.engine).resume()

    async def close(self) -> None:
        self._is_closed = True
        self._notify_changed()
        await self._rolling_swap.close()
        for replica in self._replicas:
            await replica.engine.close()

    # --- answers --------------------------------------------------------------------------------

    async def __call__(
        self, request: GenerationRequest, lost: asyncio.Future[Completion] | None = None
    ) -> Completion:
        """`lost`: how the first try ended, made by `start`."""
        if self._model is None and not self._is_closed:
            live_for(request.policy, None)
        try:
            return await self._answer(PartialCompletion(request), request.session, lost)
        except EngineError as error:
            self.stats.num_failed += not isinstance(error, RequestRejected)
            raise

    def start(self, request: GenerationRequest) -> asyncio.Future[Completion] | None:
        """See `Starts`; None where it takes more than asking the only engine."""
        replica = self._only()
        if replica is None or replica.startable is None:
            return None
        try:
            future = replica.startable.start(request)
        except EngineError:
            return None
        replica.num_in_flight += 1
        future.add_done_callback(replica.end_answer)
        return future

    async def _answer(
        self, answer: PartialCompletion, session: str, lost: asyncio.Future[Completion] | None
    ) -> Completion:
        avoided_until: dict[Replica, float] = {}
        num_failures = 0
        why = EngineError("no engine was tried")
        while True:
            replica = await self._choose(session, avoided_until, why)
            before = answer.num_sampled
            try:
                first, lost = lost, None
                completion = await (_generate(replica, answer) if first is None else first)
                if completion.finish is not FinishReason.ABORT:
                    return answer.append_last(completion)
                answer.add_aborted(completion)
                why = EngineError(f"the engine aborted after {answer.num_sampled} tokens")
            except RequestRejected:
                raise
            except EngineError as error:
                why = error
                if isinstance(error, AnswerLost):
                    answer.add_aborted(error.partial)
            assert self._model is not None
            if (completion := answer.completion(self._model)) is not None:
                return completion
            num_new = answer.num_sampled - before if answer.is_stateless else 0
            num_failures = 1 if num_new else num_failures + 1
            if num_failures == MAX_FAILURES or self._is_closed:
                raise why
            avoided_until[replica] = time.monotonic() + BACKOFF_S * 2 ** (num_failures - 1)
            self._prepare_retry(answer, num_new)
            self._report(answer, why)

    def _prepare_retry(self, answer: PartialCompletion, num_new: int) -> None:
        if answer.num_sampled and answer.is_stateless:
            self.stats.num_continued += 1
            self.stats.num_tokens_kept += num_new
        else:
            answer.restart()
            self.stats.num_restarted += 1

    def _report(self, answer: PartialCompletion, why: EngineError) -> None:
        num_lost = self.stats.num_continued + self.stats.num_restarted
        if num_lost & (num_lost - 1) == 0:  # log only 1, 2, 4, 8, … to limit the volume
            kept = answer.num_sampled
            log.warning("answer lost", num_tokens_kept=kept, num_lost=num_lost, error=str(why))

    async def _choose(
        self, session: str, avoided_until: dict[Replica, float], why: EngineError
    ) -> Replica:
        """Pick a serving engine that has not just failed this request; wait if there is none."""
        if not avoided_until and (only := self._only()) is not None:
            return only
        give_up_at = time.monotonic() + self._hold_s
        while not self._is_closed:
            changed, now = self._changed, time.monotonic()
            able = {
                index: replica
                for index, replica in enumerate(self._replicas)
                if replica.serving_version is not None and avoided_until.get(replica, now) <= now
            }
            if able:
                # A swap empties an engine's cache, so waiting for that engine gains nothing.
                steady = {
                    i: replica for i, replica in able.items() if not replica.is_swapping
                } or able
                loads = {index: replica.num_in_flight for index, replica in steady.items()}
                return self._replicas[choose(session, loads)]
            if now >= give_up_at:
                raise EngineError(
                    f"all {len(self._replicas)} engines were unavailable for {self._hold_s:g} s; "
                    f"last error: {why}"
                )
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await changed.wait()
        raise EngineError(CLOSED)

    def _only(self) -> Replica | None:
        """The only engine, if it serves."""
        only = self._replicas[0]
        is_ready = len(self._replicas) == 1 and not self._is_closed
        return only if is_ready and only.serving_version is not None else None

    def _notify_changed(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # --- weights --------------------------------------------------------------------------------

    def needs_load(self, version: Version) -> bool:
        """Whether some engine neither serves this version nor is loading it."""
        return any(
            replica.serving_version != version and replica.starting is None
            for replica in self._replicas
        )

    async def load(
        self, folder: Path, version: Version, *, verify: VerifyEngine | None = None
    ) -> None:
        """Load the version. Raises EngineError unless all serving engines have it; a retry skips
        the engines that are up to date."""
        with wrap_errors(EngineError, f"snapshot of {version} in {folder}"):
            self._model = await asyncio.to_thread(read_snapshot, folder)
        errors = await self._rolling_swap.load(folder, version, verify)
        if self.live != version:
            reasons = "; ".join(map(str, errors)) or "no engine is alive"
            raise EngineError(
                f"load failed on {len(errors)} of {len(self._replicas)} engines: {reasons}"
            )


def _pausable(engine: Engine) -> Pausable:
    if not isinstance(engine, Pausable):
        raise EngineError(
            f"{type(engine).__name__} cannot be paused, so its resource cannot train as well; take "
            "the tag train away from this node, or use the engine hf"
        )
    return engine


async def _generate(replica: Replica, answer: PartialCompletion) -> Completion:
    is_current = True

    def feed(chunk: TokenChunk) -> None:
        if is_current:  # an abandoned engine may still send chunks
            answer.feed(chunk)

    needs_chunks = answer.is_streamed or not replica.returns_lost
    replica.num_in_flight += 1
    try:
        with wrap_errors(EngineError, "generate"):
            return await replica.engine(answer.next_request(feed if needs_chunks else None))
    finally:
        is_current = False
        replica.num_in_flight -= 1


class EnginePools:
    """The node's engines, one pool per policy, behind a single `Generate` for the gateway. No
    version is live until the first `load()`, which also waits for an engine's imports.

    Policies that are adapters of one model share engines: each policy's pool holds views of the
    same processes, with separate live versions."""

    def __init__(
        self,
        policies: Sequence[PolicyName],
        make: Callable[[], Engine],
        *,
        num_engines: int = 1,
        max_paused: float = MAX_PAUSED,
        sharing: Sequence[Sequence[PolicyName]] = (),
    ) -> None:
        """`sharing`: sets of policies with a common base. Other policies get separate engines."""
        unshared = set(policies).difference(*sharing)
        self._by_policy: dict[PolicyName, EnginePool] = {}
        for shared in (*sharing, *((policy,) for policy in policies if policy in unshared)):
            views = [_engine_views(make, len(shared)) for _ in range(num_engines)]
            for policy, engines in zip(shared, zip(*views, strict=True), strict=True):
                self._by_policy[policy] = EnginePool(engines, max_paused=max_paused)

    def add(self, others: EnginePools) -> None:
        """Take over the pools of other policies."""
        self._by_policy |= others._by_policy

    @property
    def policies(self) -> frozenset[PolicyName]:
        return frozenset(self._by_policy)

    async def __call__(
        self, request: GenerationRequest, lost: asyncio.Future[Completion] | None = None
    ) -> Completion:
        what = f"engine of policy {request.policy}"
        with busy_with(what), wrap_errors(EngineError, f"{what}, generate"):
            return await self._by_policy[request.policy](request, lost)

    def start(
        self, request: GenerationRequest, lost: asyncio.Future[Completion] | None = None
    ) -> asyncio.Future[Completion]:
        """See `Starts`."""
        started = self._by_policy[request.policy].start(request) if lost is None else None
        return started or asyncio.ensure_future(self(request, lost))

    async def load(
        self, folder: Path, version: Version, *, verify: VerifyEngine | None = None
    ) -> None:
        """See `EnginePool.load`."""
        with wrap_errors(EngineError, f"engine of policy {version.policy}, load of {version}"):
            await self._by_policy[version.policy].load(folder, version, verify=verify)

    async def pause(self) -> int:
        """See `EnginePool.pause`."""
        return sum([await pool.pause() for pool in self._by_policy.values()])

    async def resume(self) -> None:
        for pool in self._by_policy.values():
            await pool.resume()

    def needs_load(self, version: Version) -> bool:
        return self._by_policy[version.policy].needs_load(version)

    def live(self) -> tuple[LiveVersion, ...]:
        """The oldest version that is served, for each policy."""
        served = (pool.live for pool in self._by_policy.values())
        return tuple(
            LiveVersion(policy=v.policy, incarnation=v.incarnation, number=v.number)
            for v in served
            if v is not None
        )

    def loaded(self, policy: PolicyName) -> set[Path]:
        """Folders from which a patch would save the policy's engines a full load."""
        return self._by_policy[policy].loaded

    def stats(self) -> dict[PolicyName, PoolStats]:
        return {policy: pool.stats for policy, pool in self._by_policy.items()}

    async def close(self) -> None:
        for pool in self._by_policy.values():
            await pool.close()


def _engine_views(make: Callable[[], Engine], num_policies: int) -> list[Engine]:
    """One engine as seen by each of its policies; engines that cannot share are built separately.

    Only engines that hold weights are `Shareable`."""
    first = make()
    others = range(num_policies - 1)
    if isinstance(first, Shareable):
        return [first, *(first.share() for _ in others)]
    return [first, *(make() for _ in others)]
