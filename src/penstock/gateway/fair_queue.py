# SPDX-License-Identifier: Apache-2.0
"""Shares a limited number of places between keys, so that a flood by one does not delay another.

Beside others, a key never holds more than half of what is free, so that most places are free for
the next key: a flood gets a third of all. A key that has been alone for a while may take
all of them. Beyond that, keys take turns, each in the order of its own calls. A key without a place
may always take a free one. Knows neither sessions nor engines.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from time import monotonic

ALONE_S = 60.0
"""A key counts as alone when no other one has held a place for this long."""
FREE_PER_HELD = 2
"""Beside others, so many places must be free for each that a key holds."""


class FairQueue:
    def __init__(self, num_places: int, clock: Callable[[], float] = monotonic) -> None:
        assert num_places >= 1, "a queue without places never ends"
        self._num_places = num_places
        self._num_held: dict[str, int] = {}
        self._num_taken = 0
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """Calls that wait, by key; the key whose turn is next comes first."""
        self._clock = clock
        self._last_at: OrderedDict[str, float] = OrderedDict()
        """When each key last took or released a place, oldest first."""

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def place(self, key: str) -> AbstractAsyncContextManager[None]:
        """Hold a place; waits for it if there is none for this key now."""
        return _Place(self, key)

    async def take(self, key: str) -> None:
        if not self._waiting.get(key) and self._may_take(key):
            self._take(key)
        else:
            await self._wait(key)

    def _may_take(self, key: str) -> bool:
        num_free = self._num_places - self._num_taken
        num_held = self._num_held.get(key, 0)
        if num_free <= 0 or num_held == 0:
            return num_free > 0
        return num_held * FREE_PER_HELD < num_free or self._is_alone()

    def _take(self, key: str) -> None:
        self._num_held[key] = self._num_held.get(key, 0) + 1
        self._num_taken += 1
        self._note(key)

    def _note(self, key: str) -> None:
        self._last_at[key] = now = self._clock()
        self._last_at.move_to_end(key)
        self._forget_before(now - ALONE_S)

    def _forget_before(self, oldest: float) -> None:
        while self._last_at and next(iter(self._last_at.values())) < oldest:
            self._last_at.popitem(last=False)

    def _is_alone(self) -> bool:
        """Whether one key has been the only one for a while."""
        if len(self._num_held) > 1 or len(self._waiting) > 1:
            return False
        self._forget_before(self._clock() - ALONE_S)
        return len(self._last_at) <= 1

    async def _wait(self, key: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it had got the place
                self.release(key)
            else:
                with suppress(KeyError, ValueError):  # its turn may have been passed over
                    self._waiting[key].remove(turn)
                self._drop_if_empty(key)
            raise

    def release(self, key: str) -> None:
        self._num_taken -= 1
        num_held = self._num_held.pop(key) - 1
        if num_held:
            self._num_held[key] = num_held
        self._note(key)
        while self._waiting and self._num_taken < self._num_places and self._start_next():
            pass

    def _start_next(self) -> bool:
        """Give a free place to the first key in turn that may take one."""
        for key, turns in self._waiting.items():
            while turns and turns[0].cancelled():
                turns.popleft()
            if turns and self._may_take(key):
                self._take(key)
                turns.popleft().set_result(None)
                self._waiting.move_to_end(key)
                self._drop_if_empty(key)
                return True
        return False

    def _drop_if_empty(self, key: str) -> None:
        if key in self._waiting and not self._waiting[key]:
            del self._waiting[key]


class _Place:
    """A class, because every call enters one: a generator would cost several times as much."""

    __slots__ = ("_key", "_queue")

    def __init__(self, queue: FairQueue, key: str) -> None:
        self._queue, self._key = queue, key

    async def __aenter__(self) -> None:
        await self._queue.take(self._key)

    async def __aexit__(self, *_: object) -> None:
        self._queue.release(self._key)
