# SPDX-License-Identifier: Apache-2.0
"""Claim-check blobs: a value too large for a record is a file named by its BLAKE3 digest.

Uploads are written in pieces and can be resumed. Each owner has its own file, so no owner can spoil
the upload of another, and an upload has one writer at a time. A blob gets its name only after its
content was hashed and synced, and no writer is left then, so every visible blob is complete. Knows
nothing of rows; the caller reports which blobs are referenced. All methods except `claim` block and
must run off the event loop.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

from blake3 import blake3

from penstock.dataflow.ledger.segments import DISK_FULL_ERRNOS
from penstock.durable import read_regular, sync
from penstock.errors import BadRequest, Busy, Conflict, NotFound, StorageFull, TooLarge

MAX_BLOB_BYTES = 1 << 30
UNREFERENCED_TTL_S = 86_400.0
"""Uploads and unreferenced blobs are deleted after this time without access."""
RETRY_S = 5.0
BUSY_S = 1.0

FindReferenced = Callable[[list[str]], set[str]]
"""Returns the given digests that a record references."""


class BlobStore:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._partial = folder / "partial"
        self._partial.mkdir(parents=True, exist_ok=True)
        self._mtime_lock = threading.Lock()
        """A file must not be renewed between the check of its age and its removal."""

    def path(self, digest: str) -> Path:
        return _path(self._folder, digest)

    def _upload(self, digest: str, owner: str) -> Path:
        return self._partial / (f"{digest}.{owner}" if owner else digest)

    def uploads(self) -> Generator[tuple[str, str, int]]:
        """Owner, digest and bytes of each unfinished upload."""
        for entry in os.scandir(self._partial):
            digest, _, owner = entry.name.partition(".")
            yield owner, digest, entry.stat().st_size

    def held(self, digest: str, owner: str = "") -> tuple[int, bool]:
        """Bytes stored, and whether the blob is complete. Renews the blob for
        UNREFERENCED_TTL_S, since the caller is about to use it."""
        upload = self._upload(digest, owner)
        for path, is_complete in ((self.path(digest), True), (upload, False)):
            try:
                with self._mtime_lock:
                    os.utime(path)
                return path.stat().st_size, is_complete
            except FileNotFoundError:
                continue
        return 0, False

    def claim(self, digest: str) -> int:
        """Size of a complete blob that a record is about to reference; two system calls."""
        size, is_complete = self.held(digest)
        if not is_complete:
            raise BadRequest(f"no blob {digest}; upload it with PUT /v1/blobs/{digest} first")
        return size

    def read(self, digest: str) -> bytes:
        """The complete blob, verified against its digest."""
        return read_blob(self._folder, digest)

    # --- uploads ------------------------------------------------------------------------------

    def begin(self, digest: str, offset: int, size: int, owner: str = "") -> int:
        """Open the upload for writing at `offset`; close the descriptor with `os.close`. Raises
        Busy while another one is open."""
        _check_digest(digest)
        if not 0 <= offset <= size or size > MAX_BLOB_BYTES:
            raise TooLarge(
                f"offset {offset} of {size} bytes; a blob has at most {MAX_BLOB_BYTES} bytes"
            )
        with _space():
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(self._upload(digest, owner), flags, 0o600)
        try:
            self._lock(descriptor, digest, owner)
            held = os.fstat(descriptor).st_size
            if offset > held:
                raise Conflict(
                    f"blob {digest} has {held} bytes, not {offset}; continue at offset {held}"
                )
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _lock(self, descriptor: int, digest: str, owner: str) -> None:
        """Until the descriptor is closed: no other caller writes to the upload or publishes it."""
        busy = Busy(f"another upload of blob {digest} is open", retry_after_s=BUSY_S)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(descriptor), self._upload(digest, owner).stat()):
                raise busy  # it was published before it was locked
        except (BlockingIOError, FileNotFoundError):
            raise busy from None

    def write(self, descriptor: int, offset: int, data: bytes) -> int:
        """Write one piece; returns the offset of the next one."""
        view = memoryview(data)
        with _space():
            while view:
                written = os.pwrite(descriptor, view, offset)
                view, offset = view[written:], offset + written
        return offset

    def finish(self, digest: str, size: int, owner: str = "") -> None:
        """Hash, sync and publish an upload whose bytes have all arrived."""
        source, target = self._upload(digest, owner), self.path(digest)
        if self.held(digest)[1]:  # another upload finished first; same digest, same content
            source.unlink(missing_ok=True)
            return
        try:
            descriptor = os.open(source, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise Conflict(
                f"the upload of blob {digest} was abandoned; restart it at offset 0"
            ) from None
        try:
            self._lock(descriptor, digest, owner)
            self._publish(source, target, digest, size)
        finally:
            os.close(descriptor)

    def _publish(self, source: Path, target: Path, digest: str, size: int) -> None:
        found = source.stat().st_size
        actual = blake3(max_threads=1).update_mmap(source).hexdigest()
        if found != size or actual != digest:
            source.unlink(missing_ok=True)
            raise BadRequest(
                f"{found} bytes arrived with digest {actual}, not {size} with {digest}; "
                "nothing was kept; start again at offset 0"
            )
        try:
            sync(source)
        except OSError:  # a second fsync would not report the pages that this one lost
            source.unlink(missing_ok=True)
            raise
        target.parent.mkdir(exist_ok=True)
        os.replace(source, target)
        for folder in (target.parent, self._folder):
            sync(folder)

    # --- sweeping ------------------------------------------------------------------------

    def sweep(self, find_referenced: FindReferenced, keep_s: float = UNREFERENCED_TTL_S) -> int:
        """Delete uploads and unreferenced blobs unused for UNREFERENCED_TTL_S; returns their
        number."""
        before = time.time() - keep_s  # file times are wall-clock times
        num_removed = self._remove(_older(self._partial, before), before)
        for folder in self._folder.iterdir():
            if folder == self._partial or not folder.is_dir():
                continue
            old = {path.name: path for path in _older(folder, before)}
            named = find_referenced([*old]) if old else set[str]()
            unnamed = (path for digest, path in old.items() if digest not in named)
            num_removed += self._remove(unnamed, before)
        return num_removed

    def _remove(self, paths: Iterable[Path], before: float) -> int:
        num_removed = 0
        for path in paths:
            with self._mtime_lock:
                if path.stat().st_mtime < before:
                    path.unlink()
                    num_removed += 1
        return num_removed


def read_blob(folder: Path, digest: str) -> bytes:
    """As `BlobStore.read`, in a folder that may belong to another user: makes nothing there."""
    try:
        data = read_regular(_path(folder, digest), MAX_BLOB_BYTES)
    except FileNotFoundError:
        raise NotFound(f"no blob {digest}") from None
    if blake3(data).hexdigest() != digest:
        raise NotFound(f"blob {digest} is damaged on disk; delete its file, then upload it again")
    return data


def _path(folder: Path, digest: str) -> Path:
    _check_digest(digest)
    return folder / digest[:2] / digest


def _check_digest(digest: str) -> None:
    if len(digest) != 64 or not all(c in "0123456789abcdef" for c in digest):
        raise BadRequest(f"invalid BLAKE3 digest {digest[:80]!r}; expected 64 characters of 0-9a-f")


def _older(folder: Path, before: float) -> Generator[Path]:
    for entry in os.scandir(folder):
        if entry.is_file(follow_symlinks=False) and entry.stat().st_mtime < before:
            yield Path(entry.path)


@contextmanager
def _space() -> Generator[None]:
    """Turn a full disk into a retryable error; bytes written so far stay and can be resumed."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL_ERRNOS:
            raise
        raise StorageFull(f"no disk space for this blob: {error}", retry_after_s=RETRY_S) from error
