# SPDX-License-Identifier: Apache-2.0
"""A background worker: one item at a time, in a thread next to the training.

Owns that thread and the slot of the one waiting item. An exception in it is raised at the caller's
next call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

CLOSE_TIMEOUT_S = 5.0
"""A trainer that ends, or fails for another reason, waits no longer than this for current work."""


class BackgroundWorker(Generic[T]):
    """Runs `work` on each submitted item in one background thread, then `after_each`."""

    def __init__(
        self, name: str, work: Callable[[T], None], after_each: Callable[[], None] = lambda: None
    ) -> None:
        self._work = work
        self._afterwards = after_each
        self._changed = threading.Condition()
        self._waiting: list[T] = []
        """At most one."""
        self._is_busy = False
        self._is_closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        with self._changed:
            self._raise_error()
            return self._has_work

    def put(self, item: T) -> T | None:
        """Submit an item; returns the waiting item that it replaces, if any."""
        with self._changed:
            self._raise_error()
            replaced = self._waiting.pop() if self._waiting else None
            self._waiting.append(item)
            self._changed.notify_all()
            return replaced

    def take_back(self) -> T | None:
        """Remove the waiting item, if any, and return it."""
        with self._changed:
            self._raise_error()
            return self._waiting.pop() if self._waiting else None

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait for all submitted work, at most `timeout_s`; return whether it finished."""
        with self._changed:
            is_done = self._changed.wait_for(
                lambda: self._error is not None or not self._has_work, timeout_s
            )
            self._raise_error()
            return is_done

    def close(self) -> None:
        """Start no further work; wait for the current item, but not for long."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(CLOSE_TIMEOUT_S)

    @property
    def is_closed(self) -> bool:
        """Whether work that waits for others should give up."""
        return self._is_closed

    @property
    def _has_work(self) -> bool:
        return bool(self._waiting) or self._is_busy

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    # --- in the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        """consumes: items · produces: what `work` does with each
        waits for: the next item · ends: when it is closed, or at the first error"""
        try:
            while taken := self._take():
                self._work(taken.pop())  # so that only the work itself holds the item
                with self._changed:
                    self._is_busy = False
                    self._changed.notify_all()
                self._afterwards()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _take(self) -> list[T]:
        with self._changed:
            while not self._waiting and not self._is_closed:
                self._changed.wait()
            taken = [] if self._is_closed else [self._waiting.pop()]
            self._is_busy = bool(taken)
            return taken
