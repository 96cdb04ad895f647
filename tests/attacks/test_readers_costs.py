# SPDX-License-Identifier: Apache-2.0
"""What one call about rows makes the service do: cells, queries, bytes read and wakeups are bounded
by what was declared and asked, not by how often a caller repeats a column."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.attacks.in_process import Door, dataflow_door
from tests.contract.row_service import RowServiceHost

from penstock.dataflow.client.rows import _parts  # pyright: ignore[reportPrivateUsage]
from penstock.dataflow.column_records import BundleRecord
from penstock.dataflow.columns import column_store, reading, row_window
from penstock.dataflow.columns import pages as row_pages
from penstock.dataflow.columns.bundles import (
    BlobLike,
    Bundle,
    NewRow,
    Values,
    bundle_record,
    drafts,
)
from penstock.dataflow.columns.cells import Cell, blob_cell
from penstock.dataflow.columns.pages import Page
from penstock.dataflow.columns.readers import Readers
from penstock.dataflow.columns.row_leases import (
    Claim,
    LeaseOutcome,
    Reader,
    ReaderSpec,
    RowTrigger,
)
from penstock.dataflow.columns.row_window import RowWindow
from penstock.dataflow.columns.values import BlobRef
from penstock.dataflow.ledger import segments
from penstock.dataflow.ledger.compaction import Compactor, live_bytes
from penstock.dataflow.ledger.segments import Location
from penstock.dataflow.ledger.store import Ledger
from penstock.dataflow.ledger.tables import Tables
from penstock.dataflow.records import MetaRecord, gone_key
from penstock.dataflow.service.process import Process
from penstock.dataflow.service.rows import handlers, reader_rights
from penstock.dataflow.service.rows.messages import (
    GetRequest,
    PutRequest,
    PutRow,
    ResultsRequest,
    RowLeaseRequest,
    RowResult,
)
from penstock.dataflow.service.rows.routes import row_routes
from penstock.errors import BadRequest, TooLarge
from penstock.types import RowId
from penstock.wire.auth import Role
from penstock.wire.codec import JSON, encode, encode_json

NAMES = [f"{number:x}" for number in range(1024)]
NUMBERS = dict.fromkeys(NAMES, 1.0)
CLAIM = Claim(row_id=RowId("a"), arrival=0, epoch=0)
TURNS = 300


@pytest.fixture
def num_cells(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The columns of which cells were made."""
    made: list[str] = []
    real = handlers.number_cell

    def number_cell(name: str, value: float) -> Cell:
        made.append(name)
        return real(name, value)

    monkeypatch.setattr(handlers, "number_cell", number_cell)
    return made


@asynccontextmanager
async def row_service(folder: Path, *stages: str) -> AsyncGenerator[RowServiceHost]:
    host = RowServiceHost(folder, stages=stages)
    yield host
    host.ledger.close()


async def record(door: Door, role: Role, num_results: int, columns: object) -> tuple[int, str]:
    result = {"claim": {"row_id": "a", "arrival": 0, "epoch": 0}, "columns": columns}
    body = {"reader": "mine", "worker": "w", "results": [result] * num_results}
    answer = await door.call("PUT", "/v1/rows/columns", role, body=body)
    return answer.status_code, answer.text


async def turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


def ratio(cost: Callable[[int], Callable[[], object]], num: int) -> float:
    """CPU time of 4 * num over that of num; 4 when linear, 16 when quadratic."""

    def least(work: Callable[[], object]) -> float:
        found: list[float] = []
        for _ in range(5):
            began = time.process_time()
            work()
            found.append(time.process_time() - began)
        return min(found)

    return least(cost(4 * num)) / least(cost(num))


# --- payload that readers wait for --------------------------------------------------------------


async def deliver_and_free(host: RowServiceHost, num_rows: int) -> None:
    for number in range(num_rows):
        await host.deliver(f"p0-{number}.0.1", b"%03d" % number * 300, 1.0)
        await host.free(f"p0-{number}")


