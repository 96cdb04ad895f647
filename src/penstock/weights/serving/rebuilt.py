# SPDX-License-Identifier: Apache-2.0
"""What a weight server made from the deltas of its store: full files, and merged deltas.

Owns a separate folder, which never takes more than it leaves free on its disk: what was read
longest ago goes first. The store neither knows of it nor waits for it, so readers who ask for old
versions fill no disk and delay no deletion. Blocking; do not call on the event loop.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from penstock.errors import Unreachable, WeightsError
from penstock.weights.deltas.chain import DeltaEntry
from penstock.weights.deltas.file_delta import make_delta
from penstock.weights.manifest import file_digest
from penstock.weights.rebuild import apply_chain, chain_from_full
from penstock.weights.store import DirectoryStore

FULL_RETRY_S = 60.0
NUM_TRIES = 2
"""Deltas may be deleted while they are read; others lead to the file then."""


class Rebuilt:
    def __init__(self, store: DirectoryStore, folder: Path) -> None:
        self._store = store
        self._folder = folder
        self._made = DirectoryStore(folder)

    def open_blob(self, digest: str) -> BinaryIO:
        return self._made.open_blob(digest)

    def deltas_to(self, target: str) -> list[DeltaEntry]:
        return self._made.deltas_to(target)

    def mark_read(self, digest: str) -> None:
        with suppress(OSError):
            os.utime(self._made.blob_path(digest))

    def rebuild(self, digest: str) -> Path:
        """Path of the full file; raises WeightsError if there are no deltas to it, and Unreachable
        if there is no room for it."""
        for _ in range(NUM_TRIES):
            for store in (self._store, self._made):
                if store.has_blob(digest):
                    return store.blob_path(digest)
            chain = chain_from_full(self._store, digest)
            if not chain:
                raise WeightsError(f"blob {digest} is missing and cannot be rebuilt from deltas")
            with suppress(FileNotFoundError):
                self._make_room(self._store.blob_path(chain[0].base).stat().st_size)
                self._made.make_blob(digest, partial(apply_chain, chain, self._store.blob_path))
        return self._made.blob_path(digest)

    def merge(self, base: str, target: str, num_bytes: int) -> None:
        """Make one delta in place of several that have `num_bytes`. A damaged file would give a
        delta that is of no use."""
        paths = self.rebuild(base), self.rebuild(target)
        for path, blob in zip(paths, (base, target), strict=True):
            if file_digest(path) != blob:
                raise WeightsError(f"{path} is damaged (digest mismatch); delete it")
        self._make_room(num_bytes)
        make = partial(make_delta, *paths, base_blob=base, target_blob=target)
        self._made.put_delta(base, target, make)

    def _make_room(self, num_bytes: int) -> None:
        self._made.prepare()
        sizes = dict(self._made.blobs())
        used = sum(sizes.values())
        limit = (shutil.disk_usage(self._folder).free + used) // 2
        if num_bytes > limit:
            raise Unreachable(
                f"no room for {num_bytes} bytes rebuilt from deltas", retry_after_s=FULL_RETRY_S
            )
        read_at = {digest: self._made.blob_path(digest).stat().st_mtime_ns for digest in sizes}
        for digest in sorted(sizes, key=read_at.__getitem__):
            if used + num_bytes <= limit:
                break
            self._made.delete_blob(digest)
            used -= sizes[digest]
        for entry in self._made.deltas():
            if not self._made.has_blob(entry.blob):
                self._made.delete_delta(entry)
