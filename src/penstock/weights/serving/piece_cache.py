# SPDX-License-Identifier: Apache-2.0
"""A relay's size-limited cache of blobs, each filled piece by piece in any order.

Owns files, space and verification. Nothing is synced to disk: a blob left by an earlier process is
verified before reuse, and an incomplete one is dropped. Does no networking.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from penstock.bounds import is_digest
from penstock.durable import open_regular
from penstock.errors import ConfigError, NotFound, Unreachable

PIECE_BYTES = 1 << 20
"""Size of one upstream request. Bytes are passed on as they arrive, so the size adds no latency."""
MANIFEST = ".json"
"""File suffix of a cached manifest; a blob is named by its digest alone."""
NO_ROOM_RETRY_S = 1.0
"""Retry-After for a blob that did not fit in the cache."""


class CachedBlob:
    """One blob or manifest in the cache: a sparse file filled piece by piece, each from its first
    byte."""

    def __init__(
        self, name: str, path: Path, num_bytes: int, *, is_unverified: bool = False
    ) -> None:
        self.name = name
        self.path = path
        self.num_bytes = num_bytes
        self.num_users = 0
        self.is_unverified = is_unverified
        """Left by an earlier process and not verified since."""
        num_pieces = 0 if is_unverified else -(-num_bytes // PIECE_BYTES)
        self._next_byte = {piece: piece * PIECE_BYTES for piece in range(num_pieces)}
        """For each incomplete piece, the first byte still missing."""

    @property
    def digest(self) -> str:
        return self.name.removesuffix(MANIFEST)

    @property
    def is_complete(self) -> bool:
        return not self._next_byte

    def missing(self, piece: int) -> tuple[int, int]:
        """First missing byte of a piece, and the end of the piece (exclusive)."""
        end = min((piece + 1) * PIECE_BYTES, self.num_bytes)
        return self._next_byte.get(piece, end), end

    def advance(self, piece: int, num_bytes: int) -> None:
        """Record that `num_bytes` more were written."""
        start, end = self.missing(piece)
        self._next_byte[piece] = start + num_bytes
        if start + num_bytes == end:
            del self._next_byte[piece]

    @contextmanager
    def in_use(self) -> Generator[None]:
        self.num_users += 1
        try:
            yield
        finally:
            self.num_users -= 1

    def write(self, start: int, data: bytes) -> None:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(descriptor, "wb") as file:
            file.seek(start)
            file.write(data)

    def open(self) -> BinaryIO:
        return open_regular(self.path)

    def matches_digest(self) -> bool:
        digest = blake3()
        with self.open() as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
        return digest.hexdigest() == self.digest


class PieceCache:
    """Used by one process at a time. Everything except `CachedBlob`'s file access runs on the event
    loop."""

    def __init__(self, root: Path, *, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._complete = root / "whole"
        self._incoming = root / "incoming"
        self._lock = _lock(root)
        shutil.rmtree(self._incoming, ignore_errors=True)
        self._complete.mkdir(exist_ok=True)
        self._incoming.mkdir()
        self._cached = {cached.name: cached for cached in _load_existing(self._complete)}
        """Least recently used first."""
        self._make_room(0)

    @property
    def num_bytes(self) -> int:
        """Bytes stored or reserved."""
        return sum(cached.num_bytes for cached in self._cached.values())

    def find(self, name: str) -> CachedBlob | None:
        cached = self._cached.pop(name, None)
        if cached is not None:
            self._cached[name] = cached
        return cached

    def admit(self, name: str, num_bytes: int) -> CachedBlob:
        """Reserve space for a new blob."""
        if num_bytes > self.max_bytes:
            raise NotFound(
                f"{name} has {num_bytes} bytes, more than this relay's cache of {self.max_bytes}; "
                "enlarge the cache, or fetch this blob from the origin"
            )
        if not self._make_room(num_bytes):
            raise Unreachable(
                f"no space for {name} ({num_bytes} bytes): everything in this relay's cache of "
                f"{self.max_bytes} bytes is being read; retry, or enlarge the cache",
                retry_after_s=NO_ROOM_RETRY_S,
            )
        cached = CachedBlob(name, self._incoming / f"{name}.{secrets.token_hex(4)}", num_bytes)
        cached.path.touch(0o644)
        self._cached[name] = cached
        return cached

    def promote(self, cached: CachedBlob) -> None:
        """Make a verified blob permanent, so that it survives a restart."""
        if not cached.is_unverified:
            cached.path = cached.path.rename(self._complete / cached.name)
        cached.is_unverified = False

    def drop(self, cached: CachedBlob) -> None:
        """Remove a blob; open readers can finish."""
        if self._cached.get(cached.name) is cached:
            del self._cached[cached.name]
            cached.path.unlink(missing_ok=True)

    def close(self) -> None:
        self._lock.close()

    def _make_room(self, num_bytes: int) -> bool:
        excess = self.num_bytes + num_bytes - self.max_bytes
        for cached in [cached for cached in self._cached.values() if not cached.num_users]:
            if excess <= 0:
                break
            self.drop(cached)
            excess -= cached.num_bytes
        return excess <= 0


def _lock(root: Path) -> BinaryIO:
    root.mkdir(parents=True, exist_ok=True)
    lock = (root / "lock").open("ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ConfigError(
            f"{root} is used by another running relay; give each relay a separate cache folder"
        ) from None
    return lock


def _load_existing(folder: Path) -> list[CachedBlob]:
    """Blobs completed by an earlier process, oldest first."""
    found = [
        (path.stat(), path)
        for path in folder.iterdir()
        if is_digest(path.name.removesuffix(MANIFEST)) and path.is_file()
    ]
    found.sort(key=lambda entry: entry[0].st_mtime)
    return [CachedBlob(path.name, path, stat.st_size, is_unverified=True) for stat, path in found]
