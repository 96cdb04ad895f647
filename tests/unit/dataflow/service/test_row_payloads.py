# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from penstock.dataflow.column_records import ColumnRecord
from penstock.dataflow.ledger import segments
from penstock.dataflow.ledger.blobs import BlobStore
from penstock.dataflow.ledger.payloads import MemoryPayloads, SegmentPayloads
from penstock.dataflow.ledger.segments import HEADER, Location, segment_path
from penstock.dataflow.ledger.store import Ledger
from penstock.dataflow.records import Record, RowRecord
from penstock.dataflow.service import row_payloads
from penstock.dataflow.service.row_payloads import RowPayloads, RowsQuery
from penstock.dataflow.service.trainers.messages import RowsAnswer
from penstock.types import GroupId, NodeId, OutcomeKind, RowId, RowSummary
from penstock.wire.codec import decode

SIZES = (40_000, 100, 70_000, 200, 30_000, 5_000, 90_000)
IDS = tuple(RowId(f"p0-{n}.0.1") for n in range(len(SIZES)))
PAYLOADS = {
    row_id: os.urandom(size) + row_id.encode() for row_id, size in zip(IDS, SIZES, strict=True)
}
"""A trajectory names its row somewhere."""


def row(row_id: RowId, at: Location, blob: str = "") -> RowRecord:
    return RowRecord(
        summary=RowSummary(
            row_id=row_id,
            digest=blake3(PAYLOADS[row_id]).hexdigest(),
            outcome=OutcomeKind.COMPLETED,
            reward=0.0,
            sampled={},
            versions={},
        ),
        group_id=GroupId(row_id.partition(".")[0]),
        slot=0,
        epoch=1,
        node_id=NodeId("n"),
        segment=at.segment,
        offset=at.offset,
        length=at.length,
        delivered_at=0.0,
        blob=blob,
    )


def scores(row_id: RowId, at: Location) -> ColumnRecord:
    return ColumnRecord(
        space="train",
        row_id=row_id,
        name="scores",
        segment=at.segment,
        offset=at.offset,
        length=at.length,
        digest="d",
        failed="",
        value=None,
        writer="w",
        at=0.0,
    )


async def filled(folder: Path, store: SegmentPayloads | MemoryPayloads | None = None) -> Ledger:
    ledger = Ledger(folder, store, reserve_bytes=4096)
    await ledger.write([row(row_id, ledger.place(data)) for row_id, data in PAYLOADS.items()])
    return ledger


def payloads(ledger: Ledger) -> RowPayloads:
    return RowPayloads(ledger, BlobStore(ledger.segments_folder.parent / "blobs"))


async def test_rows_come_in_pieces_as_one_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_payloads, "PIECE_BYTES", 60_000)
    monkeypatch.setattr(row_payloads, "KEYS_PER_QUERY", 4)
    ledger = await filled(tmp_path)
    lost, far, gone = RowId("p0-90.0.1"), RowId("p1-91.0.1"), RowId("p2-92.0.1")
    wanted = RowsQuery(
        row_ids=(*IDS[::-1], lost, far, gone), remote_urls={far: "http://there", gone: ""}
    )
    found = await payloads(ledger).find(wanted)
    pieces = [bytes(piece) async for piece in payloads(ledger).pieces(found)]
    assert len(pieces) > 3 and max(map(len, pieces)) < 60_000 + max(SIZES) + 1_000
    assert found.num_bytes == sum(map(len, pieces))
    answer = decode(b"".join(pieces), RowsAnswer)
    assert [(r.row_id, r.payload, r.at) for r in answer.rows] == [
        *((row_id, PAYLOADS[row_id], "") for row_id in IDS[::-1]),
        (lost, None, ""),
        (far, None, "http://there"),
        (gone, None, ""),
    ]
    assert answer == await payloads(ledger).answer(wanted)
    ledger.close()


