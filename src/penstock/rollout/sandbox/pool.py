# SPDX-License-Identifier: Apache-2.0
"""Started sandboxes that wait, so that taking one costs no start; and leases on those in use.

A sandbox is used once: it is killed when it is given back, when its lease ends, or when the pool
closes. What a killed node leaves dies with it; the back end's reaping removes the rest at the next
start. A failed start reaches the caller who takes, never a reward.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from penstock.rollout.sandbox.types import Backend, Sandbox, SandboxSpec


@dataclass(slots=True, kw_only=True)
class SandboxPool:
    """Sandboxes of one spec."""

    backend: Backend
    spec: SandboxSpec
    size: int
    """How many wait."""
    lease_s: float
    """How long one caller may hold a sandbox."""
    _waiting: deque[asyncio.Task[Sandbox]] = field(default_factory=deque["asyncio.Task[Sandbox]"])
    _ending: set[asyncio.Task[None]] = field(default_factory=set["asyncio.Task[None]"])
    _leased: dict[int, Sandbox] = field(default_factory=dict[int, Sandbox])
    _is_closed: bool = False

    async def open(self) -> None:
        """Start the first sandboxes; raises SandboxError if they cannot be."""
        self._refill()
        await asyncio.gather(*self._waiting)

    @asynccontextmanager
    async def take(self) -> AsyncGenerator[Sandbox]:
        """A fresh sandbox until the block ends, at most for `lease_s`: then it is killed under its
        holder."""
        sandbox = await self._take()
        self._leased[id(sandbox)] = sandbox
        timer = asyncio.get_running_loop().call_later(self.lease_s, self._end, sandbox)
        try:
            yield sandbox
        finally:
            timer.cancel()
            self._end(sandbox)

    async def close(self) -> None:
        """Kill every sandbox, also those in use."""
        self._is_closed = True
        starting = [*self._waiting]
        self._waiting.clear()
        for sandbox in [*self._leased.values()]:
            self._end(sandbox)
        for started in await asyncio.gather(*starting, return_exceptions=True):
            if not isinstance(started, BaseException):
                await started.kill()
        await asyncio.gather(*self._ending)

    async def _take(self) -> Sandbox:
        starting = self._waiting.popleft() if self._waiting else self._start()
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            self._waiting.appendleft(starting)  # the next caller gets it
            raise

    def _refill(self) -> None:
        """When one is given back: not when one is taken, which would delay its program."""
        while len(self._waiting) < self.size and not self._is_closed:
            self._waiting.append(self._start())

    def _start(self) -> asyncio.Task[Sandbox]:
        return asyncio.get_running_loop().create_task(_started(self.backend.create(self.spec)))

    def _end(self, sandbox: Sandbox) -> None:
        if self._leased.pop(id(sandbox), None) is not None:
            ending = asyncio.get_running_loop().create_task(sandbox.kill())
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
            self._refill()


async def _started(sandbox: Sandbox) -> Sandbox:
    await sandbox.start()
    return sandbox
