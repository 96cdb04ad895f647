# SPDX-License-Identifier: Apache-2.0
"""Shares one task among concurrent requests, and one arriving piece among its readers.

Owns waiting and cancelling. Knows nothing of weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class SingleFlight(Generic[K, V]):
    """Concurrent requests for one key share one task; cancelling a caller does not cancel it."""

    def __init__(self) -> None:
        self._running: dict[K, asyncio.Task[V]] = {}

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, key: K) -> bool:
        return key in self._running

    async def get(self, key: K, work: Callable[[], Coroutine[Any, Any, V]]) -> V:
        return await asyncio.shield(self.start(key, work))

    def start(self, key: K, work: Callable[[], Coroutine[Any, Any, V]]) -> asyncio.Task[V]:
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = asyncio.create_task(work())
            task.add_done_callback(lambda done: self._on_done(key, done))
        return task

    def _on_done(self, key: K, task: asyncio.Task[V]) -> None:
        del self._running[key]
        if not task.cancelled():
            task.exception()  # mark as retrieved: there may be no caller left

    async def close(self) -> None:
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class PieceFetch:
    """An arriving piece; notifies its waiters of progress."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []
        self.task: asyncio.Task[None] | None = None

    async def wait_progress(self) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future

    def notify(self, error: BaseException | None = None) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if future.done():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)
