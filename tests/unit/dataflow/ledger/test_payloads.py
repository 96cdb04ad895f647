# SPDX-License-Identifier: Apache-2.0
"""Every payload store gives back what it was given, and lets a compactor drop whole segments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.dataflow.ledger import segments
from penstock.dataflow.ledger.payloads import MemoryPayloads, PayloadStore, SegmentPayloads
from penstock.dataflow.ledger.segments import Location
from penstock.errors import StoreError

SEGMENT_BYTES = 1000
Make = Callable[[Path], PayloadStore]


def memory(folder: Path) -> PayloadStore:
    return MemoryPayloads(segment_bytes=SEGMENT_BYTES)


def files(folder: Path) -> PayloadStore:
    return SegmentPayloads(folder)


STORES = pytest.mark.parametrize("make", [memory, files], ids=["memory", "segments"])


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "MAX_SEGMENT_BYTES", SEGMENT_BYTES)


@STORES
def test_what_was_appended_comes_back(make: Make, tmp_path: Path) -> None:
    store = make(tmp_path)
    payloads = [bytes([n]) * (10 * n + 1) for n in range(40)]
    chunks = [store.place(memoryview(payload)) for payload in payloads]
    store.append(chunks[:7])
    store.append(chunks[7:])
    assert [store.read(chunk.location) for chunk in chunks] == payloads
    assert len({chunk.location.segment for chunk in chunks}) > 3, "segments rotate"


@STORES
def test_a_record_that_is_not_there_is_a_store_error(make: Make, tmp_path: Path) -> None:
    store = make(tmp_path)
    kept = store.place(b"kept")
    store.append([kept])
    for where in (
        Location(segment=9, offset=0, length=4),
        Location(segment=kept.location.segment, offset=kept.location.offset, length=3),
    ):
        with pytest.raises(StoreError):
            store.read(where)
    assert store.read(kept.location) == b"kept"


@STORES
def test_a_compactor_copies_what_lives_and_drops_the_rest(make: Make, tmp_path: Path) -> None:
    store = make(tmp_path)
    chunks = [store.place(bytes([n]) * 300) for n in range(12)]
    store.append(chunks)
    before = store.sizes()
    assert chunks[-1].location.segment not in before, "the open segment is nobody's to drop"
    assert all(size >= 900 for size in before.values())
    lives = chunks[1]
    copy = store.place(store.read(lives.location))
    store.append([copy])
    store.delete(lives.location.segment)
    store.delete(lives.location.segment)
    assert store.read(copy.location) == bytes([1]) * 300
    assert lives.location.segment not in store.sizes()
    with pytest.raises(StoreError):
        store.read(lives.location)
    assert store.read(chunks[5].location) == bytes([5]) * 300


def test_each_store_says_what_its_word_is_worth(tmp_path: Path) -> None:
    assert (memory(tmp_path).durability, files(tmp_path).durability) == ("D0", "D1")
