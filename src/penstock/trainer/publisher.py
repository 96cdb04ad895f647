# SPDX-License-Identifier: Apache-2.0
"""Publishes versions in the background: stored, announced, and the store pruned.

A trainer hands over a copy of its weights and continues; if it is faster than the store, the newest
version replaces the waiting one, and the newest is always announced in the end. An error here ends
the trainer at its next call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import structlog
from torch import Tensor

from penstock.errors import WeightsError, WireError
from penstock.trainer.background_worker import BackgroundWorker
from penstock.trainer.snapshots import Snapshots
from penstock.weights.publish import StoredVersion

_log = structlog.get_logger(__name__)

Announce = Callable[[int, StoredVersion], None]
"""Report to the ledger that this number has these weights."""
InUse = Callable[[], tuple[list[str], list[str]]]
"""Manifests that are referenced, and the newest of them."""

GC_INTERVAL_S = 10.0
"""Between two searches for unreferenced versions."""


class Publisher(BackgroundWorker[tuple[int, Mapping[str, Tensor]]]):
    def __init__(self, snapshots: Snapshots, announce: Announce, in_use: InUse) -> None:
        self._snapshots = snapshots
        self._announce = announce
        self._in_use = in_use
        self._collected_at = time.monotonic()
        super().__init__("publisher", self._publish, after_each=self._collect_garbage)

    def submit(self, weights: Mapping[str, Tensor], number: int) -> None:
        """Copy the weights; the rest happens in the background."""
        skipped = self.put((number, self._snapshots.copy(weights)))
        if skipped is not None:
            _log.info(
                "version skipped: publishing is slower than training",
                number=skipped[0],
                newer=number,
            )

    # --- in the thread ------------------------------------------------------------------------

    def _publish(self, handed: tuple[int, Mapping[str, Tensor]]) -> None:
        number, weights = handed
        del handed
        stored = self._snapshots.put(weights, number)
        del weights
        self._announce(number, stored)

    def _collect_garbage(self) -> None:
        """A store that grows must not stop training."""
        if time.monotonic() - self._collected_at < GC_INTERVAL_S:
            return
        try:
            self._snapshots.collect_garbage(*self._in_use())
        except (WeightsError, WireError) as error:
            _log.warning("weight store not pruned", why=str(error))
        self._collected_at = time.monotonic()
