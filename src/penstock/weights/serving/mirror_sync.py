# SPDX-License-Identifier: Apache-2.0
"""Keeps a bucket in sync with a store while a weight server runs: uploads new versions, newest
first, and deletes what the store deleted.

Owns the schedule. Deletes only what this process has seen in the store: the bucket may be the last
copy of a lost machine, or belong to another run by mistake. A failing bucket delays nothing: nodes
use the weight server, and the next sync retries. One process per bucket.
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
"""Delay after a failed sync."""


class MirrorSync:
    def __init__(self, store: DirectoryStore, mirror: ObjectMirror) -> None:
        self._store = store
        self._mirror = mirror
        self._mirrored: set[str] | None = None
        """Manifests in the bucket; None before the first listing."""
        self._seen: set[Hashable] = set()
        """Manifests, blobs and deltas seen in the store since this process started."""
        self._has_ended = threading.Event()

    @contextmanager
    def running(self) -> Generator[None]:
        """Sync in a background thread. On exit a running upload stops; the next start resumes
        it."""
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
                with wrap_errors(WeightsError, "syncing the mirror"):
                    has_succeeded = self.sync_once()
            except WeightsError as error:
                has_succeeded = False
                log.error("mirror sync failed", error=str(error), retry_in_s=RETRY_S)

    def sync_once(self) -> bool:
        """Sync the bucket with the store; False if an upload failed."""
        if self._mirrored is None:
            self._mirrored = set(self._mirror.manifests())
        self._record_seen()
        failed: set[str] = set()
        while (digest := self._newest_missing(self._mirrored | failed)) is not None:
            started_at = time.monotonic()
            try:
                sent = self._mirror.upload(self._store, digest)
            except WeightsError as error:
                if self._has_ended.is_set():
                    return False
                log.error("upload failed", error=str(error), retry_in_s=RETRY_S)
                failed.add(digest)
                continue
            self._mirrored.add(digest)
            self._record_seen()
            seconds = round(time.monotonic() - started_at, 1)
            log.info("version mirrored", manifest=digest, bytes=sent, seconds=seconds)
        if deleted := (self._mirrored & self._seen).difference(self._store.manifests()):
            self._delete_versions(deleted)
            self._mirrored -= deleted
        return not failed

    def _newest_missing(self, known: Collection[str]) -> str | None:
        """Re-evaluated before each upload, so a slow link skips intermediate versions."""
        numbers: dict[str, int] = {}
        for digest in self._store.manifests():
            if digest not in known:
                with suppress(OSError, WeightsError):  # just deleted, or damaged
                    numbers[digest] = parse_manifest(self._store.read_manifest(digest)).number
        return max(numbers, key=numbers.__getitem__, default=None)

    def _record_seen(self) -> None:
        self._seen.update(self._store.manifests(), self._store.deltas(), dict(self._store.blobs()))

    def _delete_versions(self, manifests: Collection[str]) -> None:
        """Delete references before the blobs they point to."""
        for digest in manifests:
            self._mirror.delete_manifest(digest)
        kept_blobs = {
            blob for name in self._foreign_versions() for blob in self._mirror.blobs_of(name)
        }
        deleted_deltas = self._seen.difference(self._store.deltas())
        for entry in self._mirror.deltas():
            if entry in deleted_deltas:
                self._mirror.delete_delta(entry)
            else:
                kept_blobs.add(entry.blob)
        deleted_blobs = self._seen.difference(dict(self._store.blobs()), kept_blobs)
        for digest, _ in self._mirror.blobs():
            if digest in deleted_blobs:
                self._mirror.delete_blob(digest)

    def _foreign_versions(self) -> set[str]:
        """Versions in the bucket that this process has not seen in the store; they may share blobs
        with it."""
        return (self._mirrored or set()) - self._seen