@pytest.mark.parametrize("victim", [0, 2, len(IDS) - 1])
async def test_a_damaged_row_is_gone_and_its_neighbours_are_served(
    tmp_path: Path, victim: int
) -> None:
    ledger = await filled(tmp_path)
    found = ledger.row(IDS[victim])
    assert found is not None
    with segment_path(ledger.segments_folder, found.segment).open("r+b") as file:
        file.seek(found.offset + HEADER.size + found.length // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))
    announced = await payloads(ledger).find(RowsQuery(row_ids=IDS))
    body = b"".join([piece async for piece in payloads(ledger).pieces(announced)])
    assert len(body) == announced.num_bytes, "as long as a caller was told"
    answer = decode(body, RowsAnswer)
    gone = {row_id: data for row_id, data in PAYLOADS.items() if row_id != IDS[victim]}
    assert [(r.row_id, r.payload) for r in answer.rows] == [(i, gone.get(i)) for i in IDS]
    ledger.close()


@pytest.mark.parametrize("column", [False, True])
async def test_another_rows_bytes_are_never_served(tmp_path: Path, column: bool) -> None:
    """A damaged place that leads to a sound record of the same length."""
    ledger = await filled(tmp_path)
    other = ledger.place(PAYLOADS[IDS[0]])
    records: list[Record] = [row(IDS[2], other)]
    if column:
        records.append(scores(IDS[2], ledger.place(b"one")))
    await ledger.write(records)
    answer = await payloads(ledger).answer(RowsQuery(row_ids=IDS, columns=("scores",)))
    left = {row_id: data for row_id, data in PAYLOADS.items() if row_id != IDS[2]}
    assert [r.payload for r in answer.rows] == [left.get(row_id) for row_id in IDS]
    ledger.close()


@pytest.mark.parametrize("length", [-1, 1 << 31, 1 << 40])
async def test_a_damaged_length_costs_no_more_than_its_row(tmp_path: Path, length: int) -> None:
    ledger = await filled(tmp_path)
    await ledger.write([row(IDS[2], Location(segment=1, offset=0, length=length))])
    answer = await payloads(ledger).answer(RowsQuery(row_ids=IDS))
    left = {row_id: data for row_id, data in PAYLOADS.items() if row_id != IDS[2]}
    assert [r.payload for r in answer.rows] == [left.get(row_id) for row_id in IDS]
    ledger.close()


async def test_what_is_not_in_memory_is_read_in_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop never waits for the disk, whole rows or parts of them."""
    ledger, asked = await filled(tmp_path), list[bool]()
    preadv = os.preadv

    def cold(fd: int, parts: Sequence[Any], offset: int, flags: int = 0) -> int:
        asked.append(bool(flags))
        if flags and len(asked) == 1:
            raise BlockingIOError
        return preadv(fd, parts, offset, flags) - (100 if flags else 0)

    monkeypatch.setattr(segments.os, "preadv", cold)
    answer = await payloads(ledger).answer(RowsQuery(row_ids=IDS))
    assert [r.payload for r in answer.rows] == [*PAYLOADS.values()]
    assert asked == [True] + [False] * len(IDS)
    ledger.close()


async def test_a_row_that_moved_after_the_look_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = await filled(tmp_path)
    tables, before = ledger.tables, ledger.row(IDS[2])
    assert before is not None
    remote_urls = ledger.place(PAYLOADS[IDS[2]])
    await ledger.write([row(IDS[2], remote_urls)])
    with segment_path(ledger.segments_folder, before.segment).open("r+b") as file:
        file.seek(before.offset)
        file.write(bytes(HEADER.size))
    rows, looks = tables.rows, 0

    def old_then_new(query: str, **values: Any) -> list[tuple[Any, ...]]:
        nonlocal looks
        looks += 1
        found = rows(query, **values)
        if looks > 1:
            return found
        old = (IDS[2], "", before.segment, before.offset, before.length)
        return [old if r[0] == IDS[2] else r for r in found]

    monkeypatch.setattr(tables, "rows", old_then_new)
    answer = await payloads(ledger).answer(RowsQuery(row_ids=IDS))
    assert [r.payload for r in answer.rows] == [*PAYLOADS.values()] and looks == 1
    ledger.close()


async def test_columns_and_blobs_come_with_their_rows(tmp_path: Path) -> None:
    ledger = await filled(tmp_path)
    reader = payloads(ledger)
    blobs, big = BlobStore(tmp_path / "blobs"), PAYLOADS[IDS[4]]
    digest = blake3(big).hexdigest()
    descriptor = blobs.begin(digest, 0, len(big))
    os.pwrite(descriptor, big, 0)
    os.close(descriptor)
    blobs.finish(digest, len(big))
    records: list[Record] = [
        scores(IDS[1], ledger.place(b"one")),
        row(IDS[4], Location(segment=0, offset=0, length=len(big)), blob=digest),
    ]
    await ledger.write(records)
    answer = await reader.answer(RowsQuery(row_ids=IDS, columns=("scores",)))
    assert answer.columns == ("scores",)
    assert (await reader.find(RowsQuery(row_ids=IDS, columns=("scores",)))).num_bytes is None
    assert [r.payload for r in answer.rows] == [*PAYLOADS.values()]
    assert [r.columns for r in answer.rows] == [
        {"scores": b"one"} if row_id == IDS[1] else {} for row_id in IDS
    ]
    ledger.close()


async def test_any_store_serves_rows(tmp_path: Path) -> None:
    ledger = await filled(tmp_path, MemoryPayloads())
    answer = await payloads(ledger).answer(RowsQuery(row_ids=IDS))
    assert [r.payload for r in answer.rows] == [*PAYLOADS.values()]
    ledger.close()


def test_deleted_segments_are_let_go_and_few_stay_open(tmp_path: Path) -> None:
    places: list[Location] = []
    for _ in range(segments.MAX_OPEN + 4):
        store = SegmentPayloads(tmp_path)
        chunk = store.place(b"payload")
        store.append([chunk])
        store.close()
        places.append(chunk.location)
    store = SegmentPayloads(tmp_path)
    assert {store.read(place) for place in places * 2} == {b"payload"}

    def num_open() -> int:
        links = (os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
        return sum(link.startswith(str(tmp_path)) for link in links)

    assert num_open() == segments.MAX_OPEN
    for place in places:
        store.delete(place.segment)
    assert num_open() == 0
