# SPDX-License-Identifier: Apache-2.0
"""Shares a limited number of places between keys, so that a flood by one does not delay another.

A key never holds more places than are free: alone it gets half, and whoever comes next starts at
once. Beyond that, keys take turns, each in the order of its own calls. A key without a place may
always take a free one. Knows neither sessions nor engines.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class FairQueue:
    def __init__(self, num_places: int) -> None:
        assert num_places >= 1, "a queue without places never ends"
        self._num_places = num_places
        self._num_held: Counter[str] = Counter()
        self._num_taken = 0
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """Calls that wait, by key; the key whose turn is next comes first."""

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def place(self, key: str) -> AsyncGenerator[None]:
        """Hold a place; waits for it if there is none for this key now."""
        if key not in self._waiting and self._may_take(key):
            self._take(key)
        else:
            await self._wait(key)
        try:
            yield
        finally:
            self._release(key)

    def _may_take(self, key: str) -> bool:
        num_free = self._num_places - self._num_taken
        return num_free > 0 and self._num_held[key] < max(1, num_free)

    def _take(self, key: str) -> None:
        self._num_held[key] += 1
        self._num_taken += 1

    async def _wait(self, key: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it had got the place
                self._release(key)
            else:
                self._waiting[key].remove(turn)
                self._drop_if_empty(key)
            raise

    def _release(self, key: str) -> None:
        self._num_taken -= 1
        self._num_held[key] -= 1
        if not self._num_held[key]:
            del self._num_held[key]
        while self._num_taken < self._num_places and self._start_next():
            pass

    def _start_next(self) -> bool:
        """Give a free place to the first key in turn that may take one."""
        for key, turns in self._waiting.items():
            if self._may_take(key):
                self._take(key)
                turns.popleft().set_result(None)
                self._waiting.move_to_end(key)
                self._drop_if_empty(key)
                return True
        return False

    def _drop_if_empty(self, key: str) -> None:
        if not self._waiting[key]:
            del self._waiting[key]
