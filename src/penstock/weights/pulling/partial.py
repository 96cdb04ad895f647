# SPDX-License-Identifier: Apache-2.0
"""A partially fetched blob: pieces arrive in any order, and a killed process loses none of them.

Owns the file: pieces are written at their offsets, and after the blob's bytes follows one mark per
finished piece. A mark is written after its piece, so it never claims missing bytes. A file without
marks is complete: all bytes have arrived, and `finish` verifies them. The caller holds the lock.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

from penstock.durable import open_regular
from penstock.errors import WeightsError
from penstock.weights.manifest import FileEntry
from penstock.weights.tensors import (
    Layout,
    Scan,
    TensorEntry,
    has_content,
    read_layout,
    scan,
)

ByteRange = tuple[int, int]
"""First byte and end (exclusive)."""

MIN_PIECE_BYTES = 12 << 10
"""What a new or a rested connection may send before the first answer: ten packets, with headers
and TLS."""
SMALL_PIECE_BYTES = 128 << 10
MAX_PIECE_BYTES = 4 << 20
MIN_PIECES, MAX_PIECES = 32, 512
"""Target numbers of pieces, within the size limits. Large pieces waste time at the end, when fewer
connections are busy; small ones cost more requests. A small blob goes over many connections at
once: over a long link each would take several round trips to come up to speed."""
_SIZE_BYTES = 8


def piece_bytes(num_bytes: int) -> int:
    """Piece size for a blob of this size."""
    small = min(max(-(-num_bytes // MIN_PIECES), MIN_PIECE_BYTES), SMALL_PIECE_BYTES)
    return min(max(-(-num_bytes // MAX_PIECES), small), MAX_PIECE_BYTES)


class Partial:
    """Opens the file by path on each call; keeps no file handle."""

    def __init__(
        self, path: Path, final: Path, file: FileEntry, tensors: Mapping[str, TensorEntry]
    ) -> None:
        self._path = path
        self._final = final
        self.file = file
        self._tensors = tensors
        self._piece_bytes = piece_bytes(file.bytes)
        self._num_pieces = -(-file.bytes // self._piece_bytes)
        self._damaged: list[ByteRange] = []
        """Damaged ranges of a complete file, to be fetched again."""

    @property
    def is_complete(self) -> bool:
        return self._path.stat().st_size == self.file.bytes

    def missing(self) -> list[ByteRange]:
        """Missing ranges, each to be written by one call; creates the file if needed."""
        if self.is_complete:
            return self._damaged
        marks = self._marks()
        if marks is None:
            self._start_over()
            marks = bytes(self._num_pieces)
        return [self._piece_range(number) for number, mark in enumerate(marks) if not mark]

    def start_from(self, damaged: Path) -> None:
        """Start from the bytes of an almost correct file, unless this one already has data."""
        marks = self._marks()
        with suppress(FileNotFoundError):
            if not self.is_complete and not (marks and any(marks)):
                shutil.copyfile(damaged, self._path)
            damaged.unlink()

    def write(self, start: int, piece: bytes) -> None:
        with _open_writable(self._path) as out:
            out.seek(start)
            out.write(piece)
            out.flush()
            if os.fstat(out.fileno()).st_size > self.file.bytes:
                number = start // self._piece_bytes
                if self._piece_range(number) == (start, start + len(piece)):
                    out.seek(self.file.bytes + _SIZE_BYTES + number)
                    out.write(b"\1")

    def finish(self) -> Scan | None:
        """Rename the blob to its final name if it verifies. Otherwise its damaged ranges, or the
        full file if they cannot be located, become missing."""
        with _open_writable(self._path) as out:
            out.truncate(self.file.bytes)
        found = verify(self._path, self.file)
        if found is not None:
            # Engines open hard links to it; a stray write must not reach other versions.
            self._path.chmod(0o444)
            self._path.rename(self._final)
            return found
        self._damaged = damaged_ranges(self._path, self.file, self._tensors)
        if not self._damaged:
            self._start_over()
        return None

    def drop(self) -> None:
        self._path.unlink(missing_ok=True)

    def _piece_range(self, number: int) -> ByteRange:
        start = number * self._piece_bytes
        return start, min(start + self._piece_bytes, self.file.bytes)

    def _marks(self) -> bytes | None:
        """None if this file was not started, or uses another piece size."""
        with open_regular(self._path) as file:
            file.seek(self.file.bytes)
            record = file.read(_SIZE_BYTES + self._num_pieces + 1)
        size, marks = record[:_SIZE_BYTES], record[_SIZE_BYTES:]
        is_ours = size == self._piece_bytes.to_bytes(_SIZE_BYTES, "little")
        return marks if is_ours and len(marks) == self._num_pieces else None

    def _start_over(self) -> None:
        self._damaged = []
        with _open_writable(self._path) as out:
            out.truncate(0)
            out.truncate(self.file.bytes + _SIZE_BYTES + self._num_pieces)
            out.seek(self.file.bytes)
            out.write(self._piece_bytes.to_bytes(_SIZE_BYTES, "little"))


def _open_writable(path: Path) -> BinaryIO:
    """Never through a link, which would lead out of the cache."""
    return open(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC), "r+b")


def verify(path: Path, file: FileEntry, sole: Sequence[TensorEntry] = ()) -> Scan | None:
    """Scan of the file; None if it does not match the digest. Raises WeightsError if it matches but
    is malformed.

    sole: all tensors of the version, if this is its only file with weights. They then say what
    every byte of it must be, and their digests suffice."""
    try:
        with open_regular(path) as blob:
            mtime_ns = os.fstat(blob.fileno()).st_mtime_ns
            if sole and has_content(blob, sole):
                found = Scan(blob=file.blob, num_bytes=file.bytes, tensors=tuple(sole))
            else:
                found = scan(blob, file.name, num_bytes=file.bytes)
            found = replace(found, mtime_ns=mtime_ns)
    except WeightsError:
        with open_regular(path) as blob:
            if scan(blob, "").blob == file.blob:
                raise
        return None
    return found if (found.blob, found.num_bytes) == (file.blob, file.bytes) else None


def damaged_ranges(
    path: Path, file: FileEntry, tensors: Mapping[str, TensorEntry]
) -> list[ByteRange]:
    """Damaged ranges of weights with the wrong digest, in pieces; empty if the header is
    unreadable."""
    if not file.name.endswith(".safetensors"):
        return []
    try:
        with open_regular(path) as blob:
            found = scan(blob, file.name)
        with open_regular(path) as blob:
            layout = read_layout(blob, file.name)
    except WeightsError:
        return []
    return list(_in_pieces(locate_damage(layout, found.tensors, tensors), piece_bytes(file.bytes)))


def locate_damage(
    layout: Layout, found: Sequence[TensorEntry], expected: Mapping[str, TensorEntry]
) -> list[ByteRange]:
    """Ranges of tensors with a wrong digest; the header, if it lists other tensors than expected or
    if no tensor is wrong."""
    head = (0, len(layout.head))
    known = [(tensor, expected.get(tensor.name)) for tensor in found]
    if any(
        other is None or (tensor.dtype, tensor.shape) != (other.dtype, other.shape)
        for tensor, other in known
    ):
        return [head]
    wrong = [tensor.name for tensor, other in known if tensor != other]
    return [(layout.byte_ranges[name].start, layout.byte_ranges[name].end) for name in wrong] or [
        head
    ]


def _in_pieces(byte_ranges: Iterable[ByteRange], max_bytes: int) -> Iterable[ByteRange]:
    for start, end in byte_ranges:
        yield from pairwise([*range(start, end, max_bytes), end])