def num_live(host: RowServiceHost) -> int:
    """Bytes of payload on the disk that may not be deleted."""
    ledger = host.ledger
    return sum(live_bytes(ledger.tables, s, stages=ledger.stages) for s in (0, 1, 2))


@pytest.mark.parametrize(("name", "keeps"), [("pin", False), ("score", True)])
async def test_only_a_stage_of_the_run_file_keeps_what_training_freed(
    name: str, keeps: bool, tmp_path: Path
) -> None:
    """Any token declares a reader, and leaves its cursor there: the disk would fill."""
    digest, size = "0" * 64, 1 << 20
    async with row_service(tmp_path, "score") as host:
        await host.rows.declare(ReaderSpec(name=name, reads=("turns",)))
        await deliver_and_free(host, 10)
        await host.deliver_blob("p0-10.0.1", digest, size)
        await host.free("p0-10")
        assert num_live(host) == (9000 if keeps else 0)
        assert (digest in host.rows._referenced_blobs([digest])) == keeps  # pyright: ignore[reportPrivateUsage]


async def test_what_an_operator_wants_forgotten_waits_for_no_reader(tmp_path: Path) -> None:
    """Nobody gets such a row any more, so nobody's cursor may keep it."""
    async with row_service(tmp_path, "score") as host:
        await host.rows.declare(ReaderSpec(name="score", reads=("turns",)))
        await deliver_and_free(host, 2)
        host.process.journal(MetaRecord(key=gone_key(RowId("p0-1.0.1")), value="forgotten"))
        await host.process.make_durable()
        assert num_live(host) == 900


