# SPDX-License-Identifier: Apache-2.0
"""A node's folder of pulled weights: verified blobs, cut-off ones to resume, wrong ones to mend,
staged versions.

Owns locks, so that tasks and processes may share it, and atomic names: `blobs/DIGEST` and
`versions/DIGEST/` appear complete. Nothing is synced to disk: whatever a crash leaves is digested
again before use. Knows no network.
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

from penstock.errors import WeightsError
from penstock.weights.deltas.chain import DeltaEntry
from penstock.weights.deltas.file_delta import apply_in_place
from penstock.weights.manifest import FileEntry, SnapshotManifest, is_digest
from penstock.weights.pulling.partial import Partial, verify
from penstock.weights.store import open_regular
from penstock.weights.tensors import Scan, TensorEntry

LOCK_POLL_S = 0.02
RESUME_WINDOW_S = 3600.0
"""A cut-off blob nobody touched for so long is not worth resuming."""
PARTIAL = ".partial"
DAMAGED = ".wrong"
"""Was taken for the blob and is not: all but a few tensors of it may be of use."""
MAX_BASES = 64
"""As many as a front looks at."""


class BlobCache:
    def __init__(self, root: Path) -> None:
        self._root = root
        self._blobs = root / "blobs"
        self._versions = root / "versions"
        self._blobs.mkdir(parents=True, exist_ok=True)
        self._versions.mkdir(exist_ok=True)

    @asynccontextmanager
    async def in_use(self) -> AsyncGenerator[None]:
        """While any pull is inside, `prune` deletes nothing."""
        while True:
            with self._lock(fcntl.LOCK_SH) as is_held:
                if is_held:
                    yield
                    return
            await asyncio.sleep(LOCK_POLL_S)

    def has(self, file: FileEntry) -> bool:
        """Something lies there under this name; `check` says whether it is any good."""
        return (self._blobs / file.blob).exists()

    def check(self, file: FileEntry) -> Scan | None:
        """Digest the cached blob; one that is damaged counts as absent."""
        path = self._blobs / file.blob
        try:
            found = verify(path, file)
            if found is None:
                path.rename(self._damaged_path(file))
        except FileNotFoundError:
            return None
        return found

    def possible_bases(self, file: FileEntry) -> list[str]:
        """Blobs from which a delta to this one may lead: weights of the same size."""
        if not file.name.endswith(".safetensors"):
            return []
        return sorted(
            blob.name
            for blob in self._blobs.iterdir()
            if is_digest(blob.name) and blob.stat().st_size == file.bytes
        )[:MAX_BASES]

    def make(self, file: FileEntry, steps: Sequence[DeltaEntry]) -> Scan:
        """The blob from one that is here, along deltas that are here; WeightsError if they lead
        elsewhere."""
        made = self._blobs / f"{secrets.token_hex(8)}{PARTIAL}"
        try:
            shutil.copyfile(self._blobs / steps[0].base, made)
            for step in steps:
                with open_regular(self._blobs / step.blob) as delta:
                    apply_in_place(made, delta, base_blob=step.base)
            found = verify(made, file)
            if found is None:
                made.rename(self._damaged_path(file))
                raise WeightsError(f"{file.name}: its deltas lead to other bytes than {file.blob}")
            made.chmod(0o444)
            made.rename(self._blobs / file.blob)
            return found
        finally:
            made.unlink(missing_ok=True)

    @asynccontextmanager
    async def partial(
        self, file: FileEntry, tensors: Mapping[str, TensorEntry]
    ) -> AsyncGenerator[Partial]:
        """The blob on its way in, for one writer at a time; it keeps what an earlier writer had."""
        path = self._blobs / f"{file.blob}{PARTIAL}"
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            try:
                if _is_locked(descriptor, fcntl.LOCK_EX) and _is_file_at(descriptor, path):
                    partial = Partial(path, self._blobs / file.blob, file, tensors)
                    if self._damaged_path(file).exists():
                        await run_uncancelled(partial.start_from, self._damaged_path(file))
                    yield partial
                    return
            finally:
                os.close(descriptor)
            await asyncio.sleep(LOCK_POLL_S)

    def stage(self, digest: str, manifest: SnapshotManifest) -> Path:
        """Hard-link the blobs into a folder that appears complete or not at all."""
        folder = self._versions / digest
        if self._is_staged(folder, manifest):
            return folder
        staging = self._versions / f".{secrets.token_hex(8)}"
        staging.mkdir()
        try:
            for file in manifest.files:
                os.link(self._blobs / file.blob, staging / file.name)
            self._swap_in(staging, folder, manifest)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        return folder

    def prune(self, keep: Collection[str]) -> None:
        with self._lock(fcntl.LOCK_EX) as is_held:
            if not is_held:
                return
            for folder in self._versions.iterdir():
                if folder.name not in keep:
                    shutil.rmtree(folder, ignore_errors=True)
            for blob in self._blobs.iterdir():
                found = blob.stat()
                is_resumable = time.time() - found.st_mtime < RESUME_WINDOW_S
                if found.st_nlink == 1 and not (blob.suffix == PARTIAL and is_resumable):
                    blob.unlink()

    def _damaged_path(self, file: FileEntry) -> Path:
        return self._blobs / f"{file.blob}{DAMAGED}"

    @contextmanager
    def _lock(self, kind: int) -> Generator[bool]:
        descriptor = os.open(self._root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            yield _is_locked(descriptor, kind)
        finally:
            os.close(descriptor)

    def _is_staged(self, folder: Path, manifest: SnapshotManifest) -> bool:
        """The folder holds the very inodes that were just verified, and nothing else."""
        try:
            return set(os.listdir(folder)) == {file.name for file in manifest.files} and all(
                os.path.samestat(os.lstat(folder / file.name), os.lstat(self._blobs / file.blob))
                for file in manifest.files
            )
        except FileNotFoundError:
            return False

    def _swap_in(self, staging: Path, folder: Path, manifest: SnapshotManifest) -> None:
        try:
            staging.rename(folder)
        except OSError:
            if self._is_staged(folder, manifest):  # another pull of this version was first
                return
            damaged = self._versions / f".{secrets.token_hex(8)}"
            folder.rename(damaged)
            staging.rename(folder)
            shutil.rmtree(damaged, ignore_errors=True)


async def run_uncancelled(work: Callable[..., object], *args: object) -> None:
    """In a thread. Whoever is cancelled waits for it, so that nothing is written without the lock
    or to a blob that has been verified since."""
    thread = asyncio.ensure_future(asyncio.to_thread(work, *args))
    try:
        await asyncio.shield(thread)
    except asyncio.CancelledError:
        await asyncio.wait([thread])
        raise


def _is_locked(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_file_at(descriptor: int, path: Path) -> bool:
    """Unset when an earlier holder of the lock gave the file its final name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False
