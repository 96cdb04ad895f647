# SPDX-License-Identifier: Apache-2.0
"""New weights for the engines of a pool, one after another.

An engine serves while it is alive and has proved the version that is live on it. A swap takes
serving engines out of routing, at most so many at once. One that cannot load keeps serving its old
version, as the spans of its answers say, until a later load succeeds. One whose version fails its
proof serves nobody, and such a version goes no further until some engine has proved it. An engine
that serves nobody is loaded beside the others, which do not wait for it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from penstock.errors import EngineError, boundary
from penstock.rollout.engines.base import Engine
from penstock.types import Version

MAX_SWAP_S = 1000
"""Durations kept, of the newest swaps."""
log = structlog.get_logger(__name__)

Prove = Callable[[Engine, Version], Awaitable[None]]
"""Raises EngineError unless the engine answers with this version."""


class Unproven(EngineError):
    """The version was loaded, and did not answer as it should."""


@dataclass(slots=True, eq=False)
class Seat:
    """One engine and what its pool knows of it."""

    engine: Engine
    proven: Version | None = None
    num_in_flight: int = 0
    is_swapping: bool = False
    starting: asyncio.Task[EngineError | None] | None = None
    """The load of an engine that serves nobody."""

    @property
    def serves(self) -> Version | None:
        live = self.engine.live
        return live if live is not None and live == self.proven else None


@dataclass(frozen=True, slots=True)
class _Job:
    folder: Path
    version: Version
    prove: Prove | None

    async def do(self, seat: Seat) -> None:
        with boundary(EngineError, f"load of {self.version}"):
            await seat.engine.load(self.folder, self.version)
        if self.prove is not None:
            try:
                with boundary(EngineError, f"probe of {self.version}"):
                    await self.prove(seat.engine, self.version)
            except EngineError as error:
                raise Unproven(str(error)) from error
        seat.proven = self.version


class Swaps:
    def __init__(
        self, seats: Sequence[Seat], *, most_paused: int, changed: Callable[[], None]
    ) -> None:
        """`changed` is called whenever an engine may have become able to answer."""
        self.num_swaps = 0
        self.peak_paused = 0
        self.swap_s: deque[float] = deque(maxlen=MAX_SWAP_S)
        self._seats = seats
        self._most_paused = most_paused
        self._changed = changed
        self._lock = asyncio.Lock()

    async def load(self, folder: Path, version: Version, prove: Prove | None) -> list[EngineError]:
        """What went wrong. Engines that serve nobody are waited for only when none serves, or when
        one of them failed the proof of this version before."""
        job = _Job(folder, version, prove)
        async with self._lock:
            behind = [s for s in self._seats if s.serves != version and s.starting is None]
            serving = [seat for seat in behind if seat.serves is not None]
            doubted = [seat for seat in behind if seat.engine.live == version]
            starting = [self._start(seat, job) for seat in behind if seat.serves is None]
            errors: list[EngineError] = []
            if doubted or all(seat.serves is None for seat in self._seats):
                errors += [error for error in await asyncio.gather(*starting) if error is not None]
            if not doubted or self._is_proved(version):
                errors += await self._roll(serving, job)
        return errors

    async def close(self) -> None:
        starting = [seat.starting for seat in self._seats if seat.starting is not None]
        for task in starting:
            task.cancel()
        await asyncio.gather(*starting, return_exceptions=True)

    async def _roll(self, seats: Iterable[Seat], job: _Job) -> list[EngineError]:
        gate = asyncio.Semaphore(self._most_paused)
        errors: list[EngineError] = []

        async def swap(seat: Seat) -> None:
            async with gate:
                is_doubtful = any(isinstance(error, Unproven) for error in errors)
                if not is_doubtful or self._is_proved(job.version):
                    try:
                        await self._swap(seat, job)
                    except EngineError as error:
                        errors.append(error)

        async with asyncio.TaskGroup() as tasks:
            for seat in seats:
                tasks.create_task(swap(seat))
        return errors

    def _is_proved(self, version: Version) -> bool:
        return any(seat.serves == version for seat in self._seats)

    async def _swap(self, seat: Seat, job: _Job) -> None:
        begun_at = time.monotonic()
        seat.is_swapping = True
        self.peak_paused = max(self.peak_paused, sum(s.is_swapping for s in self._seats))
        try:
            await job.do(seat)
        finally:
            seat.is_swapping = False
            self.num_swaps += 1
            self.swap_s.append(time.monotonic() - begun_at)
            self._changed()

    def _start(self, seat: Seat, job: _Job) -> asyncio.Task[EngineError | None]:
        async def start() -> EngineError | None:
            try:
                await job.do(seat)
            except EngineError as error:
                log.error("engine not started", version=str(job.version), error=str(error))
                return error
            finally:
                seat.starting = None
                self._changed()
            return None

        seat.starting = asyncio.create_task(start())
        return seat.starting
