# SPDX-License-Identifier: Apache-2.0
"""Trajectories kept for reading: spread over the whole run, within their bound, never at the cost
of what training or a reader needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.dataflow.ledger.stored_rows import stored_row

from penstock.dataflow.column_records import ColumnRecord, ReaderRecord
from penstock.dataflow.ledger import compaction, segments
from penstock.dataflow.ledger.compaction import Compactor
from penstock.dataflow.ledger.keeper import Keeper
from penstock.dataflow.ledger.keeping import RANKS, KeepSpec, kept_bytes, read_kept
from penstock.dataflow.ledger.segments import Location
from penstock.dataflow.ledger.store import Ledger
from penstock.dataflow.records import (
    FreedRecord,
    GroupRecord,
    GroupState,
    MetaRecord,
    Record,
    RowRecord,
    gone_key,
)
from penstock.errors import StoreError
from penstock.types import GroupId, RowId

PER_SEGMENT = 10
SIZE = 1000


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "MAX_SEGMENT_BYTES", PER_SEGMENT * (SIZE + 12))
    monkeypatch.setattr(compaction, "SEGMENTS_PER_SWEEP", 1000)


def payload(number: int) -> bytes:
    return number.to_bytes(4, "little") * (SIZE // 4)


def row_id(number: int) -> RowId:
    return RowId(f"p0-{number}.0.1")


def group(number: int) -> GroupRecord:
    return GroupRecord(
        group_id=GroupId(f"p0-{number}"),
        partition=0,
        issue=number,
        source="s",
        ordinal=number,
        task_key=f"s/{number}",
        task="{}",
        num_slots=1,
        due="{}",
        why="{}",
        state=GroupState.CLOSED,
        reason="",
        issued_at=0.0,
        ended_at=0.0,
    )


def row(number: int, at: Location) -> RowRecord:
    return stored_row(f"p0-{number}", at, payload(number), arrival=number)


async def fill(ledger: Ledger, numbers: Sequence[int], *, freed: bool = True) -> None:
    records: list[Record] = [group(number) for number in numbers]
    records += [row(number, ledger.place(payload(number))) for number in numbers]
    if freed:
        records += [
            FreedRecord(group_id=GroupId(f"p0-{number}"), at=float(number)) for number in numbers
        ]
    await ledger.write(records)


def readable(ledger: Ledger, numbers: Sequence[int]) -> list[int]:
    found: list[int] = []
    for number in numbers:
        record = ledger.row(row_id(number))
        assert record is not None
        try:
            assert ledger.payload(record) == payload(number)
            found.append(number)
        except StoreError:
            pass
    return found


async def sweep(ledger: Ledger, times: int = 3) -> Compactor:
    compactor = Compactor(ledger, bytes_per_s=1e12)
    for _ in range(times):
        await compactor.sweep()
    return compactor


def disk_bytes(ledger: Ledger) -> int:
    return sum(segments.sizes(ledger.segments_folder).values())


async def test_all_is_kept_below_the_bound_and_settled_segments_are_left_alone(
    tmp_path: Path,
) -> None:
    ledger = Ledger(tmp_path, keep=KeepSpec(max_bytes=1 << 20))
    await fill(ledger, range(1, 101))
    compactor = await sweep(ledger)
    assert readable(ledger, range(1, 101)) == [*range(1, 101)]
    assert kept_bytes(ledger.tables, ledger.kept) == 100 * SIZE
    assert len(compactor.settled) == 8, "all but the newest two of ten"
    assert compactor.moved_bytes == 0 and read_kept(ledger.tables).limit == RANKS
    ledger.close()


async def test_above_the_bound_an_even_share_of_the_whole_run_remains(tmp_path: Path) -> None:
    spec = KeepSpec(max_bytes=50 * SIZE)
    ledger = Ledger(tmp_path, keep=spec)
    for start in range(1, 401, 40):
        await fill(ledger, range(start, start + 40))
        await sweep(ledger, 1)
        assert kept_bytes(ledger.tables, ledger.kept) <= spec.max_bytes
    await sweep(ledger)
    left = readable(ledger, range(1, 401))
    assert ledger.kept.share == 0.125 and 45 <= len(left) <= 80, "and what shares a segment"
    parts = [sum(1 for n in left if 100 * q < n <= 100 * (q + 1)) for q in range(4)]
    assert min(parts) >= 10, f"each quarter of the run: {parts}"
    odd = sum(n % 2 for n in left)
    assert 0.35 < odd / len(left) < 0.65, "both of two sources that take turns"
    assert disk_bytes(ledger) < 3 * spec.max_bytes
    ledger.close()
    again = Ledger(tmp_path, keep=KeepSpec(max_bytes=1 << 30))
    assert again.kept == ledger.kept, "what was released stays released after a restart"
    await sweep(again)
    assert set(left) >= set(readable(again, range(1, 401)))
    assert kept_bytes(again.tables, again.kept) >= 0.8 * 50 * SIZE
    again.close()


async def test_a_sample_keeps_its_share(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, keep=KeepSpec(max_bytes=1 << 20, share=0.1))
    await fill(ledger, range(1, 401))
    await sweep(ledger)
    assert 35 <= kept_bytes(ledger.tables, ledger.kept) / SIZE <= 45
    assert 35 <= len(readable(ledger, range(1, 391))) <= 60
    ledger.close()


async def test_a_window_keeps_the_newest(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, keep=KeepSpec(max_bytes=50 * SIZE, is_window=True))
    await fill(ledger, range(1, 201))
    await sweep(ledger)
    left = readable(ledger, range(1, 201))
    assert left == [*range(left[0], 201)] and 45 <= len(left) <= 55
    await fill(ledger, range(201, 221))
    await sweep(ledger)
    left = readable(ledger, range(1, 221))
    assert left == [*range(left[0], 221)] and 45 <= len(left) <= 55
    ledger.close()


async def test_what_training_needs_is_never_released(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, keep=KeepSpec(max_bytes=1))
    await fill(ledger, range(1, 51), freed=False)
    await fill(ledger, range(51, 101))
    await sweep(ledger)
    assert readable(ledger, range(1, 51)) == [*range(1, 51)]
    assert kept_bytes(ledger.tables, ledger.kept) <= 1
    ledger.close()


async def test_a_short_disk_releases_kept_payload_before_work_is_refused(tmp_path: Path) -> None:
    spec = KeepSpec(max_bytes=1 << 20, min_free_bytes=1000 << 20)
    ledger = Ledger(tmp_path, keep=spec)
    await fill(ledger, range(1, 201))
    usage = ledger.usage
    ledger.usage = lambda: replace(usage(), free_bytes=1300 << 20)
    await sweep(ledger)
    assert ledger.kept.share == 1.0
    ledger.usage = lambda: replace(usage(), free_bytes=1200 << 20)  # work stops below 1000
    keeper = Keeper(ledger)
    await keeper.look(1)
    assert ledger.kept.share == 0.25
    await keeper.look(1)
    assert ledger.kept.share == 0.25, "compaction has not acted yet"
    for _ in range(9):
        await keeper.look(1)
    assert ledger.kept.share < 0.01, "the disk is still short"
    await sweep(ledger)
    assert disk_bytes(ledger) < 30 * SIZE
    ledger.close()


async def test_columns_and_rows_of_a_slow_stage_stay(tmp_path: Path) -> None:
    """Without any keeping, too: the stage's cursor holds both."""
    ledger = Ledger(tmp_path, stages=["slow"])
    columns = [
        ColumnRecord(
            space="train",
            row_id=row_id(number),
            name="scores",
            failed="",
            value=None,
            digest="",
            segment=at.segment,
            offset=at.offset,
            length=at.length,
            writer="w",
            at=0.0,
        )
        for number in (1, 2)
        for at in [ledger.place(payload(number))]
    ]
    reader = ReaderRecord(
        name="slow",
        space="train",
        reads='["turns"]',
        writes="[]",
        on="delivered",
        deadline_s=0.0,
        ttl_s=12.0,
        max_attempts=3,
        cursor=1,
        at=0.0,
    )
    await ledger.write([reader, *columns])
    await fill(ledger, range(1, 31))
    await sweep(ledger)
    assert readable(ledger, range(2, 31)) == [*range(2, 31)]
    [held] = ledger.tables.read(ColumnRecord, "row_id = :id", id=row_id(2))
    assert ledger.read_payload(held) == payload(2)
    ledger.close()


async def test_a_forgotten_session_is_not_kept(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, keep=KeepSpec(max_bytes=1 << 20))
    await fill(ledger, range(1, 41))
    compactor = await sweep(ledger)
    await ledger.write([MetaRecord(key=gone_key(row_id(5)), value="forgotten")])
    await compactor.sweep()
    assert readable(ledger, range(1, 41)) == [n for n in range(1, 41) if n != 5]
    files = [path.read_bytes() for path in ledger.segments_folder.iterdir()]
    assert not any(payload(5) in data for data in files), "its bytes are gone from the disk"
    ledger.close()
