# SPDX-License-Identifier: Apache-2.0
"""What every payload store promises: memory, segment files, a directory and an S3 server behind
obstore, and a store of the user's own."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import obstore
import pytest
from obstore.store import LocalStore
from tests.unit.dataflow.ledger.stored_rows import stored_row

from penstock.dataflow.ledger import objects, segments
from penstock.dataflow.ledger.compaction import Compactor
from penstock.dataflow.ledger.objects import ObjectPayloads, open_payloads
from penstock.dataflow.ledger.payloads import MemoryPayloads, PayloadStore, SegmentPayloads
from penstock.dataflow.ledger.segments import Location, PlacedPayload
from penstock.dataflow.ledger.store import Ledger
from penstock.dataflow.records import FreedRecord, RowRecord
from penstock.errors import ConfigError, StoreError
from penstock.types import GroupId, RowId

SEGMENT_BYTES = 4000
Open = Callable[[], PayloadStore]
_numbers = itertools.count()
FOREVER = ("segments", "directory", "s3")
"""Outlive the process that wrote them."""


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "MAX_SEGMENT_BYTES", SEGMENT_BYTES)
    monkeypatch.setattr(objects, "SEGMENT_BYTES", SEGMENT_BYTES)


@pytest.fixture
def word(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """How a config names the store."""
    if kind == "directory":
        (tmp_path / "objects").mkdir()
        return (tmp_path / "objects").as_uri()
    if kind == "s3":
        return f"{request.getfixturevalue('s3_url')}/run-{next(_numbers)}"
    return {"own": f"{__name__}:OwnStore", "objects in memory": "memory:///"}.get(kind, kind)


KINDS = ("memory", "objects in memory", "own", *FOREVER)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def store(kind: str, word: str, tmp_path: Path) -> PayloadStore:
    if kind == "memory":
        return MemoryPayloads(segment_bytes=SEGMENT_BYTES)
    return open_payloads(word, tmp_path)


class OwnStore(MemoryPayloads):
    """A user's own, by module and class."""

    def __init__(self, folder: Path) -> None:
        super().__init__(segment_bytes=SEGMENT_BYTES)
        self.folder = folder


def put(store: PayloadStore, *payloads: bytes) -> list[Location]:
    chunks = [store.place(payload) for payload in payloads]
    store.append(chunks)
    return [chunk.location for chunk in chunks]


def payload(number: int) -> bytes:
    return number.to_bytes(2, "big") * (1 + number * 7 % 300)


def test_bytes_come_back_exactly(store: PayloadStore) -> None:
    payloads = [bytes(range(256)), b"x" * 3 * SEGMENT_BYTES, *map(payload, range(100))]
    chunks = [store.place(memoryview(data)) for data in payloads]
    for start in range(0, len(chunks), 7):
        store.append(chunks[start : start + 7])
    assert [store.read(chunk.location) for chunk in chunks] == payloads
    assert len({(c.location.segment, c.location.offset) for c in chunks}) == len(chunks)


def test_what_is_not_there_is_told_by_name(store: PayloadStore) -> None:
    [here] = put(store, b"here")
    missing = [
        Location(segment=99, offset=0, length=4),
        Location(segment=here.segment, offset=here.offset, length=5),
        Location(segment=here.segment, offset=here.offset + 4000, length=4),
    ]
    for location in missing:
        with pytest.raises(StoreError, match=str(location.segment)):
            store.read(location)
    assert store.read(here) == b"here"


def test_closed_segments_have_a_size_and_can_be_deleted(store: PayloadStore) -> None:
    places = put(store, *(bytes([n]) * 1500 for n in range(12)))
    sizes = store.sizes()
    assert places[-1].segment not in sizes, "it takes more payload"
    assert all(size >= 4500 for size in sizes.values()) and len(sizes) >= 3
    first = places[0].segment
    store.delete(first)
    store.delete(first)
    assert first not in store.sizes()
    for number, place in enumerate(places):
        if place.segment == first:
            with pytest.raises(StoreError):
                store.read(place)
        else:
            assert store.read(place) == bytes([number]) * 1500


def test_readers_and_the_writer_do_not_meet(store: PayloadStore) -> None:
    places: list[Location] = []
    wrong: list[int] = []
    done = threading.Event()

    def read_on() -> None:
        while not done.is_set():
            for number, place in enumerate(places[-30:], start=max(0, len(places) - 30)):
                if len(store.read(place)) != place.length:
                    wrong.append(number)

    readers = [threading.Thread(target=read_on) for _ in range(2)]
    for reader in readers:
        reader.start()
    for number in range(40):
        places += put(store, payload(number))
    done.set()
    for reader in readers:
        reader.join()
    assert not wrong and len(places) == 40


@pytest.mark.parametrize("kind", FOREVER)
def test_the_next_life_reads_all_and_begins_a_new_segment(word: str, tmp_path: Path) -> None:
    written: dict[tuple[int, int], tuple[Location, bytes]] = {}
    for life in range(3):
        store = open_payloads(word, tmp_path)
        data = [payload(life * 20 + n) for n in range(20)]
        for place, body in zip(put(store, *data), data, strict=True):
            assert (place.segment, place.offset) not in written
            written[place.segment, place.offset] = place, body
        assert all(store.read(place) == body for place, body in written.values())
    sizes = open_payloads(word, tmp_path).sizes()
    assert sizes.keys() == {segment for segment, _ in written}