async def test_a_reader_learns_that_a_value_was_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that it is damaged; the row itself, its reward and its columns are still there."""
    monkeypatch.setattr(segments, "MAX_SEGMENT_BYTES", 4000)
    async with row_service(tmp_path) as host:
        await host.rows.declare(ReaderSpec(name="pin", reads=("turns",)))
        await deliver_and_free(host, 15)
        await Compactor(host.ledger).sweep()
        keys = tuple(RowId(f"p0-{number}.0.1") for number in (0, 14))
        first, last = (await host.rows.get("train", GetRequest(keys=keys))).rows
        assert first.exists and first.columns == {"reward": 1.0}
        assert first.failed["turns"].kind == "freed"
        assert last.columns["turns"] == b"014" * 300, "the open segment"


# --- results of readers -----------------------------------------------------------------------


async def test_columns_that_a_reader_does_not_write_become_no_cells(
    tmp_path: Path, num_cells: list[str]
) -> None:
    """A token that may only read had four million cells hashed, and each refused with a text."""
    async with dataflow_door(tmp_path) as door:
        await door.call("PUT", "/v1/readers/mine", Role.READER, body={"reads": ["turns"]})
        status, text = await record(door, Role.READER, 8, NUMBERS)
        assert status == 400 and "may not write column '0'" in text, text[:200]
        assert not num_cells and len(text) < 1000


async def test_a_refusal_does_not_repeat_what_the_reader_writes(tmp_path: Path) -> None:
    """Eight results of 8 KB were answered with 60 MB: 62 long names for each of their columns."""
    async with dataflow_door(tmp_path) as door:
        writes = [f"{number:03}" + "w" * 120 for number in range(62)]
        body = {"reads": ["turns"], "writes": writes}
        await door.call("PUT", "/v1/readers/mine", Role.STAGE, body=body)
        status, text = await record(door, Role.STAGE, 8, NUMBERS)
        assert status == 400 and "GET /v1/readers" in text, text[:200]
        assert len(text) < 1000


async def test_a_row_is_asked_for_once_in_a_call(tmp_path: Path) -> None:
    """One row of 1 MB that was named 4,096 times was answered with 17 MB."""
    async with dataflow_door(tmp_path) as door:
        body: object = {"rows": [{"key": "k", "columns": {"c": b"x"}}]}
        await door.call("POST", "/v1/spaces/s/rows", Role.STAGE, body=body)
        for keys, status in ((["k"], 200), (["k", "k"], 400)):
            answer = await door.call("POST", "/v1/spaces/s/get", Role.READER, body={"keys": keys})
            assert answer.status_code == status, answer.text


async def test_the_columns_of_one_call_are_bounded(tmp_path: Path, num_cells: list[str]) -> None:
    """Of results, with the failed ones, and of rows that are put."""
    versions = {f"x@{name}": 1.0 for name in NAMES}
    async with dataflow_door(tmp_path) as door:
        body = {"reads": ["turns"], "writes": ["x"]}
        await door.call("PUT", "/v1/readers/mine", Role.STAGE, body=body)
        for num_results in (9, 65):  # each result's columns are records of their own
            status, text = await record(door, Role.STAGE, num_results, versions)
            assert status == 400 and "send fewer rows" in text, text[:200]
        rows = [{"key": f"k{number}", "columns": NUMBERS} for number in range(65)]
        answer = await door.call("POST", "/v1/spaces/s/rows", Role.STAGE, body={"rows": rows})
        assert answer.status_code == 400 and "send fewer rows" in answer.text, answer.text[:200]
        assert not num_cells
        answer = await door.call("POST", "/v1/spaces/s/rows", Role.STAGE, body={"rows": rows[:64]})
        assert answer.status_code == 200, answer.text[:200]


async def test_the_columns_that_become_records_are_bounded(tmp_path: Path) -> None:
    """Of rows that exist, and of blobs: 64,000 of them took two seconds of the event loop."""
    async with row_service(tmp_path) as host:
        rows = tuple(PutRow(key=RowId(f"k{number}"), columns=NUMBERS) for number in range(9))
        await host.rows.put("s", PutRequest(rows=rows), "w")
        with pytest.raises(BadRequest, match="put fewer rows"):
            await host.rows.put("s", PutRequest(rows=rows), "w")
        assert len((await host.rows.put("s", PutRequest(rows=rows[:8]), "w")).rejected) == 8_192
        blobs = dict.fromkeys(NAMES, BlobRef(digest="d" * 64, size=1))
        named: list[NewRow] = [(RowId(f"b{number}"), blobs) for number in range(9)]
        with pytest.raises(BadRequest, match="put fewer rows"):
            host.rows.spaces.put("s", [*drafts(named, one_blob)], "w", host.now)


def test_the_client_splits_what_it_puts() -> None:
    """As if all of its rows exist, and however wide each is."""
    for num_columns in (1, 33, 1000, 1024):
        rows = {f"k{n}": dict.fromkeys(NAMES[:num_columns], 1.0) for n in range(600)}
        parts = [*_parts(rows)]
        assert [key for part in parts for key, _, _ in part] == [*rows]
        assert max(sum(len(row) for _, row, _ in part) for part in parts) <= 8_192


async def test_many_columns_are_counted_before_they_are_read(tmp_path: Path) -> None:
    """32 MB of them took two seconds, in which no other call was answered. The reader of these does
    not even exist. Repeated fields are read too, and all but the last are forgotten."""
    async with dataflow_door(tmp_path) as door:
        status, text = await record(door, Role.READER, 65, NUMBERS)
        assert status == 400 and "send fewer rows" in text, text[:200]
        claim = encode(CLAIM)
        field = encode("columns") + encode(NUMBERS)
        result = b"\xde" + (301).to_bytes(2, "big") + encode("claim") + claim + field * 300
        body = b"\x83" + encode("reader") + encode("r") + encode("worker") + encode("w")
        body += encode("results") + b"\x91" + result
        answer = await door.call("PUT", "/v1/rows/columns", Role.READER, content=body)
        assert answer.status_code == 400 and "beside columns" in answer.text, answer.text[:200]


async def test_json_has_few_parts_and_bytes(tmp_path: Path) -> None:
    """46 MB of JSON took seven seconds: its lists are counted only when they are read."""
    few = b'{"reader": "r", "worker": "w", "results": [], "x": [%b]}'
    cases = {b",".join([b"{}"] * 20_000): 400, b'"' + b"y" * (4 << 20) + b'"': 413, b"{}": 404}
    async with dataflow_door(tmp_path) as door:
        for part, status in cases.items():
            answer = await door.call(
                "PUT", "/v1/rows/columns", Role.READER, content=few % part, media_type=JSON
            )
            assert answer.status_code == status, answer.text[:200]


async def test_rows_that_wait_do_not_make_a_reader_load_them_all_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who may only read named a column that never comes, and leased a row: a second of work, and
    again after the reader was deleted."""
    pages: list[str] = []
    real = row_window.load_page

    def load_page(tables: Tables, reader: Reader, num: int) -> Page:
        pages.append(reader.terms.name)
        return real(tables, reader, num)

    monkeypatch.setattr(row_window, "load_page", load_page)
    async with row_service(tmp_path) as host:
        for start in range(0, 12_000, 4_000):
            keys = (RowId(f"k{number}") for number in range(start, start + 4_000))
            rows = tuple(PutRow(key=key, columns={"x": 1.0}) for key in keys)
            await host.rows.put("s", PutRequest(rows=rows), "w")
        for name in ("first", "second"):
            await host.rows.declare(ReaderSpec(name=name, reads=("never",), space="s"))
            assert not host.rows.readers.lease(name, "w", "q", 1, host.now)
            assert pages.count(name) <= 4
            host.rows.readers.lease(name, "w", "r", 1, host.now)
            assert 4 < pages.count(name) <= 8  # it goes on where it was
        pages.clear()
        await host.rows.tick()
        assert 0 < len(pages) <= 8, "of all readers together"


