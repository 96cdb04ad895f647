# SPDX-License-Identifier: Apache-2.0
"""Versions on their way to the nodes, beside the training: stored, announced, and the store tidied.

Owns the thread that does it. A trainer hands over a copy of its weights and goes on; when it is
faster than the store, the newest version takes the place of the one that waits, and the newest is
always announced in the end. What goes wrong here ends the trainer at its next call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

import structlog
from torch import Tensor

from penstock.errors import WeightsError, WireError
from penstock.trainer.snapshots import Snapshots
from penstock.weights.publish import StoredVersion

_log = structlog.get_logger(__name__)

Announce = Callable[[int, StoredVersion], None]
"""Tell the ledger that this number has these weights."""
InUse = Callable[[], tuple[list[str], list[str]]]
"""Manifests that somebody refers to, and the newest of them."""

TIDY_S = 10.0
"""Between two looks for what the store need not keep."""
LEAVE_S = 5.0
"""A trainer that ends waits no longer for a version that nobody will miss."""


class Publisher:
    def __init__(self, snapshots: Snapshots, announce: Announce, in_use: InUse) -> None:
        self._snapshots = snapshots
        self._announce = announce
        self._in_use = in_use
        self._tidied_at = time.monotonic()
        self._changed = threading.Condition()
        self._waiting: tuple[int, Mapping[str, Tensor]] | None = None
        self._is_busy = False
        self._is_closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    def hand_over(self, weights: Mapping[str, Tensor], number: int) -> None:
        """Copy the weights; the rest happens elsewhere."""
        copied = self._snapshots.copy(weights)
        with self._changed:
            self._raise_error()
            if self._waiting is not None:
                _log.info("version skipped: publishing lags", number=self._waiting[0], newer=number)
            self._waiting = (number, copied)
            self._changed.notify_all()

    def finish(self) -> None:
        """Wait until everything handed over is announced."""
        with self._changed:
            while self._error is None and (self._waiting is not None or self._is_busy):
                self._changed.wait()
            self._raise_error()

    def close(self) -> None:
        """Begin nothing more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(LEAVE_S)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    # --- in the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        """consumes: copies of weights · produces: announced versions
        waits for: the next copy · ends: when it is closed, or at the first error"""
        try:
            while (taken := self._take()) is not None:
                number, weights = taken
                del taken
                stored = self._snapshots.put(weights, number)
                del weights
                self._announce(number, stored)
                self._put_back()
                self._tidy()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _take(self) -> tuple[int, Mapping[str, Tensor]] | None:
        with self._changed:
            while self._waiting is None and not self._is_closed:
                self._changed.wait()
            taken, self._waiting = (None if self._is_closed else self._waiting), None
            self._is_busy = taken is not None
            return taken

    def _put_back(self) -> None:
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()

    def _tidy(self) -> None:
        """A store that grows is no reason to stop training."""
        if time.monotonic() - self._tidied_at < TIDY_S:
            return
        try:
            self._snapshots.tidy(*self._in_use())
        except (WeightsError, WireError) as error:
            _log.warning("the weight store was not tidied", why=str(error))
        self._tidied_at = time.monotonic()
