# SPDX-License-Identifier: Apache-2.0
"""A blob on its way into a cache: pieces come in any order, and a killed process loses none.

Owns the file they are written to, at their places, and behind the blob's own bytes a mark for each
that is there. A mark is written after its piece, so it never speaks of bytes that are not in the
file. Without the marks the file is complete: its bytes all came, right or wrong, and `finish` says
which. The caller holds the lock.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from penstock.errors import WeightsError
from penstock.weights.manifest import FileEntry
from penstock.weights.store import open_regular
from penstock.weights.tensors import Layout, Scan, TensorEntry, read_layout, scan

ByteRange = tuple[int, int]
"""First byte, and the one after the last."""

MIN_PIECE_BYTES = 128 << 10
MAX_PIECE_BYTES = 4 << 20
MAX_PIECES = 512
"""Until they are too large. The last pieces come over fewer connections than the rest, which costs
the more the larger they are; each costs a request."""
_SIZE_BYTES = 8


def piece_bytes(num_bytes: int) -> int:
    """In which pieces a blob of this size is fetched."""
    return min(max(-(-num_bytes // MAX_PIECES), MIN_PIECE_BYTES), MAX_PIECE_BYTES)


class Partial:
    """Works by name: nothing here keeps the file open while nobody calls."""

    def __init__(
        self, path: Path, final: Path, file: FileEntry, tensors: Mapping[str, TensorEntry]
    ) -> None:
        self._path = path
        self._final = final
        self._file = file
        self._tensors = tensors
        self._piece_bytes = piece_bytes(file.bytes)
        self._num_pieces = -(-file.bytes // self._piece_bytes)
        self._damaged: list[ByteRange] = []
        """Of a complete file, what has to come again."""

    @property
    def is_complete(self) -> bool:
        return self._path.stat().st_size == self._file.bytes

    def missing(self) -> list[ByteRange]:
        """In pieces, each to be written by one call; starts the file if need be."""
        if self.is_complete:
            return self._damaged
        marks = self._marks()
        if marks is None:
            self._start_over()
            marks = bytes(self._num_pieces)
        return [self._piece_range(number) for number, mark in enumerate(marks) if not mark]

    @property
    def num_missing_bytes(self) -> int:
        """Without starting anything."""
        if self.is_complete:
            return 0
        marks = self._marks() or bytes(self._num_pieces)
        byte_ranges = (self._piece_range(number) for number, mark in enumerate(marks) if not mark)
        return sum(end - start for start, end in byte_ranges)

    def start_from(self, wrong: Path) -> None:
        """Begin with the bytes of a file that is nearly this one, unless there are some already."""
        marks = self._marks()
        with suppress(FileNotFoundError):
            if not self.is_complete and not (marks and any(marks)):
                shutil.copyfile(wrong, self._path)
            wrong.unlink()

    def write(self, start: int, piece: bytes) -> None:
        with self._path.open("r+b") as out:
            out.seek(start)
            out.write(piece)
            out.flush()
            if os.fstat(out.fileno()).st_size > self._file.bytes:
                number = start // self._piece_bytes
                if self._piece_range(number) == (start, start + len(piece)):
                    out.seek(self._file.bytes + _SIZE_BYTES + number)
                    out.write(b"\1")

    def finish(self) -> Scan | None:
        """Give the blob its name if it is the right one; else its damaged parts are missing now, or
        all of it when nobody can tell which they are."""
        os.truncate(self._path, self._file.bytes)
        found = verify(self._path, self._file)
        if found is not None:
            # Engines open hard links of it; a stray write must not reach the other versions.
            self._path.chmod(0o444)
            self._path.rename(self._final)
            return found
        self._damaged = damaged(self._path, self._file, self._tensors)
        if not self._damaged:
            self._start_over()
        return None

    def drop(self) -> None:
        self._path.unlink(missing_ok=True)

    def _piece_range(self, number: int) -> ByteRange:
        start = number * self._piece_bytes
        return start, min(start + self._piece_bytes, self._file.bytes)

    def _marks(self) -> bytes | None:
        """None when this file was not begun, or in pieces of another size."""
        with open_regular(self._path) as file:
            file.seek(self._file.bytes)
            record = file.read(_SIZE_BYTES + self._num_pieces + 1)
        size, marks = record[:_SIZE_BYTES], record[_SIZE_BYTES:]
        is_ours = size == self._piece_bytes.to_bytes(_SIZE_BYTES, "little")
        return marks if is_ours and len(marks) == self._num_pieces else None

    def _start_over(self) -> None:
        self._damaged = []
        with self._path.open("r+b") as out:
            out.truncate(0)
            out.truncate(self._file.bytes + _SIZE_BYTES + self._num_pieces)
            out.seek(self._file.bytes)
            out.write(self._piece_bytes.to_bytes(_SIZE_BYTES, "little"))


def verify(path: Path, file: FileEntry) -> Scan | None:
    """None when the bytes are not those of the digest; WeightsError when they are, and wrong."""
    try:
        with open_regular(path) as blob:
            mtime_ns = os.fstat(blob.fileno()).st_mtime_ns
            found = replace(scan(blob, file.name), mtime_ns=mtime_ns)
    except WeightsError:
        with open_regular(path) as blob:
            if scan(blob, "").blob == file.blob:
                raise
        return None
    return found if (found.blob, found.num_bytes) == (file.blob, file.bytes) else None


def damaged(path: Path, file: FileEntry, tensors: Mapping[str, TensorEntry]) -> list[ByteRange]:
    """Which bytes of weights with the wrong digest are to blame, in pieces; none when the file does
    not say where its tensors lie."""
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
    """The tensors with another digest than promised; the head, when it speaks of other tensors than
    promised, or when there is nothing else to blame."""
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


def _in_pieces(byte_ranges: Iterable[ByteRange], most_bytes: int) -> Iterable[ByteRange]:
    for start, end in byte_ranges:
        yield from pairwise([*range(start, end, most_bytes), end])
