# SPDX-License-Identifier: Apache-2.0
"""Payload in append-only files: length and CRC32C per record, written once, read by range.

Ledger records hold the location of each payload, so a start scans nothing: it opens a new segment,
and bytes after the last committed record of an older one are unreferenced.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import crc32c

from penstock.durable import regular_descriptor, sync
from penstock.errors import StoreError

MAGIC = b"PSR1"
HEADER = struct.Struct("<4sII")
"""Magic, payload length, CRC32C of the payload."""
MAX_SEGMENT_BYTES = 256 << 20
MIN_SEGMENT_BYTES = 16 << 20
"""A sweep of compaction looks at a few segments: with smaller ones it could fall behind."""
MAX_PAYLOAD_BYTES = 1 << 30
"""A ledger that names a longer one is damaged."""
DISK_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
MAX_OPEN = 8
"""Segment files that a reader keeps open."""
RELEASE_GIL_BYTES = 4 << 20
"""Payload size from which a checksum takes milliseconds and releases the GIL."""
IOV_MAX = 1024
"""Maximum number of buffers in one writev."""


class DiskFull(StoreError):
    """The disk is full. Nothing was written; the same call may be repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    segment: int
    offset: int
    length: int
    """Payload bytes, without the header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPayload:
    """Payload with an assigned place, not on disk yet."""

    location: Location
    payload: bytes | memoryview


def segment_path(folder: Path, segment: int) -> Path:
    return folder / f"seg-{segment:08d}.dat"


def segment_bytes(max_kept_bytes: int) -> int:
    """Size of a segment where this much is kept for reading: the two newest are never compacted,
    so they must be small beside the bound."""
    return min(MAX_SEGMENT_BYTES, max(MIN_SEGMENT_BYTES, max_kept_bytes // 4))


def sizes(folder: Path) -> dict[int, int]:
    """Bytes on disk by segment."""
    return {
        int(path.stem.removeprefix("seg-")): path.stat().st_size
        for path in sorted(folder.glob("seg-*.dat"))
    }


def delete(folder: Path, segment: int) -> None:
    segment_path(folder, segment).unlink(missing_ok=True)
    sync(folder)


class SegmentAllocator:
    """Assigns each payload its place before it is written; runs on the event loop."""

    def __init__(self, first: int, max_bytes: int) -> None:
        """`first`: a segment that no process has used."""
        self.segment = first
        self._offset = 0
        self._max_bytes = max_bytes

    def place(self, payload: bytes | memoryview) -> PlacedPayload:
        if self._offset >= self._max_bytes:
            self.segment, self._offset = self.segment + 1, 0
        location = Location(segment=self.segment, offset=self._offset, length=len(payload))
        self._offset += HEADER.size + len(payload)
        return PlacedPayload(location=location, payload=payload)


def allocator(folder: Path, max_bytes: int | None = None) -> SegmentAllocator:
    """Starts after the newest segment: earlier ones may end in bytes of a crashed process."""
    folder.mkdir(parents=True, exist_ok=True)
    return SegmentAllocator(max(sizes(folder), default=0) + 1, max_bytes or MAX_SEGMENT_BYTES)


class SegmentWriter:
    """Appends chunks in the order they were placed; runs in the ledger's only writer thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._segment = 0
        self._descriptor = -1

    def append(self, chunks: Sequence[PlacedPayload]) -> None:
        """On disk when this returns. After `DiskFull` the same chunks may be appended again; any
        other error is final: the process must end, never retry and ack."""
        for segment, members in groupby(chunks, key=lambda chunk: chunk.location.segment):
            self._open(segment)
            _write_together(self._descriptor, [*members])
            os.fdatasync(self._descriptor)

    def _open(self, segment: int) -> None:
        if segment == self._segment:
            return
        path = segment_path(self._folder, segment)
        # No earlier process wrote here; this one may have, in a call that ended in `DiskFull`.
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            raise _as_disk_full(error) from error
        self.close()
        self._segment, self._descriptor = segment, descriptor
        sync(self._folder)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._segment, self._descriptor = 0, -1

    def __del__(self) -> None:
        self.close()


def encoded(chunks: Iterable[PlacedPayload]) -> list[bytes | memoryview]:
    """Header and payload of each chunk."""
    parts: list[bytes | memoryview] = []
    for chunk in chunks:
        header = HEADER.pack(MAGIC, chunk.location.length, _crc(chunk.payload))
        parts += (header, chunk.payload)
    return parts


