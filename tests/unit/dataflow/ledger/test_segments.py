# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.dataflow.ledger import segments
from penstock.dataflow.ledger.segments import (
    HEADER,
    SegmentReader,
    SegmentWriter,
    allocator,
    read,
    segment_path,
)
from penstock.errors import StoreError


def test_records_come_back_and_damage_stays_with_its_record(tmp_path: Path) -> None:
    plan, writer = allocator(tmp_path), SegmentWriter(tmp_path)
    payloads = [bytes([i % 256]) * (i + 1) for i in range(700)]
    placed = [plan.place(payload) for payload in payloads]
    writer.append(placed)
    assert [read(tmp_path, chunk.location) for chunk in placed] == payloads
    victim = placed[5].location
    path = segment_path(tmp_path, victim.segment)
    for offset in range(victim.offset, victim.offset + HEADER.size + victim.length):
        data = bytearray(path.read_bytes())
        data[offset] ^= 0x10
        path.write_bytes(data)
        with pytest.raises(StoreError):
            read(tmp_path, victim)
        assert read(tmp_path, placed[4].location) == payloads[4]
        assert read(tmp_path, placed[6].location) == payloads[6]
        data[offset] ^= 0x10
        path.write_bytes(data)


def test_a_new_start_never_writes_into_an_old_segment(tmp_path: Path) -> None:
    for life in range(3):
        chunk = allocator(tmp_path).place(b"x")
        assert (chunk.location.segment, chunk.location.offset) == (life + 1, 0)
        SegmentWriter(tmp_path).append([chunk])


def test_segments_rotate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "MAX_SEGMENT_BYTES", 100)
    plan, writer = allocator(tmp_path), SegmentWriter(tmp_path)
    placed = [plan.place(b"a" * 60) for _ in range(4)]
    writer.append(placed)
    assert [chunk.location.segment for chunk in placed] == [1, 1, 2, 2]
    assert all(read(tmp_path, chunk.location) == b"a" * 60 for chunk in placed)


def test_a_cut_off_record_is_named(tmp_path: Path) -> None:
    chunk = allocator(tmp_path).place(b"hello")
    SegmentWriter(tmp_path).append([chunk])
    path = segment_path(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StoreError, match="cut off"):
        read(tmp_path, chunk.location)


def test_who_may_not_wait_gets_all_of_a_record_or_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = allocator(tmp_path).place(b"hello")
    SegmentWriter(tmp_path).append([chunk])
    reader, payload = SegmentReader(tmp_path), bytearray(5)
    preadv = os.preadv

    def half_there(descriptor: int, parts: Sequence[Any], offset: int, flags: int = 0) -> int:
        return preadv(descriptor, [*parts][:1] if flags else parts, offset)

    monkeypatch.setattr(segments.os, "preadv", half_there)
    with pytest.raises(BlockingIOError):
        reader.read_into(chunk.location, memoryview(payload), may_block=False)
    reader.read_into(chunk.location, memoryview(payload))
    assert payload == b"hello"