@pytest.mark.parametrize(
    ("kind", "durability"),
    [
        ("memory", "D0"),
        ("objects in memory", "D0"),
        ("directory", "D0"),
        ("segments", "D1"),
        ("s3", "D2"),
    ],
)
def test_what_an_acknowledgement_is_worth(store: PayloadStore, durability: str) -> None:
    assert store.durability == durability


# --- object storage alone ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["directory", "s3"])
def test_a_second_writer_never_overwrites_the_first(word: str, tmp_path: Path) -> None:
    first, second = open_payloads(word, tmp_path), open_payloads(word, tmp_path)
    [place] = put(first, b"first")
    with pytest.raises(StoreError, match="written by another process"):
        put(second, b"second")
    assert first.read(place) == b"first"


@pytest.mark.parametrize("kind", ["directory", "s3"])
def test_a_put_whose_answer_was_lost_is_no_conflict(word: str, tmp_path: Path) -> None:
    store = open_payloads(word, tmp_path)
    chunk = store.place(b"once")
    store.append([chunk])
    store.append([chunk])
    assert store.read(chunk.location) == b"once"


def test_damage_stays_with_its_record(tmp_path: Path) -> None:
    store = ObjectPayloads(tmp_path.as_uri())
    places = put(store, *(bytes([n]) * 100 for n in range(5)))
    [path] = tmp_path.glob("*/*")
    data = bytearray(path.read_bytes())
    data[places[2].offset + 50] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreError, match="damaged"):
        store.read(places[2])
    assert store.read(places[1]) == bytes([1]) * 100
    path.write_bytes(data[:-1])
    with pytest.raises(StoreError, match="cut off"):
        store.read(places[4])


@pytest.mark.parametrize("kind", ["s3"])
async def test_acknowledged_only_after_the_put(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(tmp_path, open_payloads(word, tmp_path))
    may_put, real = threading.Event(), obstore.put

    def slow(*args: object, **options: object) -> object:
        assert may_put.wait(60)
        return real(*args, **options)  # type: ignore[arg-type, call-overload]

    monkeypatch.setattr(obstore, "put", slow)
    place = ledger.place(b"payload")
    durable = ledger.write([row(1, place, b"payload")])
    await asyncio.sleep(0.2)
    assert not durable.done() and ledger.row(RowId("g1.0.1")) is None
    may_put.set()
    await durable
    found = ledger.row(RowId("g1.0.1"))
    assert found is not None and ledger.payload(found) == b"payload"
    assert ledger.durability == "D2"
    ledger.close()


def row(number: int, at: Location, payload: bytes) -> RowRecord:
    return stored_row(f"g{number}", at, payload)


async def test_compaction_works_over_every_store(store: PayloadStore, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, store)
    numbers = range(24)
    bodies = {n: bytes([n]) * 1000 for n in numbers}
    await ledger.write([row(n, ledger.place(body), body) for n, body in bodies.items()])
    live = [n for n in numbers if n % 4 == 0]
    dead = [FreedRecord(group_id=GroupId(f"g{n}"), at=0.0) for n in numbers if n not in live]
    await ledger.write(dead)
    compactor = Compactor(ledger, bytes_per_s=1e12)
    before = len(store.sizes())
    await compactor.sweep()
    await compactor.sweep()
    for n in live:
        found = ledger.row(RowId(f"g{n}.0.1"))
        assert found is not None and ledger.payload(found) == bytes([n]) * 1000
    assert compactor.moved_bytes > 0 and len(store.sizes()) < before
    ledger.close()


# --- stores by name ---------------------------------------------------------------------------


class Lacking:
    durability = "D1"

    def __init__(self, folder: Path) -> None: ...

    def append(self, chunks: Sequence[PlacedPayload]) -> None: ...


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("nowhere", "segments, memory, a URL"),
        ("no.such.module:Store", "cannot be loaded"),
        (f"{__name__}:Missing", "cannot be loaded"),
        (f"{__name__}:Lacking", "is missing place, read, sizes, delete"),
        ("ftp://host/x", "cannot open object store"),
    ],
)
def test_a_store_that_cannot_be_opened_is_explained(
    word: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_payloads(word, tmp_path)


def test_the_default_is_segments_beside_the_ledger(tmp_path: Path) -> None:
    store = open_payloads("segments", tmp_path)
    assert isinstance(store, SegmentPayloads)
    put(store, b"x")
    assert [path.name for path in (tmp_path / "segments").iterdir()] == ["seg-00000001.dat"]


def test_a_directory_is_a_real_object_store(tmp_path: Path) -> None:
    put(ObjectPayloads(tmp_path.as_uri()), b"x", b"y")
    [page] = list(obstore.list(LocalStore(str(tmp_path))))  # pyright: ignore[reportUnknownMemberType]
    assert [meta["path"] for meta in page] == ["00000001/000000000000"]
