# SPDX-License-Identifier: Apache-2.0
"""Publishes versions in the background: stored, announced, and the store pruned.

A trainer hands over a copy of its weights and continues; if it is faster than the store, the newest
version replaces the waiting one, and the newest is always announced in the end. An error here ends
the trainer at its next call.

With several ranks each of them copies its own share and writes it; rank 0 decides which versions
are written, and tells the others which one it has dropped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import structlog

from penstock.errors import WeightsError, WireError, wrap_errors
from penstock.trainer.background_worker import BackgroundWorker
from penstock.trainer.durable_files import KnownFile, new_token
from penstock.trainer.ranks.regions import Weights
from penstock.trainer.snapshots import Snapshots, dtype_of_versions
from penstock.trainer.weight_shares import ShareBuffers, WeightShare, write_share_of_rank
from penstock.weights.publish import StoredVersion, incoming_path

_log = structlog.get_logger(__name__)

Announce = Callable[[int, StoredVersion], None]
"""Report to the ledger that this number has these weights."""
InUse = Callable[[], tuple[list[str], list[str]]]
"""Manifests that are referenced, and the newest of them."""

GC_INTERVAL_S = 10.0
"""Between two searches for unreferenced versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Handed:
    """A version on its way."""

    number: int
    token: int
    share: WeightShare


class Publisher(BackgroundWorker[_Handed]):
    """On rank 0, or alone."""

    def __init__(
        self, snapshots: Snapshots, announce: Announce, in_use: InUse, *, num_ranks: int = 1
    ) -> None:
        """num_ranks: ranks that write shares of every version."""
        self._snapshots = snapshots
        self._num_ranks = num_ranks
        self._kept: dict[int, Future[KnownFile]] = {}
        self._stored: tuple[int, StoredVersion] | None = None
        """The last stored version and its number."""
        self._lock = threading.Lock()
        self._announce = announce
        self._in_use = in_use
        self._collected_at = time.monotonic()
        super().__init__("publisher", self._publish, after_each=self._collect_garbage)

    def submit(self, weights: Weights, number: int, *, token: int | None = None) -> None:
        """Copy the weights; the rest happens in the background.

        token: the one that the other ranks were given for their shares."""
        self.drop_waiting()
        token = new_token() if token is None else token
        self.put(_Handed(number=number, token=token, share=self._snapshots.copy(weights)))

    def drop_waiting(self) -> int:
        """Make room for a newer version; the token of the one that will not be written, or 0."""
        dropped = self.take_back()
        if dropped is None:
            return 0
        assert not self.is_keeping, "a checkpoint needs this version: flush first"
        self._snapshots.release(dropped.share)
        _log.info("version skipped: publishing is slower than training", number=dropped.number)
        return dropped.token

    @property
    def is_keeping(self) -> bool:
        """Whether a checkpoint waits for the version that was submitted last; then the next one may
        be submitted only after `flush`."""
        with self._lock:
            return bool(self._kept)

    def keep(self, number: int) -> Future[KnownFile]:
        """The weights file of the version that was submitted last, once it is stored."""
        kept = Future[KnownFile]()
        with self._lock:
            if self._stored is None or self._stored[0] != number:
                self._kept[number] = kept
            else:
                kept.set_result(self._snapshots.link_weights(self._stored[1]))
        return kept

    # --- in the thread ------------------------------------------------------------------------

    def _publish(self, handed: _Handed) -> None:
        try:
            stored = self._snapshots.put(
                handed.share, handed.number, token=handed.token, num_ranks=self._num_ranks
            )
            self._link_if_kept(handed.number, stored)
            self._announce(handed.number, stored)
        except BaseException as error:
            with self._lock:
                for kept in self._kept.values():
                    kept.set_exception(error)
            raise

    def _link_if_kept(self, number: int, stored: StoredVersion) -> None:
        with self._lock:
            self._stored = (number, stored)
            if number in self._kept:
                self._kept.pop(number).set_result(self._snapshots.link_weights(stored))

    def _collect_garbage(self) -> None:
        """A store that grows must not stop training."""
        if time.monotonic() - self._collected_at < GC_INTERVAL_S:
            return
        try:
            self._snapshots.collect_garbage(*self._in_use())
        except (WeightsError, WireError) as error:
            _log.warning("weight store not pruned", why=str(error))
        self._collected_at = time.monotonic()


class ShareWriter(BackgroundWorker[tuple[int, WeightShare]]):
    """Writes the shares of ranks other than 0; rank 0 decides when a version is complete."""

    def __init__(self, store_root: Path, model_folder: Path, *, rank: int) -> None:
        self._store_root = store_root
        self._rank = rank
        self._buffers = ShareBuffers(dtype_of_versions(model_folder))
        self._dropped: set[int] = set()
        super().__init__("share writer", self._write)

    def submit(self, token: int, weights: Weights, *, dropped: int = 0) -> None:
        """Copy this rank's share of a version; it is written in the background.

        dropped: the token of a version that rank 0 will not write; 0 for none."""
        if dropped:
            self._dropped.add(dropped)
            waiting = self.take_back()
            if waiting is not None:
                self._buffers.release(waiting[1])
        self.put((token, self._buffers.copy(weights, is_rank0=False)))

    def raise_if_failed(self) -> None:
        """Raise an error of the thread: rank 0 would wait for a share that never comes."""
        self.flush(timeout_s=0.0)

    def _write(self, handed: tuple[int, WeightShare]) -> None:
        """In the thread."""
        token, share = handed
        path = incoming_path(self._store_root, token)
        with wrap_errors(WeightsError, f"writing a share of a version to {path}"):
            write_share_of_rank(
                path,
                share,
                rank=self._rank,
                is_cancelled=lambda: token in self._dropped or self.is_closed,
            )
        self._dropped.discard(token)
        self._buffers.release(share)
