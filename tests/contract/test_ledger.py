# SPDX-License-Identifier: Apache-2.0
"""A write is durable when its future is done, in order, and storage errors are final."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
import subprocess
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import pytest

from penstock.dataflow.ledger.bounds import STATVFS_INTERVAL_S, StorageLimits
from penstock.dataflow.ledger.payloads import MemoryPayloads
from penstock.dataflow.ledger.segments import HEADER, segment_path
from penstock.dataflow.ledger.store import Ledger
from penstock.dataflow.records import Deletion, MetaRecord, Record, SourceRecord
from penstock.errors import StorageFull, StoreError

MB = 1 << 20


def source(name: str, ordinal: int) -> SourceRecord:
    return SourceRecord(name=name, next_ordinal=ordinal)


async def test_the_last_write_of_a_key_stands(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    writes = [ledger.write([source("a", n), source("b", -n)]) for n in range(200)]
    await asyncio.gather(*writes)
    assert sorted(ledger.tables.read(SourceRecord), key=lambda r: r.name) == [
        source("a", 199),
        source("b", -199),
    ]
    ledger.close()


async def test_acknowledged_means_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The segment's fdatasync comes before the SQL commit, and both before the answer."""
    ledger = Ledger(tmp_path)
    assert ledger.tables.scalar("PRAGMA synchronous") == 2, "FULL"
    assert ledger.tables.scalar("PRAGMA journal_mode") == "wal"
    order: list[str] = []
    real_sync, real_commit = os.fdatasync, ledger.tables.commit

    def sync(descriptor: int) -> None:
        real_sync(descriptor)
        order.append("sync")

    def commit(records: list[MetaRecord]) -> None:
        real_commit(records)
        order.append("commit")

    monkeypatch.setattr(os, "fdatasync", sync)
    monkeypatch.setattr(ledger.tables, "commit", commit)
    ledger.place(b"payload")
    await ledger.write([source("a", 1)])
    order.append("answer")
    assert order == ["sync", "commit", "answer"]
    ledger.close()