def _write_together(descriptor: int, chunks: Sequence[PlacedPayload]) -> None:
    """Write everything, or raise `DiskFull` with the file truncated to its previous size."""
    parts = encoded(chunks)
    position = offset = chunks[0].location.offset
    try:
        for start in range(0, len(parts), IOV_MAX):
            position = _write_batch(descriptor, position, parts[start : start + IOV_MAX])
    except OSError as error:
        if error.errno in DISK_FULL_ERRNOS:
            os.ftruncate(descriptor, offset)
        raise _as_disk_full(error) from error


def _write_batch(descriptor: int, position: int, batch: list[bytes | memoryview]) -> int:
    end = position + sum(map(len, batch))
    position += os.pwritev(descriptor, batch, position)
    if position < end:  # writev may write less than it was given
        rest = b"".join(batch)[position - end :]
        while position < end:
            position += os.pwrite(descriptor, rest[position - end :], position)
    return end


def _as_disk_full(error: OSError) -> Exception:
    return (
        DiskFull(f"no space left for payload: {error}")
        if error.errno in DISK_FULL_ERRNOS
        else error
    )


def read(folder: Path, location: Location) -> bytes:
    """The payload, or StoreError naming the damaged record; other records stay readable."""
    return SegmentReader(folder).read(location)


def _crc(payload: bytes | memoryview) -> int:
    """Keeps the GIL for short payload: acquiring it again would take longer than the checksum."""
    return crc32c.crc32c(payload, gil_release_mode=0 if len(payload) <= RELEASE_GIL_BYTES else 1)


class SegmentReader:
    """Reads records, from any thread; keeps recently read files open."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[int, _OpenFile] = {}

    def read(self, location: Location) -> bytes:
        file = self._file(location.segment)
        end = location.offset + HEADER.size + location.length
        if not 0 <= location.length <= MAX_PAYLOAD_BYTES or end > os.fstat(file.descriptor).st_size:
            raise StoreError(f"record {_name(location)} is cut off")
        payload = bytearray(location.length)
        self.read_into(location, memoryview(payload))
        return bytes(payload)

    def read_into(self, location: Location, payload: memoryview, *, may_block: bool = True) -> None:
        """Read the record into `payload`, or raise StoreError naming the damaged record. Without
        `may_block`, raises BlockingIOError unless all of it is in the page cache."""
        file = self._file(location.segment)
        header = bytearray(HEADER.size)
        parts, at = [header, payload], location.offset
        size = os.preadv(file.descriptor, parts, at) if may_block else _read_nowait(file, parts, at)
        if size != HEADER.size + location.length:
            raise StoreError(f"record {_name(location)} is cut off")
        if HEADER.unpack(header) != (MAGIC, location.length, _crc(payload)):
            raise StoreError(f"record {_name(location)} is damaged: its checksum does not match")

    def _file(self, segment: int) -> _OpenFile:
        return self._open.get(segment) or self._open_segment(segment)

    def _open_segment(self, segment: int) -> _OpenFile:
        path = segment_path(self._folder, segment)
        try:
            file = _OpenFile(regular_descriptor(path))
        except FileNotFoundError as error:  # other errors may be transient
            raise StoreError(f"segment {path.name} is missing") from error
        self._open[segment] = file
        for oldest in [*self._open][:-MAX_OPEN]:
            self.forget(oldest)
        return file

    def forget(self, segment: int) -> None:
        """Close a segment's file; the space of a deleted one is freed only then."""
        self._open.pop(segment, None)


class _OpenFile:
    """Closed when the last thread reading it is done."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


def _read_nowait(file: _OpenFile, parts: Sequence[bytearray | memoryview], offset: int) -> int:
    try:
        size = os.preadv(file.descriptor, parts, offset, os.RWF_NOWAIT)
    except OSError as error:  # most file systems support it; the others raise
        raise BlockingIOError(error.errno, str(error)) from error
    if size < sum(map(len, parts)):
        raise BlockingIOError(errno.EAGAIN, "not fully in the page cache")
    return size


def _name(location: Location) -> str:
    return f"{segment_path(Path(), location.segment)} at {location.offset}"
