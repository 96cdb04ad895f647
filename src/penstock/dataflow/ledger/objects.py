# SPDX-License-Identifier: Apache-2.0
"""Payload in object storage: one immutable object per segment and commit group, read by range.

Puts are create-only, so no writer overwrites another's bytes, and an append returns after the store
has accepted it. Records have the same layout as in segment files. Also opens the store named in a
config: a built-in name, a URL, or a user class.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import cast

import crc32c

from penstock.dataflow.ledger.payloads import (
    Durability,
    MemoryPayloads,
    PayloadStore,
    SegmentPayloads,
)
from penstock.dataflow.ledger.segments import (
    HEADER,
    MAGIC,
    Location,
    PlacedPayload,
    SegmentAllocator,
    encoded,
)
from penstock.errors import ConfigError, StoreError
from penstock.plugins import load_function
from penstock.wire.objects import list_objects, open_objects

SEGMENT_BYTES = 64 << 20
DURABLE_SCHEMES = ("s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss")


def open_payloads(store: str, folder: Path, *, segment_bytes: int | None = None) -> PayloadStore:
    """`segments` under the ledger's folder, `memory`, the URL of an object store, or
    `module:Class`, which is called with the ledger's folder. `segment_bytes`: the size of a file of
    `segments`, if not the usual one."""
    if store == "segments":
        return SegmentPayloads(folder / "segments", segment_bytes=segment_bytes)
    if store == "memory":
        return MemoryPayloads()
    if "://" in store:
        return ObjectPayloads(store)
    return _load_user_store(store, folder)


def _load_user_store(store: str, folder: Path) -> PayloadStore:
    try:
        kind = load_function(store)  # a class, or a function that makes a store
    except ConfigError as error:
        raise ConfigError(
            f"payload store {store!r} cannot be loaded: {error}; "
            "write segments, memory, a URL such as s3://bucket/run, or module:Class"
        ) from error.__cause__
    made = kind(folder)
    wanted = ("durability", "place", "append", "read", "sizes", "delete")
    if missing := [name for name in wanted if not hasattr(made, name)]:
        raise ConfigError(
            f"payload store {store!r} is missing {', '.join(missing)}; "
            "its class must have all members of PayloadStore"
        )
    return cast(PayloadStore, made)


class ObjectPayloads:
    """Object `NUMBER/OFFSET` holds records of that segment, starting at that offset."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._store = open_objects(url, "payload")
        self._allocator = SegmentAllocator(max(self._segments(), default=0) + 1, SEGMENT_BYTES)
        self._objects: dict[int, dict[int, int]] = {}
        """By segment, the size of its objects by offset, in order; filled on first use."""
        self._is_listed = False
        self._lock = threading.Lock()

    @property
    def durability(self) -> Durability:
        """D2 for a bucket, which is replicated. A directory is written without fsync: D0, as
        memory."""
        return "D2" if self._url.partition("://")[0] in DURABLE_SCHEMES else "D0"

    # --- writing ------------------------------------------------------------------------------

    def place(self, payload: bytes | memoryview) -> PlacedPayload:
        return self._allocator.place(payload)

    def append(self, chunks: Sequence[PlacedPayload]) -> None:
        for segment, group in groupby(chunks, key=lambda chunk: chunk.location.segment):
            members = list(group)
            first = members[0].location.offset
            body = b"".join(encoded(members))
            last = members[-1].location
            assert first + len(body) == last.offset + HEADER.size + last.length, (
                "commit group has a gap"
            )
            self._put(_name(segment, first), body)
            with self._lock:
                self._objects.setdefault(segment, {})[first] = len(body)

    def _put(self, name: str, body: bytes) -> None:
        from obstore.exceptions import AlreadyExistsError

        try:
            self._store.put(name, body, mode="create")
        except AlreadyExistsError as error:
            # A retry may find the object of a first put whose response was lost.
            if bytes(self._store.get(name).bytes()) != body:
                raise StoreError(
                    f"{self._url}/{name} was written by another process; "
                    "only one service may write a payload store"
                ) from error

    # --- reading ------------------------------------------------------------------------------

    def read(self, location: Location) -> bytes:
        where = f"record {location.segment}:{location.offset} of {self._url}"
        parts = self._objects_of(location.segment)
        with self._lock:
            starts = list(parts)
        index = bisect_right(starts, location.offset) - 1
        if index < 0:
            raise StoreError(f"{where} is missing")
        first = starts[index]
        size = HEADER.size + location.length
        begin = location.offset - first
        if begin + size > parts[first]:
            raise StoreError(f"{where} is cut off")
        try:
            name = _name(location.segment, first)
            data = bytes(self._store.get_range(name, start=begin, length=size))
        except FileNotFoundError as error:
            raise StoreError(f"{where} is missing") from error
        return _payload(data, location, where)

    def sizes(self) -> dict[int, int]:
        if not self._is_listed:
            for segment in self._segments():
                self._objects_of(segment)
            self._is_listed = True
        with self._lock:
            found = {number: sum(parts.values()) for number, parts in self._objects.items()}
        found.pop(self._allocator.segment, None)
        return found

    def delete(self, segment: int) -> None:
        assert segment != self._allocator.segment, "the open segment still takes payload"
        for first in self._list_segment(segment):
            with suppress(FileNotFoundError):
                self._store.delete(_name(segment, first))
        with self._lock:
            self._objects.pop(segment, None)

    def _objects_of(self, segment: int) -> dict[int, int]:
        """Cached for segments that exist; a missing one is listed again."""
        known = self._objects.get(segment)
        if known is None:
            known = self._list_segment(segment)
            if known:
                with self._lock:
                    known = self._objects.setdefault(segment, known)
        return known

    def _list_segment(self, segment: int) -> dict[int, int]:
        listed = list_objects(self._store, f"{segment:08d}")
        return dict(sorted((int(name.rpartition("/")[2]), size) for name, size in listed))

    def _segments(self) -> list[int]:
        listed = self._store.list_with_delimiter()  # pyright: ignore[reportUnknownMemberType]
        return sorted(int(name) for name in listed["common_prefixes"] if name.isdecimal())


def _name(segment: int, first: int) -> str:
    return f"{segment:08d}/{first:012d}"


def _payload(data: bytes, location: Location, where: str) -> bytes:
    if len(data) != HEADER.size + location.length:
        raise StoreError(f"{where} is cut off")
    payload = data[HEADER.size :]
    if HEADER.unpack_from(data) != (MAGIC, location.length, crc32c.crc32c(payload)):
        raise StoreError(f"{where} is damaged: its checksum does not match")
    return payload
