# SPDX-License-Identifier: Apache-2.0
"""How much each client keeps on disk: saved weights, models, requests and results.

A full disk ends the server for all clients, so each has a share of it. Counts from above: what was
deleted counts until the next look. Owns the counts and the refusal; deletes nothing.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

from penstock.errors import Forbidden

LOOK_S = 30.0
"""Least time between two looks for one owner: each reads a line of every request."""


class StoredBytes:
    """Any thread may call it."""

    def __init__(
        self,
        look: Callable[[str], int],
        limit: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`look`: bytes that an owner has on disk now."""
        self._look = look
        self._limit = limit
        self._clock = clock
        self._lock = threading.Lock()
        self._used: Counter[str] = Counter()
        self._looked_at: dict[str, float] = {}

    def add(self, owner: str, num_bytes: int) -> None:
        with self._lock:
            self._used[owner] += num_bytes

    def has_room(self, owner: str, num_bytes: int) -> bool:
        """As far as is known without a look."""
        return owner in self._looked_at and self._used[owner] + num_bytes <= self._limit

    def require(self, owner: str, num_bytes: int = 0) -> None:
        """Raise Forbidden unless `num_bytes` more fit. Blocks while it looks."""
        if self.has_room(owner, num_bytes):
            return
        now = self._clock()
        if now - self._looked_at.get(owner, -LOOK_S) >= LOOK_S:
            self._looked_at[owner] = now
            with self._lock:
                self._used[owner] = 0  # what is added during the look counts twice at most
            self.add(owner, self._look(owner))
        if not self.has_room(owner, num_bytes):
            raise Forbidden(
                f"this credential keeps {self._used[owner] >> 20} MiB of weights, requests and "
                "results, its limit; save with ttl_seconds, or overwrite"
            )
