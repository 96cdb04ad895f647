# SPDX-License-Identifier: Apache-2.0
"""Payload stores: the Protocol, and the two stores that need only this machine.

Ledger records hold a `Location`; a store returns the identical bytes or names the record it cannot
read. Knows nothing of rows, leases or SQL, and never decides which payload may be deleted.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

from penstock.dataflow.ledger import segments
from penstock.dataflow.ledger.segments import (
    Location,
    PlacedPayload,
    SegmentAllocator,
    SegmentReader,
    SegmentWriter,
)
from penstock.errors import StoreError

Durability = Literal["D0", "D1", "D2"]
"""What an acknowledgement guarantees: D0 is in memory only, D1 is fsynced and survives power loss,
D2 is also in a second store."""


class PayloadStore(Protocol):
    """place → append → read; to move rows, read, place again, then delete the old segment."""

    @property
    def durability(self) -> Durability: ...

    def place(self, payload: bytes | memoryview) -> PlacedPayload:
        """Assign this payload its permanent place. Runs on the event loop, so it must not do I/O;
        the caller appends every chunk it was given, in this order."""
        ...

    def append(self, chunks: Sequence[PlacedPayload]) -> None:
        """Durable when this returns; called by one thread. After `DiskFull` nothing was kept and
        the same chunks may be appended again; any other error is final."""
        ...

    def read(self, location: Location) -> bytes:
        """From any thread: the payload, or StoreError naming the record; other records stay
        readable. Any other exception may be transient and says nothing about the record."""
        ...

    def sizes(self) -> Mapping[int, int]:
        """Bytes of each closed segment. Placed payload that is not yet appended may still go into
        them: flush the ledger before relying on the sizes."""
        ...

    def delete(self, segment: int) -> None:
        """Delete a segment; a missing one is ignored. No record may reference it."""
        ...


class SegmentPayloads:
    """Append-only files on this machine's disk, fsynced: D1."""

    durability: Durability = "D1"

    def __init__(self, folder: Path, *, segment_bytes: int | None = None) -> None:
        self._folder = folder
        self._allocator = segments.allocator(folder, segment_bytes)
        self._writer = SegmentWriter(folder)
        self._reader = SegmentReader(folder)

    def place(self, payload: bytes | memoryview) -> PlacedPayload:
        return self._allocator.place(payload)

    def append(self, chunks: Sequence[PlacedPayload]) -> None:
        self._writer.append(chunks)

    def read(self, location: Location) -> bytes:
        return self._reader.read(location)

    def read_into(self, location: Location, payload: memoryview, *, may_block: bool) -> None:
        """As `read`, into the caller's buffer; BlockingIOError if the read would have to wait."""
        self._reader.read_into(location, payload, may_block=may_block)

    def sizes(self) -> dict[int, int]:
        found = segments.sizes(self._folder)
        found.pop(self._allocator.segment, None)
        return found

    def delete(self, segment: int) -> None:
        assert segment != self._allocator.segment, "the open segment still takes payload"
        segments.delete(self._folder, segment)
        self._reader.forget(segment)

    def close(self) -> None:
        """Close the open file; garbage collection of the store closes it too."""
        self._writer.close()


class MemoryPayloads:
    """In this process only, D0: for tests and runs that will not be resumed."""

    durability: Durability = "D0"

    def __init__(self, *, segment_bytes: int = 16 << 20) -> None:
        self._allocator = SegmentAllocator(1, segment_bytes)
        self._kept: dict[int, dict[int, bytes]] = {}
        self._lock = threading.Lock()

    def place(self, payload: bytes | memoryview) -> PlacedPayload:
        return self._allocator.place(payload)

    def append(self, chunks: Sequence[PlacedPayload]) -> None:
        with self._lock:
            for chunk in chunks:
                where = chunk.location
                self._kept.setdefault(where.segment, {})[where.offset] = bytes(chunk.payload)

    def read(self, location: Location) -> bytes:
        payload = self._kept.get(location.segment, {}).get(location.offset)
        if payload is None or len(payload) != location.length:
            raise StoreError(
                f"record {location.segment}:{location.offset} is not in memory; "
                "payload of class D0 is lost when its process ends"
            )
        return payload

    def sizes(self) -> dict[int, int]:
        with self._lock:
            return {
                number: sum(map(len, kept.values()))
                for number, kept in self._kept.items()
                if number != self._allocator.segment
            }

    def delete(self, segment: int) -> None:
        assert segment != self._allocator.segment, "the open segment still takes payload"
        with self._lock:
            self._kept.pop(segment, None)
