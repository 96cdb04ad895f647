# SPDX-License-Identifier: Apache-2.0
"""What a node is busy with, for its heartbeats: a wait that no operator can see looks like work.

Owns the list. Each entry names who has to act and the row or version that it is for. Sets no
deadline and ends nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count

from penstock.dataflow.core.leasing import Activity

MAX_SHOWN = 8
MAX_CHARS = 200


class Activities:
    """The activities of one node."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_done = 0
        """Activities that ended well."""
        self._clock = clock
        self._open: dict[int, tuple[str, str, float]] = {}
        """What, item and start of each, in the order of their starts."""
        self._keys = count()

    @contextmanager
    def busy(self, what: str, item: str) -> Generator[None]:
        """Busy with this while the block runs; what is inside it, for the same item, hides it."""
        key = next(self._keys)
        self._open[key] = (what[:MAX_CHARS], item[:MAX_CHARS], self._clock())
        try:
            yield
        finally:
            del self._open[key]
        self.num_done += 1

    @contextmanager
    def attempting(self, item: str) -> Generator[None]:
        """What this task and its children do is for this item; see `busy_with`."""
        token = _attempt.set((self, item))
        try:
            yield
        finally:
            _attempt.reset(token)

    def longest(self) -> tuple[Activity, ...]:
        """The innermost activity of each item, the longest first."""
        now = self._clock()
        innermost = {item: (what, since) for what, item, since in self._open.values()}
        found = [
            Activity(what=what, item=item, since_s=max(0.0, now - since))
            for item, (what, since) in innermost.items()
        ]
        return tuple(sorted(found, key=lambda one: -one.since_s)[:MAX_SHOWN])


_attempt: ContextVar[tuple[Activities, str] | None] = ContextVar("attempt", default=None)


@contextmanager
def busy_with(what: str) -> Generator[None]:
    """Busy with this for the attempt that the block runs in; outside an attempt, nothing."""
    found = _attempt.get()
    if found is None:
        yield
        return
    activities, item = found
    with activities.busy(what, item):
        yield
