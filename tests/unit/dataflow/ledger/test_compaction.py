# SPDX-License-Identifier: Apache-2.0
"""Space comes back, and nothing that a record names is ever lost: whole sweeps, readers beside
them, damage, and a crash at each step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.sim.reader_world import no_blobs
from tests.unit.dataflow.ledger.stored_rows import stored_row

from penstock.dataflow.column_records import BundleRecord, ColumnRecord
from penstock.dataflow.columns.bundles import INLINE_BYTES, bundle_record, drafts
from penstock.dataflow.columns.reading import BundleReader, RowStoreReader
from penstock.dataflow.ledger import compaction, segments
from penstock.dataflow.ledger.compaction import Compactor
from penstock.dataflow.ledger.segments import Location
from penstock.dataflow.ledger.store import Ledger
from penstock.dataflow.records import Deletion, FreedRecord, RowRecord
from penstock.errors import StoreError
from penstock.types import GroupId, RowId

PER_SEGMENT = 10
SIZE = 1000


def payload(number: int) -> bytes:
    return number.to_bytes(4, "little") * (SIZE // 4)


def row_id(number: int) -> RowId:
    return RowId(f"g{number}.0.1")


def row(number: int, at: Location) -> RowRecord:
    return stored_row(f"g{number}", at, payload(number))


def column(key: str, space: str, at: Location) -> ColumnRecord:
    return ColumnRecord(
        space=space,
        row_id=RowId(key),
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


def freed(*numbers: int) -> list[FreedRecord]:
    return [FreedRecord(group_id=GroupId(f"g{number}"), at=0.0) for number in numbers]


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "MAX_SEGMENT_BYTES", PER_SEGMENT * (SIZE + 12))
    monkeypatch.setattr(compaction, "COPY_BATCH_BYTES", 2 * SIZE)


async def fill(ledger: Ledger, numbers: range) -> None:
    await ledger.write([row(number, ledger.place(payload(number))) for number in numbers])


def lost(ledger: Ledger, numbers: Sequence[int]) -> list[int]:
    """Rows whose payload is not what was delivered."""

    def is_lost(number: int) -> bool:
        found = ledger.row(row_id(number))
        return found is None or ledger.payload(found) != payload(number)

    return [number for number in numbers if is_lost(number)]


def fast(ledger: Ledger) -> Compactor:
    return Compactor(ledger, bytes_per_s=1e12)


async def test_dead_segments_go_and_half_dead_ones_are_emptied_first(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    await fill(ledger, range(50))
    live = [1, 3, 5, 6, *range(20, 50)]  # of segment 2 nothing lives, of 1 four in ten
    await ledger.write(freed(*sorted(set(range(50)) - set(live))))
    compactor = fast(ledger)
    await compactor.sweep()
    assert sorted(segments.sizes(ledger.segments_folder)) == [3, 4, 5, 6]
    assert lost(ledger, live) == []
    assert compactor.moved_bytes == 4 * SIZE
    assert compactor.deleted_bytes == 2 * PER_SEGMENT * (SIZE + 12)
    await compactor.sweep()
    assert compactor.moved_bytes == 4 * SIZE, "what is half alive or more stays where it is"
    ledger.close()


async def test_columns_live_with_their_row_and_items_until_erased(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    await fill(ledger, range(7))
    ids = [(row_id(1), "train"), (row_id(2), "train"), ("mine", "eval")]
    written = [column(key, space, ledger.place(key.encode() * 40)) for key, space in ids]
    await ledger.write(written)
    await fill(ledger, range(10, 30))
    await ledger.write(freed(0, 2, 3, 4, 5, 6))
    await fast(ledger).sweep()
    assert 1 not in segments.sizes(ledger.segments_folder)
    for key, _ in (ids[0], ids[2]):
        [found] = ledger.tables.read(ColumnRecord, "row_id = :key", key=key)
        at = Location(segment=found.segment, offset=found.offset, length=found.length)
        assert ledger.payloads.read(at) == key.encode() * 40
    [stale] = ledger.tables.read(ColumnRecord, "row_id = :key", key=row_id(2))
    assert stale.segment == 1, "a freed row's column is not copied"
    everything = Deletion(kind=ColumnRecord, where="space = :space", values={"space": "eval"})
    await ledger.write([everything])
    assert compaction.live_bytes(ledger.tables, found.segment) == sum(
        SIZE if r.segment == found.segment else 0 for r in ledger.tables.read(RowRecord, "")
    ) + len(ids[0][0] * 40)
    ledger.close()


async def test_values_of_rows_put_together_move_with_their_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = bytes(range(256)) * (INLINE_BYTES // 256 + 1)
    monkeypatch.setattr(segments, "MAX_SEGMENT_BYTES", 3 * len(values))
    ledger = Ledger(tmp_path)
    [draft] = drafts([(RowId("mine"), {"x": values})], no_blobs)
    kept = bundle_record(draft, ledger.place, space="eval", arrival=1, writer="w", now=0.0)
    await ledger.write([kept, row(0, ledger.place(bytes(3 * len(values))))])
    await fill(ledger, range(1, 2 * 3 * len(values) // SIZE))
    reading = RowStoreReader(ledger, lambda space: False)
    await ledger.write(freed(*range(2 * 3 * len(values) // SIZE)))
    before = reading.read("eval", [RowId("mine")], [])
    await fast(ledger).sweep()
    assert 1 not in segments.sizes(ledger.segments_folder)
    assert reading.read("eval", [RowId("mine")], []) == before
    opened = BundleReader(ledger, kept, [])
    assert opened.row(RowId("mine"), 0) == ({"x": values}, {}), "it moved after somebody looked"
    await ledger.write([Deletion(kind=BundleRecord, where="space = 'eval'", values={})])
    left = segments.sizes(ledger.segments_folder)
    assert sum(compaction.live_bytes(ledger.tables, segment) for segment in left) == 0
    ledger.close()


async def test_a_record_put_anew_while_it_is_copied_keeps_its_new_place(tmp_path: Path) -> None:
    """Erased and written again under the same key: a move must not point it at the old bytes."""
    ledger = Ledger(tmp_path)
    await ledger.write([column("mine", "eval", ledger.place(b"old" * 400))])
    await fill(ledger, range(30))
    await ledger.write(freed(*range(30)))
    real = ledger.payloads.read
    compactor, replaced = fast(ledger), asyncio.Event()

    def read(location: Location) -> bytes:
        data = real(location)
        loop.call_soon_threadsafe(replaced.set)
        return data

    ledger.payloads.read = read
    loop = asyncio.get_running_loop()
    sweeping = asyncio.create_task(compactor.sweep())
    await replaced.wait()
    await ledger.write([column("mine", "eval", ledger.place(b"new" * 400))])
    await sweeping
    [found] = ledger.tables.read(ColumnRecord, "row_id = 'mine'")
    at = Location(segment=found.segment, offset=found.offset, length=found.length)
    assert real(at) == b"new" * 400
    ledger.close()


async def test_readers_never_notice(tmp_path: Path) -> None:
    """Rows read before a move are asked for after it: every one comes, through its row."""
    ledger = Ledger(tmp_path)
    await fill(ledger, range(60))
    live = list(range(0, 60, 3))
    await ledger.write(freed(*sorted(set(range(60)) - set(live))))
    before = [ledger.row(row_id(number)) for number in live]
    done = False

    def read_on() -> int:
        rounds = 0
        while not done:
            for number, found in zip(live, before, strict=True):
                assert found is not None and ledger.payload(found) == payload(number)
            rounds += 1
        return rounds

    reader = asyncio.create_task(asyncio.to_thread(read_on))
    compactor = fast(ledger)
    for _ in range(3):
        await compactor.sweep()
    done = True
    assert await reader > 0 and compactor.moved_bytes > 0
    assert len(segments.sizes(ledger.segments_folder)) <= 4
    ledger.close()


async def test_a_damaged_record_keeps_its_segment(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    await fill(ledger, range(30))
    await ledger.write(freed(*range(7)))
    path = segments.segment_path(ledger.segments_folder, 1)
    data = bytearray(path.read_bytes())
    data[8 * (SIZE + 12) + 500] ^= 1
    path.write_bytes(data)
    compactor, real, reads = fast(ledger), ledger.payloads.read, list[Location]()

    def read(location: Location) -> bytes:
        reads.append(location)
        return real(location)

    ledger.payloads.read = read
    for _ in range(3):
        await compactor.sweep()
    assert path.exists() and compactor.moved_bytes == 2 * SIZE, "its neighbours moved"
    assert len(reads) == 3, "nobody reads it again and again"
    assert lost(ledger, [7, 9]) == []
    with pytest.raises(StoreError, match="damaged"):
        lost(ledger, [8])
    ledger.close()


async def test_numbers_of_segments_are_never_used_twice(tmp_path: Path) -> None:
    """A freed row still names its old segment; nothing else may ever lie under that number."""
    numbers: list[int] = []
    for life in range(3):
        ledger = Ledger(tmp_path)  # a life that writes nothing leaves no segment of its own
        await fast(ledger).sweep()
        ledger.close()
        ledger = Ledger(tmp_path)
        await fill(ledger, range(life, life + 1))
        await ledger.write(freed(life))
        found = ledger.row(row_id(life))
        assert found is not None
        numbers.append(found.segment)
        ledger.close()
    assert numbers == [1, 2, 3]


async def test_many_segments_are_looked_at_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "SEGMENTS_PER_SWEEP", 2)
    ledger = Ledger(tmp_path)
    await fill(ledger, range(81))
    await ledger.write(freed(*range(60, 70)))  # the seventh of nine
    compactor = fast(ledger)
    for _ in range(4):
        assert compactor.deleted_bytes == 0
        await compactor.sweep()
    assert 7 not in segments.sizes(ledger.segments_folder)
    assert lost(ledger, [*range(60), *range(70, 81)]) == []
    ledger.close()


async def test_on_a_full_disk_dead_segments_go_and_nothing_is_copied(tmp_path: Path) -> None:
    """A copy that does not fit would keep the ledger waiting for the space it should make."""
    ledger = Ledger(tmp_path)
    await fill(ledger, range(40))
    await ledger.write(freed(*range(17)))
    usage, compactor = ledger.usage, fast(ledger)
    ledger.usage = lambda: replace(usage(), free_bytes=2 * SIZE)
    await compactor.sweep()
    assert compactor.moved_bytes == 0 and 1 not in segments.sizes(ledger.segments_folder)
    ledger.usage = lambda: replace(usage(), free_bytes=6 * SIZE)
    await compactor.sweep()
    assert compactor.moved_bytes == 3 * SIZE and 2 not in segments.sizes(ledger.segments_folder)
    ledger.close()


class Crash(Exception):
    """The process ends here."""


class Fuse:
    """Blows at the nth step: before or after an append, a commit or a delete."""

    def __init__(self, step: int) -> None:
        self.left = step

    def burn(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise Crash

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def fused(*args: Any) -> Any:
            self.burn()
            result = call(*args)
            self.burn()
            return result

        return fused


async def crash_at(ledger: Ledger, step: int) -> bool:
    """Compact until this step; False when it finished before. Nothing is acknowledged after."""
    fuse = Fuse(step)
    store, tables = ledger.payloads, ledger.tables
    for owner, name in ((store, "append"), (store, "delete"), (tables, "commit")):
        setattr(owner, name, fuse.around(getattr(owner, name)))
    try:
        await fast(ledger).sweep()
    except (Crash, StoreError):
        return True
    finally:
        ledger.close()
    return False


async def test_a_crash_at_any_step_loses_nothing(tmp_path: Path) -> None:
    live = [1, 3, 5, 6, *range(22, 50)]
    step, has_crashed = 0, True
    while has_crashed:
        step += 1
        folder = tmp_path / str(step)
        ledger = Ledger(folder)
        await fill(ledger, range(50))
        await ledger.write(freed(*sorted(set(range(50)) - set(live))))
        has_crashed = await crash_at(ledger, step)
        ledger = Ledger(folder)
        assert lost(ledger, live) == [], f"after a crash at step {step}"
        for _ in range(2):
            await fast(ledger).sweep()
        assert lost(ledger, live) == [], f"in the life after a crash at step {step}"
        assert not {1, 2} & segments.sizes(ledger.segments_folder).keys()
        ledger.close()
    assert step > 8, "two portions are appended and committed, two segments deleted"
