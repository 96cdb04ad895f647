# SPDX-License-Identifier: Apache-2.0
"""Rolling weight swap: loads a new version into the engines of a pool, a few at a time.

An engine serves while it is alive and its live version has passed verification. A swap takes at
most `max_paused` serving engines out of routing at the same time.

- Load fails: the engine keeps serving its old version, as its spans show, until a later load
  succeeds.
- Verification fails: the engine stops serving, and the version is not loaded into further engines
  until one engine has verified it.
- Idle engines load in the background; the others do not wait for them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from penstock.errors import EngineError, wrap_errors
from penstock.rollout.engine import Engine, Startable, returns_lost
from penstock.types import Version

MAX_SWAP_S = 1000
"""How many of the newest swap durations are kept."""
log = structlog.get_logger(__name__)

VerifyEngine = Callable[[Engine, Version], Awaitable[None]]
"""Raises EngineError if the engine does not generate with this version."""


class VerificationFailed(EngineError):
    """The version was loaded but failed verification."""


@dataclass(slots=True, eq=False)
class Replica:
    engine: Engine
    verified: Version | None = None
    num_in_flight: int = 0
    is_swapping: bool = False
    starting: asyncio.Task[EngineError | None] | None = None
    """Background load of an idle engine."""
    returns_lost: bool = field(init=False)
    startable: Startable | None = field(init=False)

    def __post_init__(self) -> None:
        engine = self.engine
        self.returns_lost = returns_lost(engine)
        self.startable = engine if self.returns_lost and isinstance(engine, Startable) else None

    def end_answer(self, _: object) -> None:
        self.num_in_flight -= 1

    @property
    def serving_version(self) -> Version | None:
        live = self.engine.live
        return live if live is not None and live == self.verified else None


@dataclass(slots=True)
class PoolStats:
    """State of a pool now, and its counters since the start."""

    _replicas: Sequence[Replica]
    num_swaps: int = 0
    """Swaps of serving engines; the first load of an engine is not counted."""
    peak_paused: int = 0
    """Most engines out of routing for a swap at the same time."""
    swap_s: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_SWAP_S))
    """How long each of the newest swaps kept its engine out of routing, including load and
    verification; the engine pauses for only a part of it."""
    num_continued: int = 0
    """Answers that continued from their tokens on another engine."""
    num_restarted: int = 0
    """Answers that restarted from their first token."""
    num_tokens_kept: int = 0
    """Tokens from lost engines that did not have to be sampled again."""
    num_failed: int = 0
    """Requests that failed for reasons other than the request itself."""

    @property
    def num_engines(self) -> int:
        return len(self._replicas)

    @property
    def num_serving(self) -> int:
        return sum(replica.serving_version is not None for replica in self._replicas)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Requests in flight, per engine."""
        return tuple(replica.num_in_flight for replica in self._replicas)


@dataclass(frozen=True, slots=True)
class _SwapJob:
    folder: Path
    version: Version
    verify: VerifyEngine | None

    async def run(self, replica: Replica) -> None:
        with wrap_errors(EngineError, f"load of {self.version}"):
            await replica.engine.load(self.folder, self.version)
        if self.verify is not None:
            try:
                with wrap_errors(EngineError, f"probe of {self.version}"):
                    await self.verify(replica.engine, self.version)
            except EngineError as error:
                raise VerificationFailed(str(error)) from error
        replica.verified = self.version


@dataclass(slots=True)
class RollingSwap:
    _replicas: Sequence[Replica]
    _stats: PoolStats
    _max_paused: int
    _changed: Callable[[], None]
    """Called when an engine may have become available."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def load(
        self, folder: Path, version: Version, verify: VerifyEngine | None
    ) -> list[EngineError]:
        """Load the version into all engines that lack it; return the errors.

        Waits for idle engines only when no engine serves, or when one of them failed verification
        of this version before.
        """
        job = _SwapJob(folder, version, verify)
        async with self._lock:
            behind = [
                s for s in self._replicas if s.serving_version != version and s.starting is None
            ]
            serving = [replica for replica in behind if replica.serving_version is not None]
            unverified = [replica for replica in behind if replica.engine.live == version]
            starting = [
                self._start(replica, job) for replica in behind if replica.serving_version is None
            ]
            errors: list[EngineError] = []
            if unverified or all(replica.serving_version is None for replica in self._replicas):
                errors += [error for error in await asyncio.gather(*starting) if error is not None]
            if not unverified or self._is_verified(version):
                errors += await self._swap_all(serving, job)
        return errors

    async def close(self) -> None:
        starting = [replica.starting for replica in self._replicas if replica.starting is not None]
        for task in starting:
            task.cancel()
        await asyncio.gather(*starting, return_exceptions=True)

    async def _swap_all(self, replicas: Iterable[Replica], job: _SwapJob) -> list[EngineError]:
        gate = asyncio.Semaphore(self._max_paused)
        errors: list[EngineError] = []

        async def swap(replica: Replica) -> None:
            async with gate:
                is_suspect = any(isinstance(error, VerificationFailed) for error in errors)
                if not is_suspect or self._is_verified(job.version):
                    try:
                        await self._swap(replica, job)
                    except EngineError as error:
                        errors.append(error)

        async with asyncio.TaskGroup() as tasks:
            for replica in replicas:
                tasks.create_task(swap(replica))
        return errors

    def _is_verified(self, version: Version) -> bool:
        return any(replica.serving_version == version for replica in self._replicas)

    async def _swap(self, replica: Replica, job: _SwapJob) -> None:
        started_at = time.monotonic()
        replica.is_swapping = True
        num_paused = sum(replica.is_swapping for replica in self._replicas)
        self._stats.peak_paused = max(self._stats.peak_paused, num_paused)
        try:
            await job.run(replica)
        finally:
            replica.is_swapping = False
            self._stats.num_swaps += 1
            self._stats.swap_s.append(time.monotonic() - started_at)
            self._changed()

    def _start(self, replica: Replica, job: _SwapJob) -> asyncio.Task[EngineError | None]:
        async def start() -> EngineError | None:
            try:
                await job.run(replica)
            except EngineError as error:
                log.error("engine load failed", version=str(job.version), error=str(error))
                return error
            finally:
                replica.starting = None
                self._changed()
            return None

        replica.starting = asyncio.create_task(start())
        return replica.starting
