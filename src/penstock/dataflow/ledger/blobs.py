# SPDX-License-Identifier: Apache-2.0
"""Claim-check blobs: what is too long for a record lies in a file named by its BLAKE3 digest.

An upload goes to disk piece by piece and may be resumed; it has its name only after its content
was hashed and synced, so whoever sees a blob sees all of it. Knows nothing of rows; who refers to
a blob, its caller says. Every method blocks and belongs off the event loop, `claim` excepted.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

from blake3 import blake3

from penstock.errors import BadRequest, Conflict, NotFound, StorageFull, TooLarge

MAX_BLOB_BYTES = 1 << 30
UNREFERENCED_TTL_S = 86_400.0
"""An upload that rests for so long is given up; so is a blob that no record names."""
DISK_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
RETRY_S = 5.0

FindReferenced = Callable[[list[str]], set[str]]
"""Which of these digests some record names."""


class BlobStore:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._partial = folder / "partial"
        self._partial.mkdir(parents=True, exist_ok=True)
        self._mtime_lock = threading.Lock()
        """Between looking at a file's age and removing it, nobody may renew it."""

    def path(self, digest: str) -> Path:
        _check_digest(digest)
        return self._folder / digest[:2] / digest

    def held(self, digest: str) -> tuple[int, bool]:
        """Bytes that are here, and whether that is all of it. Who asks means to use it, so it is
        kept for another day."""
        for path, is_complete in ((self.path(digest), True), (self._partial / digest, False)):
            try:
                with self._mtime_lock:
                    os.utime(path)
                return path.stat().st_size, is_complete
            except FileNotFoundError:
                continue
        return 0, False

    def claim(self, digest: str) -> int:
        """Size of a complete blob that a record is about to name; two system calls."""
        size, is_complete = self.held(digest)
        if not is_complete:
            raise BadRequest(f"no blob {digest}; put it with PUT /v1/blobs/{digest} first")
        return size

    def read(self, digest: str) -> bytes:
        """The whole of it, checked. For those who need it in memory anyway."""
        try:
            data = self.path(digest).read_bytes()
        except FileNotFoundError:
            raise NotFound(f"no blob {digest} here") from None
        if blake3(data).hexdigest() != digest:
            raise NotFound(f"blob {digest} is damaged on disk; put it again after removing it")
        return data

    # --- uploads ------------------------------------------------------------------------------

    def begin(self, digest: str, offset: int, size: int) -> int:
        """A descriptor to write to from `offset`; close it with `os.close`."""
        _check_digest(digest)
        if not 0 <= offset <= size or size > MAX_BLOB_BYTES:
            raise TooLarge(f"offset {offset} of {size} bytes; a blob has up to {MAX_BLOB_BYTES}")
        with _space():
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(self._partial / digest, flags, 0o600)
        held = os.fstat(descriptor).st_size
        if offset > held:
            os.close(descriptor)
            raise Conflict(f"blob {digest} has {held} bytes here, not {offset}; go on from {held}")
        return descriptor

    def write(self, descriptor: int, offset: int, data: bytes) -> int:
        """Where the next piece goes."""
        view = memoryview(data)
        with _space():
            while view:
                written = os.pwrite(descriptor, view, offset)
                view, offset = view[written:], offset + written
        return offset

    def finish(self, digest: str, size: int) -> None:
        """Hash, sync and name an upload that has all its bytes."""
        source, target = self._partial / digest, self.path(digest)
        if self.held(digest)[1]:  # somebody else was first; the same digest is the same content
            source.unlink(missing_ok=True)
            return
        try:
            found = source.stat().st_size
            actual = blake3(max_threads=1).update_mmap(source).hexdigest()
        except FileNotFoundError:
            raise Conflict(f"the upload of blob {digest} was given up; begin again at 0") from None
        if found != size or actual != digest:
            source.unlink(missing_ok=True)
            raise BadRequest(
                f"{found} bytes arrived with digest {actual}, not {size} with {digest}; "
                "nothing was kept, begin again at 0"
            )
        try:
            _sync(source)
        except OSError:  # the next sync would not see what this one lost
            source.unlink(missing_ok=True)
            raise
        target.parent.mkdir(exist_ok=True)
        os.replace(source, target)
        for folder in (target.parent, self._folder):
            _sync(folder)

    # --- keeping house ------------------------------------------------------------------------

    def sweep(self, find_referenced: FindReferenced, keep_s: float = UNREFERENCED_TTL_S) -> int:
        """Remove uploads and unnamed blobs that nobody touched for a day; returns how many."""
        before = time.time() - keep_s  # files carry the system's time
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


def _check_digest(digest: str) -> None:
    if len(digest) != 64 or not all(c in "0123456789abcdef" for c in digest):
        raise BadRequest(f"{digest[:80]!r} is no BLAKE3 digest; it reads 64 characters 0-9a-f")


def _older(folder: Path, before: float) -> Generator[Path]:
    for entry in os.scandir(folder):
        if entry.is_file(follow_symlinks=False) and entry.stat().st_mtime < before:
            yield Path(entry.path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _space() -> Generator[None]:
    """A full disk is the caller's to wait for; what was written so far stays and is resumed."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL_ERRNOS:
            raise
        raise StorageFull(f"no space for this blob: {error}", retry_after_s=RETRY_S) from error
