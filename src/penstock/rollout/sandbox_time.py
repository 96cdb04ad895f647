# SPDX-License-Identifier: Apache-2.0
"""How long the sandboxes of an attempt were open, all together: a cost that its row records.

Counts what the attempt itself opened: commands, tools, graders, the boxes of a Harbor task.
Processes that serve many attempts, such as reward functions, are of none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count


class SandboxTime:
    """Of one attempt."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ended_s = 0.0
        self._open: dict[int, float] = {}
        """When each one that is open was opened."""
        self._keys = count()

    def start(self) -> int:
        key = next(self._keys)
        self._open[key] = self._clock()
        return key

    def end(self, key: int) -> None:
        self._ended_s += self._clock() - self._open.pop(key)

    @property
    def total_ms(self) -> int:
        now = self._clock()
        return round(1000 * (self._ended_s + sum(now - since for since in self._open.values())))


_attempt: ContextVar[SandboxTime | None] = ContextVar("sandbox_time")


@contextmanager
def counting_sandboxes() -> Generator[SandboxTime]:
    """Count what this task and its children open while the block runs."""
    found = SandboxTime()
    token = _attempt.set(found)
    try:
        yield found
    finally:
        _attempt.reset(token)


def time_of_attempt() -> SandboxTime | None:
    """Where a sandbox that is opened now counts; None outside an attempt."""
    return _attempt.get(None)
