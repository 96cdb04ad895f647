# SPDX-License-Identifier: Apache-2.0
"""One program inside a sandbox: its streams, its limits, and how it ended.

Owns the wall clock, CPU and output limits. How to kill is the back end's: it gives a function that
kills the program with all its descendants, and one that waits until they are gone.
"""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio import StreamReader
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from penstock.rollout.sandbox.cgroups import Group
from penstock.rollout.sandbox.child import Child
from penstock.rollout.sandbox.types import Exit, Limits

_LIMIT_OF_CODE = {-int(signal.SIGXCPU): "cpu_s", -int(signal.SIGXFSZ): "disk_mb"}
_MIN_CHECK_S = 0.05
_CHUNK_BYTES = 1 << 16


@dataclass(slots=True, kw_only=True)
class Program:
    """A SandboxProcess."""

    _child: Child
    _limits: Limits
    _group: Group
    _kill: Callable[[], None]
    _wait_gone: Callable[[], Awaitable[None]]
    _limit: str = ""
    _num_bytes: int = 0
    _is_killed: bool = False
    _watching: asyncio.Task[Exit] = field(init=False)

    def __post_init__(self) -> None:
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    @property
    def stdin(self) -> asyncio.StreamWriter:
        return self._child.stdin

    @property
    def stdout(self) -> Output:
        return Output(self._child.stdout, self._count)

    @property
    def stderr(self) -> Output:
        return Output(self._child.stderr, self._count)

    async def wait(self) -> Exit:
        return await asyncio.shield(self._watching)

    async def kill(self) -> None:
        """End it and all its descendants, and close its pipes."""
        self._is_killed = not self._watching.done()
        self._kill()
        try:
            await self.wait()
        finally:
            self._child.close()

    def _end(self, limit: str) -> None:
        if not self._watching.done():
            self._limit = self._limit or limit
            self._kill()

    def _count(self, data: bytes) -> bytes:
        room = self._limits.output_bytes - self._num_bytes
        self._num_bytes += len(data)
        if len(data) > room:
            self._end("output_bytes")
        return data[: max(room, 0)]

    async def _watch(self) -> Exit:
        """consumes: the clocks of this program · produces: how it ended
        waits for: its end, or the next moment at which a limit can be reached"""
        num_memory_kills = self._group.num_memory_kills()
        timer = asyncio.get_running_loop().call_later(self._limits.wall_s, self._end, "wall_s")
        cpu = asyncio.get_running_loop().create_task(self._watch_cpu())
        try:
            code = await self._child.wait_ended()
        finally:
            timer.cancel()
            cpu.cancel()
        self._kill()  # descendants do not outlive it
        await self._wait_gone()
        code = 128 - code if 128 < code < 128 + signal.NSIG else code
        if code == -signal.SIGKILL and self._group.num_memory_kills() > num_memory_kills:
            self._limit = self._limit or "memory_mb"
        code = -signal.SIGKILL if self._limit or self._is_killed else code
        return Exit(code=code, limit=self._limit or _LIMIT_OF_CODE.get(code, ""))

    async def _watch_cpu(self) -> None:
        """Look again when the limit can be reached at the earliest, with all cores busy."""
        first = self._group.cpu_used_s()
        while first is not None and (used := self._group.cpu_used_s()) is not None:
            left_s = self._limits.cpu_s - (used - first)
            if left_s <= 0:
                return self._end("cpu_s")
            await asyncio.sleep(max(_MIN_CHECK_S, left_s / (os.cpu_count() or 1)))


@dataclass(frozen=True, slots=True)
class Output:
    """A ReadStream whose bytes count against the limit of output."""

    _reader: StreamReader
    _count: Callable[[bytes], bytes]

    async def read(self, n: int = -1) -> bytes:
        if n >= 0:
            return self._count(await self._reader.read(n))
        chunks = list[bytes]()
        while chunk := self._count(await self._reader.read(_CHUNK_BYTES)):
            chunks.append(chunk)
        return b"".join(chunks)

    async def readexactly(self, n: int) -> bytes:
        """In pieces: a program that announces more than its limit is not waited for."""
        data = bytearray()
        while len(data) < n:
            chunk = await self.read(min(n - len(data), _CHUNK_BYTES))
            if not chunk:
                raise asyncio.IncompleteReadError(bytes(data), n)
            data += chunk
        return bytes(data)
