# SPDX-License-Identifier: Apache-2.0
"""A node's folder of pulled weights: verified blobs, partial ones to resume, damaged ones to
repair, and staged versions.

Owns the locks that let tasks and processes share it, and atomic renames: `blobs/DIGEST` and
`versions/DIGEST/` appear complete or not at all. Nothing is synced to disk: files left by a crash
are verified again before use. Does no networking.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import AsyncGenerator, Callable, Collection, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypeVar

from penstock.bounds import is_digest
from penstock.errors import WeightsError
from penstock.weights.deltas.chain import MAX_BASES, DeltaEntry
from penstock.weights.manifest import FileEntry, SnapshotManifest
from penstock.weights.patches import target_of
from penstock.weights.pulling.partial import Partial, verify
from penstock.weights.rebuild import apply_chain
from penstock.weights.store import DirectoryStore, try_lock
from penstock.weights.tensors import Scan, TensorEntry

Result = TypeVar("Result")

LOCK_POLL_S = 0.02
RESUME_WINDOW_S = 3600.0
"""A partial blob untouched for longer than this is not resumed."""
PARTIAL = ".partial"
DAMAGED = ".wrong"
"""Suffix of a blob with the wrong digest; most of its tensors may still be usable."""


class BlobCache:
    def __init__(self, root: Path) -> None:
        self._root = root
        self._blobs = root / "blobs"
        self._versions = root / "versions"
        self._blobs.mkdir(parents=True, exist_ok=True)
        self._versions.mkdir(exist_ok=True)

    @asynccontextmanager
    async def in_use(self) -> AsyncGenerator[None]:
        """While any pull is in this block, `prune` deletes nothing."""
        while True:
            with self._lock(fcntl.LOCK_SH) as is_held:
                if is_held:
                    yield
                    return
            await asyncio.sleep(LOCK_POLL_S)

    def check(self, file: FileEntry, sole: Sequence[TensorEntry] = ()) -> Scan | None:
        """Verify the cached blob; None if it is missing or damaged. `sole` as for `verify`."""
        path = self._path(file.blob)
        try:
            found = verify(path, file, sole)
            if found is None:
                path.rename(self._damaged_path(file))
        except FileNotFoundError:
            return None
        return found

    def link(
        self, file: FileEntry, store: DirectoryStore, sole: Sequence[TensorEntry] = ()
    ) -> Scan | None:
        """Verify the blob of a store on this file system and link it instead of copying it; None if
        it is not there, not whole, or on another file system."""
        linked = self._blobs / f"{secrets.token_hex(8)}{PARTIAL}"
        try:
            os.link(store.blob_path(file.blob), linked, follow_symlinks=False)
            found = verify(linked, file, sole)
            if found is not None:
                linked.rename(self._path(file.blob))
            return found
        except OSError:
            return None
        finally:
            linked.unlink(missing_ok=True)

    def possible_bases(self, file: FileEntry) -> list[str]:
        """Cached blobs that may be the base of a delta to this one: weights of the same size."""
        if not file.name.endswith(".safetensors"):
            return []
        return sorted(
            blob.name
            for blob in self._blobs.iterdir()
            if is_digest(blob.name) and blob.stat().st_size == file.bytes
        )[:MAX_BASES]

    def largest_blobs(self) -> list[str]:
        """Cached blobs that may be bases of deltas to files not yet known: the largest."""
        sizes = {
            blob.name: blob.stat().st_size for blob in self._blobs.iterdir() if is_digest(blob.name)
        }
        return sorted(sizes, key=lambda name: (-sizes[name], name))[:MAX_BASES]

    def rebuild(
        self, file: FileEntry, steps: Sequence[DeltaEntry], sole: Sequence[TensorEntry] = ()
    ) -> Scan:
        """Rebuild the blob from a cached base and cached deltas; raises WeightsError if the result
        has the wrong digest."""
        made = self._blobs / f"{secrets.token_hex(8)}{PARTIAL}"
        try:
            apply_chain(steps, self._path, made)
            found = verify(made, file, sole)
            if found is None:
                made.rename(self._damaged_path(file))
                raise WeightsError(f"{file.name}: rebuilt file does not match digest {file.blob}")
            made.chmod(0o444)
            made.rename(self._path(file.blob))
            return found
        finally:
            made.unlink(missing_ok=True)

    @asynccontextmanager
    async def partial(
        self, file: FileEntry, tensors: Mapping[str, TensorEntry]
    ) -> AsyncGenerator[Partial]:
        """A partially fetched blob, for one writer at a time; keeps the data of earlier writers."""
        path = self._path(file.blob, PARTIAL)
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            try:
                if try_lock(descriptor, fcntl.LOCK_EX) and _is_file_at(descriptor, path):
                    partial = Partial(path, self._path(file.blob), file, tensors)
                    if self._damaged_path(file).exists():
                        await run_uncancelled(partial.start_from, self._damaged_path(file))
                    yield partial
                    return
            finally:
                os.close(descriptor)
            await asyncio.sleep(LOCK_POLL_S)

    def stage(self, digest: str, manifest: SnapshotManifest) -> Path:
        """Hard-link the blobs into a folder that appears complete or not at all."""
        folder = self._versions / _require_digest(digest)
        if self._is_staged(folder, manifest):
            return folder
        staging = self._versions / f".{secrets.token_hex(8)}"
        staging.mkdir()
        try:
            for file in manifest.files:
                os.link(self._path(file.blob), staging / file.name)
            self._swap_in(staging, folder, manifest)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        return folder

    def prune(self, keep: Collection[str]) -> None:
        with self._lock(fcntl.LOCK_EX) as is_held:
            if not is_held:
                return
            for entry in self._versions.iterdir():
                if entry.is_file() and target_of(entry) not in keep:
                    entry.unlink()
                elif entry.is_dir() and entry.name not in keep:
                    shutil.rmtree(entry, ignore_errors=True)
            staged = {path.stat().st_ino for path in self._versions.glob("*/*")}
            for blob in self._blobs.iterdir():
                found = blob.stat()
                is_resumable = time.time() - found.st_mtime < RESUME_WINDOW_S
                is_partial = blob.suffix == PARTIAL and is_resumable
                if found.st_ino not in staged and not is_partial:
                    blob.unlink()

    def delta_path(self, step: DeltaEntry) -> Path:
        """Where a fetched delta is, until `prune` deletes it."""
        return self._path(step.blob)

    def _damaged_path(self, file: FileEntry) -> Path:
        return self._path(file.blob, DAMAGED)

    def _path(self, digest: str, suffix: str = "") -> Path:
        """The only way from a name on the wire to a path."""
        return self._blobs / f"{_require_digest(digest)}{suffix}"

    @contextmanager
    def _lock(self, kind: int) -> Generator[bool]:
        with (self._root / "lock").open("ab") as lock:
            yield try_lock(lock.fileno(), kind)

    def _is_staged(self, folder: Path, manifest: SnapshotManifest) -> bool:
        """True if the folder contains exactly the inodes that were just verified."""
        try:
            return set(os.listdir(folder)) == {file.name for file in manifest.files} and all(
                os.path.samestat(os.lstat(folder / file.name), os.lstat(self._path(file.blob)))
                for file in manifest.files
            )
        except FileNotFoundError:
            return False

    def _swap_in(self, staging: Path, folder: Path, manifest: SnapshotManifest) -> None:
        try:
            staging.rename(folder)
        except OSError:
            if self._is_staged(folder, manifest):  # another pull of this version finished first
                return
            damaged = self._versions / f".{secrets.token_hex(8)}"
            folder.rename(damaged)
            staging.rename(folder)
            shutil.rmtree(damaged, ignore_errors=True)


def _require_digest(text: str) -> str:
    if not is_digest(text):
        raise WeightsError(
            f"{text[:80]!r} is not a BLAKE3 digest, so it names no file of the cache; the weight "
            "server that sent it is damaged or hostile: remove it from this node's servers"
        )
    return text


async def run_uncancelled(work: Callable[..., Result], *args: object) -> Result:
    """Run in a thread. A cancelled caller waits for the thread to end, so that it never changes a
    file without the lock, or a blob verified since."""
    thread = asyncio.ensure_future(asyncio.to_thread(work, *args))
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        await asyncio.wait([thread])
        raise


def _is_file_at(descriptor: int, path: Path) -> bool:
    """False if an earlier holder of the lock renamed the file to its final name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False
