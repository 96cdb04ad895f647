# SPDX-License-Identifier: Apache-2.0
"""Payload in append-only files: length and CRC32C per record, written once, read by range.

The ledger's rows say where a record lies, so nothing is scanned at a start: each start begins a
new segment, and bytes after the last committed record of an older one belong to nobody.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

import crc32c

from penstock.errors import StoreError

MAGIC = b"PSR1"
HEADER = struct.Struct("<4sII")
"""Magic, payload length, CRC32C of the payload."""
MAX_SEGMENT_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    segment: int
    offset: int
    length: int
    """Of the payload, without its header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Bytes that have a place but are not on disk yet."""

    segment: int
    header: bytes
    payload: bytes


def segment_path(folder: Path, segment: int) -> Path:
    return folder / f"seg-{segment:08d}.dat"


class SegmentPlan:
    """Gives each payload its place before it is written; lives on the event loop."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        numbers = [int(path.stem.removeprefix("seg-")) for path in folder.glob("seg-*.dat")]
        self._segment = max(numbers, default=0) + 1
        self._offset = 0

    def place(self, payload: bytes) -> tuple[Location, Chunk]:
        if self._offset >= MAX_SEGMENT_BYTES:
            self._segment, self._offset = self._segment + 1, 0
        location = Location(segment=self._segment, offset=self._offset, length=len(payload))
        header = HEADER.pack(MAGIC, len(payload), crc32c.crc32c(payload))
        self._offset += HEADER.size + len(payload)
        return location, Chunk(segment=self._segment, header=header, payload=payload)


class SegmentWriter:
    """Appends chunks in the order they were placed; lives in the ledger's one writer thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._segment = 0
        self._descriptor = -1

    def append(self, chunks: list[Chunk]) -> None:
        """On disk when this returns. An error here is final: the process must end, never retry
        and ack."""
        start = 0
        while start < len(chunks):
            segment = chunks[start].segment
            end = start
            while end < len(chunks) and chunks[end].segment == segment:
                end += 1
            self._open(segment)
            self._write([part for c in chunks[start:end] for part in (c.header, c.payload)])
            os.fdatasync(self._descriptor)
            start = end

    def _open(self, segment: int) -> None:
        if segment == self._segment:
            return
        self.close()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(segment_path(self._folder, segment), flags, 0o600)
        self._segment = segment
        directory = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _write(self, parts: list[bytes]) -> None:
        for start in range(0, len(parts), 512):  # IOV_MAX is 1,024
            batch = parts[start : start + 512]
            written = os.writev(self._descriptor, batch)
            if written != sum(map(len, batch)):
                rest = b"".join(batch)[written:]
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def read(folder: Path, location: Location) -> bytes:
    """The payload, or StoreError naming the damaged record; its neighbours stay readable."""
    path = segment_path(folder, location.segment)
    where = f"{path.name} at {location.offset}"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:  # any other trouble may pass, and is no verdict on the row
        raise StoreError(f"segment {path.name} is missing") from error
    try:
        data = os.pread(descriptor, HEADER.size + location.length, location.offset)
    finally:
        os.close(descriptor)
    if len(data) != HEADER.size + location.length:
        raise StoreError(f"record {where} is cut off")
    magic, length, crc = HEADER.unpack_from(data)
    payload = data[HEADER.size :]
    if magic != MAGIC or length != location.length or crc != crc32c.crc32c(payload):
        raise StoreError(f"record {where} is damaged: its checksum does not match")
    return payload