async def test_a_failed_sync_is_final(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[StoreError] = []
    ledger = Ledger(tmp_path, on_failure=failures.append)

    def broken(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", broken)
    ledger.place(b"payload")
    with pytest.raises(StoreError, match="Input/output error"):
        await ledger.write([source("a", 1)])
    assert failures and not ledger.tables.read(SourceRecord), "nothing was acknowledged or stored"
    later = ledger.write([source("b", 1)])
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(later), 0.2)
    ledger.close()


async def test_one_process_writes_a_ledger(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    with pytest.raises(StoreError, match="already open in another dataflow service"):
        Ledger(tmp_path)
    ledger.close()
    Ledger(tmp_path).close()


async def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    await ledger.write([MetaRecord(key="format", value="99")])
    ledger.close()
    with pytest.raises(StoreError, match="format 99"):
        Ledger(tmp_path)


async def test_an_answer_names_the_class_of_its_store(tmp_path: Path) -> None:
    files, memory = Ledger(tmp_path / "a"), Ledger(tmp_path / "b", MemoryPayloads())
    assert (files.durability, memory.durability) == ("D1", "D0")
    where = memory.place(b"payload")
    await memory.write([])
    assert memory.payloads.read(where) == b"payload"
    files.close()
    memory.close()


async def test_writes_of_one_turn_of_the_loop_share_a_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(tmp_path)
    groups: list[int] = []
    real = ledger.tables.commit

    def commit(records: Sequence[Record]) -> None:
        groups.append(len(records))
        real(records)

    monkeypatch.setattr(ledger.tables, "commit", commit)
    await asyncio.gather(*(ledger.write([source(f"s{n}", n)]) for n in range(50)))
    assert sum(groups) == 50
    assert len(groups) < 25, "one, unless the writing thread wakes up in the middle of the turn"
    ledger.write([source("last", 1)])  # nobody waits for it, and close comes in the same turn
    ledger.close()
    assert (sum(groups), groups[-1]) == (51, 1)


async def test_what_is_put_again_after_an_erasure_stays(tmp_path: Path) -> None:
    """Also when both are of one group, and although a transaction erases last."""
    ledger = Ledger(tmp_path)
    erasure = Deletion(kind=SourceRecord, where="name = :name", values={"name": "a"})
    writes = [[source("a", 1)], [erasure], [source("a", 2)], [source("b", 1), erasure]]
    await asyncio.gather(*map(ledger.write, writes[:3]))
    assert ledger.tables.read(SourceRecord) == [source("a", 2)]
    await ledger.write(writes[3])
    assert ledger.tables.read(SourceRecord) == [source("b", 1)]
    ledger.close()


async def test_queued_bytes_are_counted_until_they_are_durable(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    assert ledger.usage().queued_bytes == 0
    ledger.place(b"x" * 1000)
    written = ledger.write([])
    ledger.place(b"x" * 10)
    assert ledger.usage().queued_bytes == 1010
    await written
    assert ledger.usage().queued_bytes == 10
    await ledger.write([])
    assert ledger.usage().queued_bytes == 0
    ledger.close()


# --- a full disk ------------------------------------------------------------------------------


def full_after(times: int, real: Callable[..., int]) -> Callable[..., int]:
    """A writev that leaves half a record behind and finds the disk full, so many times."""
    left = [times]

    def writev(descriptor: int, parts: list[bytes], offset: int) -> int:
        if left[0] == 0:
            return real(descriptor, parts, offset)
        left[0] -= 1
        os.pwrite(descriptor, b"".join(parts)[: HEADER.size + 2], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    return writev


@pytest.mark.parametrize("times", [1, 3], ids=["the reserve helps", "space comes later"])
async def test_a_full_disk_is_waited_out(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[StoreError] = []
    ledger = Ledger(tmp_path, reserve_bytes=MB, on_failure=failures.append)
    first = ledger.place(b"first")
    await ledger.write([source("a", 1)])
    monkeypatch.setattr(os, "pwritev", full_after(times, os.pwritev))
    second = ledger.place(b"second")
    async with asyncio.timeout(60):
        await ledger.write([source("a", 2)])
    assert not failures
    assert [ledger.payloads.read(where) for where in (first, second)] == [b"first", b"second"]
    assert ledger.tables.read(SourceRecord) == [source("a", 2)]
    path = segment_path(ledger.segments_folder, second.segment)
    assert path.stat().st_size == second.offset + HEADER.size + second.length
    assert (tmp_path / "reserve").exists(), "taken back, because there is room"
    ledger.close()
    assert not (tmp_path / "reserve").exists(), "a closed ledger needs none"


async def test_nothing_is_acknowledged_while_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(tmp_path, reserve_bytes=MB)
    await ledger.write([source("a", 1)])
    monkeypatch.setattr(os, "pwritev", full_after(10_000, os.pwritev))
    where = ledger.place(b"payload")
    write = ledger.write([source("a", 2)])
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(write), 0.5)
    assert ledger.tables.read(SourceRecord) == [source("a", 1)]
    assert segment_path(ledger.segments_folder, where.segment).stat().st_size == 0, "cut back"
    ledger.close()  # ends although the disk is full, and acknowledges nothing
    assert not write.done()


async def test_no_space_at_the_sync_is_final(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failed fsync nobody knows what is on disk, whatever its reason was."""
    ledger = Ledger(tmp_path, reserve_bytes=MB)
    syncs: list[int] = []

    def broken(descriptor: int) -> None:
        syncs.append(descriptor)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fdatasync", broken)
    ledger.place(b"payload")
    with pytest.raises(StoreError, match="No space left"):
        await ledger.write([source("a", 1)])
    assert len(syncs) == 1
    ledger.close()


def sqlite_full() -> sqlite3.Error:
    connection = sqlite3.connect(":memory:")
    connection.execute("PRAGMA max_page_count = 3")
    connection.execute("CREATE TABLE t (a BLOB)")
    try:
        connection.execute("INSERT INTO t VALUES (zeroblob(100000))")
    except sqlite3.Error as error:
        return error
    finally:
        connection.close()
    raise AssertionError("three pages hold no 100 kB")


async def test_a_database_without_room_is_waited_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(tmp_path, reserve_bytes=MB)
    errors = [sqlite_full(), sqlite_full()]
    appended: list[int] = []
    real_commit, real_append = ledger.tables.commit, ledger.payloads.append

    def commit(records: Sequence[Record]) -> None:
        if errors:
            raise errors.pop()
        real_commit(records)

    def append(chunks: Sequence[object]) -> None:
        appended.append(len(chunks))
        real_append(chunks)  # type: ignore[arg-type]

    monkeypatch.setattr(ledger.tables, "commit", commit)
    monkeypatch.setattr(ledger.payloads, "append", append)
    ledger.place(b"payload")
    async with asyncio.timeout(60):
        await ledger.write([source("a", 1)])
    assert not errors and ledger.tables.read(SourceRecord) == [source("a", 1)]
    assert appended == [1], "the payload is written once"
    ledger.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Generator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32m", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs root rights and mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.root
async def test_a_disk_that_fills_and_is_freed(small_disk: Path) -> None:
    """507 at the door, small writes go on with the reserve, and all without a restart."""
    failures: list[StoreError] = []
    ledger = Ledger(small_disk, reserve_bytes=4 * MB, on_failure=failures.append)
    bounds = StorageLimits(min_free_bytes=4 * MB, low_water_free_bytes=8 * MB)
    places = {n: ledger.place(bytes([n]) * MB) for n in range(4)}
    await ledger.write([source("a", 1)])
    bounds.check_delivery(ledger.usage(), MB)
    ballast = small_disk / "ballast"
    with pytest.raises(OSError, match="No space"), ballast.open("wb", buffering=0) as out:
        while True:
            out.write(b"b" * MB)
    await asyncio.sleep(STATVFS_INTERVAL_S)
    with pytest.raises(StorageFull):
        bounds.check_delivery(ledger.usage(), MB)
    async with asyncio.timeout(60):  # sealing and commits: more than SQLite had room for
        await ledger.write([MetaRecord(key=f"k{n}", value="v" * 1000) for n in range(500)])
    assert not (small_disk / "reserve").exists()

    places |= {n: ledger.place(bytes([n]) * MB) for n in range(4, 12)}
    late = ledger.write([source("a", 2)])  # leased work that was let in a moment before
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(late), 0.5)
    with pytest.raises(StorageFull):
        bounds.check_delivery(ledger.usage(), MB)
    assert ledger.payloads.read(places[3]) == bytes([3]) * MB, "reading goes on"

    ballast.unlink()
    async with asyncio.timeout(60):
        await late
    await asyncio.sleep(STATVFS_INTERVAL_S)
    bounds.check_delivery(ledger.usage(), MB)
    assert (small_disk / "reserve").stat().st_blocks * 512 >= 4 * MB
    assert not failures and ledger.tables.read(SourceRecord) == [source("a", 2)]
    assert all(ledger.payloads.read(where) == bytes([n]) * MB for n, where in places.items())
    ledger.close()
