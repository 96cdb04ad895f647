# SPDX-License-Identifier: Apache-2.0
"""A relay's folder of blobs, each in pieces that come in any order, within a bound of bytes.

Owns files, room and digests. Nothing is synced to disk: a blob that an earlier process left is
digested before it is used again, and what it had not finished is dropped. Knows no network.
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

from penstock.errors import ConfigError, NotFound, Unreachable
from penstock.weights.manifest import is_digest
from penstock.weights.store import open_regular

PIECE_BYTES = 1 << 20
"""Asked for at once. Its bytes pass on as they come, so its size is nobody's delay."""
MANIFEST = ".json"
"""Ends the name of a cached manifest; a blob's name is its digest alone."""
NO_ROOM_RETRY_S = 1.0
"""When to ask again for a blob that found no room."""


class CachedBlob:
    """One blob or manifest in the cache, a file whose holes close: each piece from its front on."""

    def __init__(
        self, name: str, path: Path, num_bytes: int, *, is_unverified: bool = False
    ) -> None:
        self.name = name
        self.path = path
        self.num_bytes = num_bytes
        self.num_users = 0
        self.is_unverified = is_unverified
        """By an earlier process, and not digested since."""
        num_pieces = 0 if is_unverified else -(-num_bytes // PIECE_BYTES)
        self._next_byte = {piece: piece * PIECE_BYTES for piece in range(num_pieces)}
        """Of each piece that is not complete, the byte after the last that is there."""

    @property
    def digest(self) -> str:
        return self.name.removesuffix(MANIFEST)

    @property
    def is_complete(self) -> bool:
        return not self._next_byte

    def missing(self, piece: int) -> tuple[int, int]:
        """The first byte of a piece that is not there, and the one after its last."""
        end = min((piece + 1) * PIECE_BYTES, self.num_bytes)
        return self._next_byte.get(piece, end), end

    def advance(self, piece: int, num_bytes: int) -> None:
        """So many more were written."""
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
        try:
            view = memoryview(data)
            while view:
                num_written = os.pwrite(descriptor, view, start)
                start, view = start + num_written, view[num_written:]
        finally:
            os.close(descriptor)

    def open(self) -> BinaryIO:
        return open_regular(self.path)

    def matches_digest(self) -> bool:
        """Has the file the digest of its name?"""
        digest = blake3()
        with self.open() as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
        return digest.hexdigest() == self.digest


class PieceCache:
    """One process at a time. All but `CachedBlob`'s own file access belongs to the event loop."""

    def __init__(self, root: Path, *, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._whole = root / "whole"
        self._incoming = root / "incoming"
        self._lock = _lock(root)
        shutil.rmtree(self._incoming, ignore_errors=True)
        self._whole.mkdir(exist_ok=True)
        self._incoming.mkdir()
        self._cached = {cached.name: cached for cached in _load_existing(self._whole)}
        """Least recently used first."""
        self._make_room(0)

    @property
    def num_bytes(self) -> int:
        """Of all that is here or has its room kept."""
        return sum(cached.num_bytes for cached in self._cached.values())

    def find(self, name: str) -> CachedBlob | None:
        cached = self._cached.pop(name, None)
        if cached is not None:
            self._cached[name] = cached
        return cached

    def admit(self, name: str, num_bytes: int) -> CachedBlob:
        """Room for a blob of which nothing is here yet."""
        if num_bytes > self.max_bytes:
            raise NotFound(
                f"{name} has {num_bytes} bytes and this relay keeps at most {self.max_bytes}; give "
                "it more room, or take this blob from the origin"
            )
        if not self._make_room(num_bytes):
            raise Unreachable(
                f"no room for {name} ({num_bytes} bytes): everything in this relay's cache of "
                f"{self.max_bytes} bytes is being read; give it more room",
                retry_after_s=NO_ROOM_RETRY_S,
            )
        cached = CachedBlob(name, self._incoming / f"{name}.{secrets.token_hex(4)}", num_bytes)
        cached.path.touch(0o644)
        self._cached[name] = cached
        return cached

    def promote(self, cached: CachedBlob) -> None:
        """It was digested and is right: from now on it outlives this process."""
        if not cached.is_unverified:
            cached.path = cached.path.rename(self._whole / cached.name)
        cached.is_unverified = False

    def drop(self, cached: CachedBlob) -> None:
        """Whoever has it open reads on."""
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
            f"{root} is the cache of another relay that runs; give each a folder of its own"
        ) from None
    return lock


def _load_existing(folder: Path) -> list[CachedBlob]:
    """What an earlier process settled, the oldest first."""
    found = [
        (path.stat(), path)
        for path in folder.iterdir()
        if is_digest(path.name.removesuffix(MANIFEST)) and path.is_file()
    ]
    found.sort(key=lambda entry: entry[0].st_mtime)
    return [CachedBlob(path.name, path, stat.st_size, is_unverified=True) for stat, path in found]
