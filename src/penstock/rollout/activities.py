# SPDX-License-Identifier: Apache-2.0
"""What a node is busy with, for its heartbeats: a wait that no operator can see looks like work.

Owns the list. Each entry names who has to act and the row or version that it is for. Sets no
deadline and ends nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, Token
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

    def busy(self, what: str, item: str) -> AbstractContextManager[None]:
        """Busy with this while the block runs; what is inside it, for the same item, hides it."""
        return _Busy(self, what, item)

    def attempting(self, item: str) -> AbstractContextManager[None]:
        """What this task and its children do is for this item; see `busy_with`."""
        return _Attempting(self, item)

    def start(self, what: str, item: str) -> int:
        key = next(self._keys)
        self._open[key] = (what[:MAX_CHARS], item[:MAX_CHARS], self._clock())
        return key

    def end(self, key: int, *, is_done: bool) -> None:
        del self._open[key]
        self.num_done += is_done

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


def busy_with(what: str) -> AbstractContextManager[None]:
    """Busy with this for the attempt that the block runs in; outside an attempt, nothing."""
    found = _attempt.get()
    return nullcontext() if found is None else _Busy(found[0], what, found[1])


class _Busy:
    """A class, because every attempt enters some: a generator would cost several times as much."""

    __slots__ = ("_activities", "_item", "_key", "_what")

    def __init__(self, activities: Activities, what: str, item: str) -> None:
        self._activities, self._what, self._item = activities, what, item

    def __enter__(self) -> None:
        self._key = self._activities.start(self._what, self._item)

    def __exit__(self, kind: object, *_: object) -> None:
        self._activities.end(self._key, is_done=kind is None)


class _Attempting:
    __slots__ = ("_found", "_token")

    def __init__(self, activities: Activities, item: str) -> None:
        self._found = (activities, item)

    def __enter__(self) -> None:
        self._token: Token[tuple[Activities, str] | None] = _attempt.set(self._found)

    def __exit__(self, *_: object) -> None:
        _attempt.reset(self._token)