async def lease_all(host: RowServiceHost, name: str, arrivals_per_row: int = 1) -> list[str]:
    """All rows that this reader gets in ten ticks. Each call looks at no more than four pages."""
    page = row_pages.SCAN_ROWS * arrivals_per_row
    reader, found = host.rows.readers.reader(name), list[str]()
    for number in range(10):
        before = reader.loaded_through
        ask = RowLeaseRequest(request_id=f"{name}{number}", worker="w", max_rows=64, wait_s=0.0)
        found += [row.claim.row_id for row in (await host.rows.lease(name, ask)).rows]
        assert reader.loaded_through - before <= 4 * page
        before = reader.loaded_through
        await host.rows.tick()
        assert reader.loaded_through - before <= 8 * page
    return found


@pytest.mark.parametrize("on", ["delivered", "admitted"])
async def test_a_new_reader_skips_what_was_freed_in_small_steps(
    on: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One query looked at all that the run ever freed, on the event loop: 96 small calls of a
    token that may only read stalled it for eight of ten seconds."""
    monkeypatch.setattr(row_pages, "SCAN_ROWS", 8)
    async with row_service(tmp_path) as host:
        await deliver_and_free(host, 200)
        host.now += 1.0
        for number in range(200, 210):
            await host.deliver(f"p0-{number}.0.1", b"turns", 1.0)
        await host.rows.declare(ReaderSpec(name="late", reads=("turns",), on=RowTrigger(on)))
        await host.rows.tick()
        host.rows.row_window.admitted([RowId(f"p0-{n}.0.1") for n in range(200, 210)], host.now)
        await host.rows.tick()
        assert await lease_all(host, "late") == [f"p0-{number}.0.1" for number in range(200, 210)]


async def test_a_reader_skips_what_it_finished_in_small_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restart: its cursor stands at the first row, which is under lease, and another row
    behind 200 that are finished."""
    monkeypatch.setattr(row_pages, "SCAN_ROWS", 8)
    async with row_service(tmp_path) as host:
        await host.rows.declare(ReaderSpec(name="mine", reads=("x",), space="s"))
        keys = [RowId(f"k{number:03d}") for number in range(202)]
        for key in keys:  # rows of another space lie between
            for space in ("s", "other"):
                row = PutRow(key=key, columns={"x": 1.0})
                await host.rows.put(space, PutRequest(rows=(row,)), "w")
        ask = RowLeaseRequest(request_id="r", worker="w", max_rows=201, wait_s=0.0)
        leased = (await host.rows.lease("mine", ask)).rows
        results = [RowResult(claim=row.claim, end=LeaseOutcome.DONE) for row in leased[1:]]
        body = ResultsRequest(reader="mine", worker="w", results=tuple(results))
        await host.rows.record(body)
        await host.rows.tick()
    async with row_service(tmp_path) as host:
        reader = host.rows.readers.reader("mine")
        assert [*reader.leased] == keys[:1] and reader.loaded_through <= 64
        assert await lease_all(host, "mine", arrivals_per_row=2) == keys[-1:]


async def test_readers_share_the_memory_for_rows_that_wait(tmp_path: Path) -> None:
    """256 readers of one token kept 65,536 rows each: gigabytes. Stages keep their window."""
    host = RowServiceHost(tmp_path)
    window = RowWindow(
        host.rows.columns, host.ledger.tables, host.process.journal, stages=["stage"], window=1024
    )
    readers = Readers(window, host.process.journal)
    for name in ("stage", *(f"r{number}" for number in range(31))):
        readers.declare(ReaderSpec(name=name, reads=("never",)), host.now)
    keys = [RowId(f"k{number}") for number in range(2000)]
    window.add_rows("train", keys, 1, (), host.now)
    sizes = {len(reader.window) for name, reader in window.readers.items() if name != "stage"}
    assert sizes == {512} and len(window.readers["stage"].window) == 1024
    host.ledger.close()


async def test_columns_of_one_call_are_looked_up_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version of a column (`x@7`) cost a query each."""
    async with row_service(tmp_path) as host:
        await host.rows.declare(ReaderSpec(name="mine", reads=("turns",), writes=("x",)))
        queries: list[str] = []
        real = Tables.read

        def read(tables: Tables, kind: Any, where: str = "", **values: Any) -> list[Any]:
            queries.append(kind.__name__)
            return real(tables, kind, where, **values)

        monkeypatch.setattr(Tables, "read", read)
        columns = {f"x@{number}": 1.0 for number in range(50)}
        claims = [Claim(row_id=RowId(f"r{number}"), arrival=0, epoch=0) for number in range(20)]
        results = tuple(RowResult(claim=claim, columns=columns) for claim in claims)
        body = ResultsRequest(reader="mine", worker="w", results=results)
        answer = await host.rows.record(body)
        assert len(answer.outcomes) == 20 and len(queries) == 1, queries


async def test_columns_written_twice_in_one_call_are_compared(tmp_path: Path) -> None:
    """What a call looked up at its start does not hide what it wrote itself."""
    async with row_service(tmp_path) as host:
        spec = ReaderSpec(name="mine", reads=("t",), writes=("x",), space="s")
        await host.rows.declare(spec)
        row = PutRow(key=RowId("a"), columns={"t": 1.0})
        await host.rows.put("s", PutRequest(rows=(row,)), "w")
        ask = RowLeaseRequest(request_id="r", worker="w", max_rows=1, wait_s=0.0)
        [leased] = (await host.rows.lease("mine", ask)).rows
        values = ({"x": 1.0, "x@7": 1.0}, {"x": 1.0, "x@7": 2.0}, {"x": 2.0, "x@7": 1.0})
        results = tuple(RowResult(claim=leased.claim, columns=columns) for columns in values)
        body = ResultsRequest(reader="mine", worker="w", results=results)
        outcomes = (await host.rows.record(body)).outcomes
        found = [one.status for outcome in outcomes for one in outcome.columns.values()]
        assert found == ["stored", "stored", "duplicate", "conflict", "conflict", "duplicate"]
        again = (await host.rows.record(body)).outcomes
        assert [one.status for one in again[0].columns.values()] == ["duplicate", "duplicate"]


async def test_calls_with_large_bodies_share_the_budget_of_their_credential(
    tmp_path: Path,
) -> None:
    """Their answers are large too, and wait in memory for who does not read them."""
    async with row_service(tmp_path) as host:
        large = [route for route in row_routes(host.rows) if route.max_body_bytes > 1 << 20]
        assert {route.path for route in large} >= {"/v1/rows/columns", "/v1/spaces/{space}/rows"}
        assert all(route.shares_budget for route in large)


# --- rows that are put ------------------------------------------------------------------------


def no_cell(name: str, blob: BlobLike) -> Cell:
    raise AssertionError("no row names a blob")


def test_rows_whose_columns_come_in_another_order_are_one_bundle() -> None:
    """One record for each of them otherwise."""
    backwards = dict(reversed([*NUMBERS.items()]))
    rows: list[NewRow] = [(RowId(f"k{n}"), backwards if n % 2 else NUMBERS) for n in range(6)]
    [draft] = drafts(rows, no_cell)
    assert [key for key, _ in draft.rows] == [key for key, _ in rows]


def test_a_bundle_has_a_bounded_number_of_cells() -> None:
    rows: list[NewRow] = [(RowId(f"k{number}"), NUMBERS) for number in range(50)]
    made = [*drafts(rows, no_cell)]
    assert [key for draft in made for key in draft.keys] == [key for key, _ in rows]
    assert 1 < len(made) < 10 and max(draft.num_cells for draft in made) <= 8_192


def test_the_keys_of_a_bundle_are_bounded() -> None:
    """They are read, and decoded, for any of its rows."""
    rows: list[NewRow] = [(RowId(f"{n}".ljust(256, "k")), {"x": 1.0}) for n in range(4_096)]
    made = [*drafts(rows, no_cell)]
    assert [key for draft in made for key in draft.keys] == [key for key, _ in rows]
    assert max(sum(map(len, draft.keys)) for draft in made) <= 257 << 10


def no_place(payload: bytes) -> Location:
    raise AssertionError("no value is long")


def numbers_and_blobs(num: int) -> Values:
    ref = BlobRef(digest="d" * 64, size=1)
    return {f"{number:x}": ref if number % 2 else b"" for number in range(num)}


def one_blob(name: str, blob: BlobLike) -> Cell:
    return blob_cell(name, blob.digest, blob.size)


def test_many_columns_are_packed_in_proportion() -> None:
    def pack(num: int) -> Callable[[], object]:
        row = numbers_and_blobs(num)
        return lambda: [*drafts([(RowId("k"), row)], one_blob)]

    assert ratio(pack, 1000) < 9


def test_rows_without_those_that_exist_are_packed_in_proportion() -> None:
    def remove(num: int) -> Callable[[], object]:
        rows: list[NewRow] = [
            (RowId(f"k{n}"), {"a": BlobRef(digest=f"{n:064x}", size=1)}) for n in range(num)
        ]
        [draft] = drafts(rows, one_blob)
        return lambda: [*draft.without({RowId("k0")})]

    assert ratio(remove, 1000) < 9


def test_columns_of_a_bundle_are_found_in_proportion() -> None:
    def find(num: int) -> Callable[[], object]:
        values = {f"{number:x}": b"" for number in range(num)}
        [draft] = drafts([(RowId("k"), values)], no_cell)
        record = bundle_record(draft, no_place, space="s", arrival=1, writer="w", now=0.0)
        bundle = Bundle(record)
        return lambda: [bundle.column(0, name) for name in values]

    assert ratio(find, 1000) < 9


async def test_many_small_values_are_prepared_off_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with row_service(tmp_path) as host:
        threads: list[threading.Thread] = []
        real = handlers.drafts

        def drafts(*values: Any) -> Any:
            threads.append(threading.current_thread())
            return real(*values)

        monkeypatch.setattr(handlers, "drafts", drafts)
        for num in (2, 20):
            rows = tuple(PutRow(key=RowId(f"{num}-{n}"), columns=NUMBERS) for n in range(num))
            await host.rows.put("s", PutRequest(rows=rows), "w")
        here, elsewhere = threads
        assert here is threading.current_thread() is not elsewhere


# --- rows that are read -----------------------------------------------------------------------


async def test_a_get_reads_no_more_than_it_may_keep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One small column of each row made the service read, and keep, all that it has of them."""
    monkeypatch.setattr(reading, "READ_BYTES", 100_000)
    async with row_service(tmp_path) as host:
        keys = [RowId(f"k{number}") for number in range(10)]
        for key in keys:
            row = PutRow(key=key, columns={"n": 1.0, "b": bytes(40_000)})
            await host.rows.put("s", PutRequest(rows=(row,)), "w")
        num_read = 0
        real = Ledger.read_payload

        def read_payload(ledger: Ledger, found: Any) -> bytes:
            nonlocal num_read
            num_read += found.length
            return real(ledger, found)

        monkeypatch.setattr(Ledger, "read_payload", read_payload)
        seen: list[RowId] = []
        while len(seen) < len(keys):
            num_read = 0
            body = GetRequest(keys=tuple(keys[len(seen) :]), columns=("n",))
            answer = await host.rows.get("s", body)
            assert answer.rows and all(row.columns == {"n": 1.0} for row in answer.rows)
            assert num_read <= 100_000 + 40_000
            seen += [row.key for row in answer.rows]
        assert seen == keys


async def put_bundles(host: RowServiceHost, num: int) -> list[RowId]:
    """As many bundles of 64 rows with keys of 200 characters; returns a key of each."""
    for bundle in range(num):
        keys = (RowId(f"{bundle}-{n}".ljust(200, "k")) for n in range(64))
        rows = tuple(PutRow(key=key, columns={"x": 1.0}) for key in keys)
        await host.rows.put("s", PutRequest(rows=rows), "w")
    await host.rows.tick()
    return [RowId(f"{bundle}-0".ljust(200, "k")) for bundle in range(num)]


def read_key_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of keys that each query reads."""
    found: list[int] = []
    real = Tables.read

    def read(tables: Tables, kind: Any, where: str = "", **values: Any) -> list[Any]:
        records = real(tables, kind, where, **values)
        if kind is BundleRecord:
            found.append(sum(len(record.keys) for record in records))
        return records

    monkeypatch.setattr(Tables, "read", read)
    return found


async def test_a_put_reads_few_keys_of_other_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row is in a bundle with the keys of 4,096: a call of 70 KB read, and kept, 690 MB on
    the event loop."""
    monkeypatch.setattr(column_store, "LOOKUP_BYTES", 1 << 20)
    async with row_service(tmp_path) as host:
        keys, found = await put_bundles(host, 120), read_key_bytes(monkeypatch)
        rows = tuple(PutRow(key=key, columns={"x": 1.0, "y": 1.0}) for key in keys)
        with pytest.raises(TooLarge, match="fewer rows"):
            await host.rows.put("s", PutRequest(rows=rows), "w")
        assert sum(found) < 1_400_000 and max(found) < 250_000
        for part in (rows[:60], rows[60:]):
            refused = await host.rows.put("s", PutRequest(rows=part), "w")
            assert [one.status for one in refused.rejected] == ["duplicate"] * 60
        body = GetRequest(keys=tuple(keys), columns=("y",))
        assert len((await host.rows.get("s", body)).rows) == 120


async def test_a_get_reads_few_keys_of_other_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "READ_BYTES", 400_000)
    async with row_service(tmp_path) as host:
        keys, found = await put_bundles(host, 100), read_key_bytes(monkeypatch)
        seen: list[RowId] = []
        while len(seen) < len(keys):
            found.clear()
            answer = await host.rows.get("s", GetRequest(keys=tuple(keys[len(seen) :])))
            assert answer.rows and all(row.columns == {"x": 1.0} for row in answer.rows)
            assert sum(found) <= 400_000 + 250_000
            seen += [row.key for row in answer.rows]
        assert seen == keys


