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
FULL_S = 1.0
"""When to ask again for a blob that found no room."""


class Held:
    """One blob or manifest in the cache, a file whose holes close: each piece from its front on."""

    def __init__(self, name: str, path: Path, num_bytes: int, *, is_left: bool = False) -> None:
        self.name = name
        self.path = path
        self.num_bytes = num_bytes
        self.num_users = 0
        self.is_left = is_left
        """By an earlier process, and not digested since."""
        num_pieces = 0 if is_left else -(-num_bytes // PIECE_BYTES)
        self._there = {piece: piece * PIECE_BYTES for piece in range(num_pieces)}
        """Of each piece that is not complete, the byte after the last that is there."""

    @property
    def digest(self) -> str:
        return self.name.removesuffix(MANIFEST)

    @property
    def is_complete(self) -> bool:
        return not self._there

    def missing(self, piece: int) -> tuple[int, int]:
        """The first byte of a piece that is not there, and the one after its last."""
        end = min((piece + 1) * PIECE_BYTES, self.num_bytes)
        return self._there.get(piece, end), end

    def grow(self, piece: int, num_bytes: int) -> None:
        """So many more were written."""
        start, end = self.missing(piece)
        self._there[piece] = start + num_bytes
        if start + num_bytes == end:
            del self._there[piece]

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

    def is_right(self) -> bool:
        """Has the file the digest of its name?"""
        digest = blake3()
        with self.open() as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
        return digest.hexdigest() == self.digest


class PieceCache:
    """One process at a time. All but `Held`'s own file access belongs to the event loop."""

    def __init__(self, root: Path, *, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._whole = root / "whole"
        self._incoming = root / "incoming"
        self._lock = _lock(root)
        shutil.rmtree(self._incoming, ignore_errors=True)
        self._whole.mkdir(exist_ok=True)
        self._incoming.mkdir()
        self._held = {held.name: held for held in _left(self._whole)}
        """Least recently used first."""
        self._make_room(0)

    @property
    def num_bytes(self) -> int:
        """Of all that is here or has its room kept."""
        return sum(held.num_bytes for held in self._held.values())

    def find(self, name: str) -> Held | None:
        held = self._held.pop(name, None)
        if held is not None:
            self._held[name] = held
        return held

    def admit(self, name: str, num_bytes: int) -> Held:
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
                retry_after_s=FULL_S,
            )
        held = Held(name, self._incoming / f"{name}.{secrets.token_hex(4)}", num_bytes)
        held.path.touch(0o644)
        self._held[name] = held
        return held

    def settle(self, held: Held) -> None:
        """It was digested and is right: from now on it outlives this process."""
        if not held.is_left:
            held.path = held.path.rename(self._whole / held.name)
        held.is_left = False

    def drop(self, held: Held) -> None:
        """Whoever has it open reads on."""
        if self._held.get(held.name) is held:
            del self._held[held.name]
            held.path.unlink(missing_ok=True)

    def close(self) -> None:
        self._lock.close()

    def _make_room(self, num_bytes: int) -> bool:
        excess = self.num_bytes + num_bytes - self.max_bytes
        for held in [held for held in self._held.values() if not held.num_users]:
            if excess <= 0:
                break
            self.drop(held)
            excess -= held.num_bytes
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


def _left(folder: Path) -> list[Held]:
    """What an earlier process settled, the oldest first."""
    found = [
        (path.stat(), path)
        for path in folder.iterdir()
        if is_digest(path.name.removesuffix(MANIFEST)) and path.is_file()
    ]
    found.sort(key=lambda entry: entry[0].st_mtime)
    return [Held(path.name, path, stat.st_size, is_left=True) for stat, path in found]
