# SPDX-License-Identifier: Apache-2.0
"""A bucket kept equal to a store while a front serves it: what is new goes up, the newest version
first; what the store let go of is deleted.

Owns when. Deletes nothing that this process has not seen in the store: a bucket may be all that is
left of a lost machine, or another run's by mistake. A bucket that fails delays nobody: nodes have
the front, and the next round tries again. One process per bucket.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Generator, Hashable
from contextlib import contextmanager, suppress

import structlog

from penstock.errors import WeightsError, wrap_errors
from penstock.weights.manifest import parse_manifest
from penstock.weights.serving.mirror import ObjectMirror
from penstock.weights.store import DirectoryStore

log = structlog.get_logger(__name__)

SYNC_INTERVAL_S = 2.0
RETRY_S = 30.0
"""After a round that failed."""


class MirrorSync:
    def __init__(self, store: DirectoryStore, mirror: ObjectMirror) -> None:
        self._store = store
        self._mirror = mirror
        self._mirrored: set[str] | None = None
        """Manifests in the bucket, once it was asked."""
        self._seen: set[Hashable] = set()
        """Manifests, blobs and deltas that were in the store at some time of this life."""
        self._has_ended = threading.Event()

    @contextmanager
    def running(self) -> Generator[None]:
        """In a thread of its own; at the end an upload stops where it is, and goes on in the next
        life."""
        thread = threading.Thread(target=self._run, name="mirror-sync", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._has_ended.set()
            self._mirror.stop()
            thread.join()

    def _run(self) -> None:
        has_succeeded = True
        while not self._has_ended.wait(SYNC_INTERVAL_S if has_succeeded else RETRY_S):
            try:
                with wrap_errors(WeightsError, "keeping the mirror"):
                    has_succeeded = self.round()
            except WeightsError as error:
                has_succeeded = False
                log.error("the mirror lags behind", why=str(error), retry_in_s=RETRY_S)

    def round(self) -> bool:
        """Make both equal; whether they are."""
        if self._mirrored is None:
            self._mirrored = set(self._mirror.manifests())
        self._record_seen()
        failed: set[str] = set()
        while (digest := self._newest_missing(self._mirrored | failed)) is not None:
            began_at = time.monotonic()
            try:
                sent = self._mirror.upload(self._store, digest)
            except WeightsError as error:
                if self._has_ended.is_set():
                    return False
                log.error("a version is not mirrored", why=str(error), retry_in_s=RETRY_S)
                failed.add(digest)
                continue
            self._mirrored.add(digest)
            self._record_seen()
            seconds = round(time.monotonic() - began_at, 1)
            log.info("version mirrored", manifest=digest, bytes=sent, seconds=seconds)
        if gone := (self._mirrored & self._seen).difference(self._store.manifests()):
            self._delete_versions(gone)
            self._mirrored -= gone
        return not failed

    def _newest_missing(self, known: Collection[str]) -> str | None:
        """Asked anew before each upload, so that over a slow link versions between are left out."""
        numbers: dict[str, int] = {}
        for digest in self._store.manifests():
            if digest not in known:
                with suppress(OSError, WeightsError):  # let go of just now, or damaged
                    numbers[digest] = parse_manifest(self._store.read_manifest(digest)).number
        return max(numbers, key=numbers.__getitem__, default=None)

    def _record_seen(self) -> None:
        self._seen.update(self._store.manifests(), self._store.deltas(), dict(self._store.blobs()))

    def _delete_versions(self, manifests: Collection[str]) -> None:
        """Names go before what they name."""
        for digest in manifests:
            self._mirror.delete_manifest(digest)
        kept_blobs = {
            blob for name in self._foreign_versions() for blob in self._mirror.blobs_of(name)
        }
        deltas_gone = self._seen.difference(self._store.deltas())
        for entry in self._mirror.deltas():
            if entry in deltas_gone:
                self._mirror.delete_delta(entry)
            else:
                kept_blobs.add(entry.blob)
        blobs_gone = self._seen.difference(dict(self._store.blobs()), kept_blobs)
        for digest, _ in self._mirror.blobs():
            if digest in blobs_gone:
                self._mirror.delete_blob(digest)

    def _foreign_versions(self) -> set[str]:
        """Versions in the bucket that are not from this store, as far as this life knows; they may
        have blobs in common with it."""
        return (self._mirrored or set()) - self._seen