# --- polls ------------------------------------------------------------------------------------


async def test_open_polls_of_readers_have_a_quota_per_credential(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_rights, "MAX_POLLS", 3, raising=False)
    async with dataflow_door(tmp_path) as door:

        async def poll(subject: str, request_id: str, wait_s: float) -> int:
            body = {"request_id": request_id, "worker": "w", "max_rows": 1, "wait_s": wait_s}
            headers = {"authorization": f"Bearer {door.token(Role.READER, subject)}"}
            headers["content-type"] = JSON
            path = "/v1/readers/mine/leases"
            answer = await door.http.post(path, headers=headers, content=encode_json(body))
            return answer.status_code

        await door.call("PUT", "/v1/readers/mine", Role.READER, body={"reads": ["turns"]})
        held = [asyncio.create_task(poll("greedy", f"r{n}", 20.0)) for n in range(5)]
        await turns()
        assert [task.done() and task.result() for task in held] == [False, False, False, 429, 429]
        assert await poll("other", "r", 0.0) == 200
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        assert await poll("greedy", "again", 0.0) == 200, "those who left do not count"


class Polls:
    """Counts how often the polls of a reader look for rows, and how long they wait."""

    def __init__(self, host: RowServiceHost, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_looks = 0
        self.waits: list[float] = []
        lease, wait_for = host.rows.readers.lease, Process.wait_for

        def counted(*values: Any) -> Any:
            self.num_looks += 1
            return lease(*values)

        async def timed(process: Process, change: asyncio.Event, give_up_at: float) -> None:
            self.waits.append(give_up_at - process.clock())
            await wait_for(process, change, give_up_at)

        monkeypatch.setattr(host.rows.readers, "lease", counted)
        monkeypatch.setattr(Process, "wait_for", timed)


async def test_a_poll_wakes_for_rows_of_its_own_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command of the run woke every poll of every reader."""
    async with row_service(tmp_path) as host:
        polls = Polls(host, monkeypatch)
        await host.rows.declare(ReaderSpec(name="mine", reads=("n",), space="s"))
        ask = RowLeaseRequest(request_id="r", worker="w", max_rows=1, wait_s=20.0)
        poll = asyncio.create_task(host.rows.lease("mine", ask))
        await turns()
        rows = [PutRow(key=RowId(f"k{number}"), columns={"n": 1.0}) for number in range(20)]
        for row in rows:
            await host.rows.put("other", PutRequest(rows=(row,)), "w")
            await turns()
        assert polls.num_looks == 1 and not poll.done()
        await host.rows.put("s", PutRequest(rows=(*rows,)), "w")
        assert [one.claim.row_id for one in (await poll).rows] == ["k0"]


async def test_a_short_ttl_does_not_make_polls_look_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with row_service(tmp_path) as host:
        polls = Polls(host, monkeypatch)
        await host.rows.declare(ReaderSpec(name="mine", reads=("n",), space="s", ttl_s=0.1))
        ask = RowLeaseRequest(request_id="r", worker="w", max_rows=1, wait_s=20.0)
        poll = asyncio.create_task(host.rows.lease("mine", ask))
        await turns()
        assert polls.waits == [pytest.approx(0.5)]
        host.now += polls.waits[0]
        assert host.rows.readers.has_worker("mine", host.now), "it still waits"
        await host.rows.remove("mine")
        await asyncio.gather(poll, return_exceptions=True)


# --- explanations -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form", ["p0-{}", "p0-1.{}.1", "p0-1.1.{}", "main.{}", "main@{}.1", "main@{}"]
)
async def test_an_id_of_very_many_digits_is_not_there(form: str, tmp_path: Path) -> None:
    async with dataflow_door(tmp_path) as door:
        answer = await door.call("GET", "/v1/explain/" + form.format("9" * 5000), Role.READER)
        assert answer.status_code == 404, answer.text[:200]
