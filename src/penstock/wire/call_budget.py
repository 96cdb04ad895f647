# SPDX-License-Identifier: Apache-2.0
"""How much work one credential may have in a service at a time; its further calls wait in line.

One event loop serves calls in the order in which they arrive. A credential that sends many at once
gets its share of the loop and of memory and no more: the bodies of its waiting calls are not read
yet.
"""

from __future__ import annotations

import asyncio
from collections import deque

from penstock.errors import Busy

MAX_BYTES = 64 << 20
CALL_BYTES = 1 << 20
"""A call counts as this many bytes more than its body: it costs time, too."""
MAX_WAITING = 4096
RETRY_S = 1.0

Caller = tuple[str, str]
"""A subject and a route."""


class CallBudget:
    def __init__(self, max_bytes: int = MAX_BYTES, max_waiting: int = MAX_WAITING) -> None:
        self._max_bytes = max_bytes
        self._max_waiting = max_waiting
        self._used: dict[Caller, int] = {}
        self._waiting: dict[Caller, deque[tuple[asyncio.Future[None], int]]] = {}

    def used(self, who: Caller) -> int:
        return self._used.get(who, 0)

    async def enter(self, who: Caller, num_bytes: int) -> None:
        """consumes: nothing · produces: a share of the budget, which `leave` returns
        waits for: earlier calls of the same credential · woken by: `leave`"""
        used = self._used.get(who, 0)
        if not used or (used + num_bytes <= self._max_bytes and who not in self._waiting):
            self._used[who] = used + num_bytes
            return
        line = self._waiting.setdefault(who, deque())
        if len(line) >= self._max_waiting:
            raise Busy(
                f"{len(line)} calls of this credential wait; wait for their answers before you "
                "send more",
                retry_after_s=RETRY_S,
            )
        turn = asyncio.get_running_loop().create_future()
        line.append((turn, num_bytes))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave(who, num_bytes)  # its turn came as its caller went
            raise

    def leave(self, who: Caller, num_bytes: int) -> None:
        self.resize(who, num_bytes, 0)

    def resize(self, who: Caller, num_bytes: int, actual: int) -> None:
        """A share of `num_bytes` has `actual` ones from now on; raises Busy if they have no room
        beside the other shares of the same credential."""
        others = self._used[who] - num_bytes
        if others and actual > num_bytes and others + actual > self._max_bytes:
            raise Busy(
                f"answers of {others} bytes for this credential are not read yet; read them before "
                "you ask for more",
                retry_after_s=RETRY_S,
            )
        used = others + actual
        del self._used[who]
        line = self._waiting.get(who)
        while line:
            turn, size = line[0]
            if not turn.done():
                if used and used + size > self._max_bytes:
                    break
                used += size
                turn.set_result(None)
            line.popleft()
        if line is not None and not line:
            del self._waiting[who]
        if used:
            self._used[who] = used


class Share:
    """What one call holds of the budget."""

    def __init__(self, budget: CallBudget) -> None:
        self._budget = budget
        self._held: tuple[Caller, int] | None = None

    async def take(self, who: Caller, num_bytes: int) -> None:
        await self._budget.enter(who, num_bytes)
        self._held = who, num_bytes

    def resize(self, num_bytes: int) -> None:
        """Raises Busy if it has no room to grow."""
        assert self._held is not None
        who, held = self._held
        self._budget.resize(who, held, num_bytes)
        self._held = who, num_bytes

    def give_back(self) -> None:
        """Again has no effect."""
        held, self._held = self._held, None
        if held is not None:
            self._budget.leave(*held)
