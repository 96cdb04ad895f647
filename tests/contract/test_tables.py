# SPDX-License-Identifier: Apache-2.0
"""What every store of a ledger's records promises: SQLite and a real PostgreSQL server."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from penstock.config.store_password import PASSWORD_ENV, password_in, without_password
from penstock.dataflow.column_records import BundleRecord, ColumnRecord
from penstock.dataflow.ledger.codec import BundleMove, ColumnMove, RowMove
from penstock.dataflow.ledger.compaction import live_bytes
from penstock.dataflow.ledger.keeping import RANKS, Kept, kept_bytes
from penstock.dataflow.ledger.tables import Tables, open_tables
from penstock.dataflow.records import (
    BatchRecord,
    Deletion,
    FreedRecord,
    GroupRecord,
    GroupState,
    MetaRecord,
    NodeRecord,
    RowRecord,
    SourceRecord,
    gone_key,
)
from penstock.errors import StoreError
from penstock.types import GroupId, NodeId, OutcomeKind, PolicyName, RowId, RowSummary

Open = Callable[[], Tables]
_names = itertools.count()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens the same ledger's tables, again and again."""
    if request.param == "sqlite":
        return lambda: open_tables(tmp_path)
    url: str = request.getfixturevalue("postgres_url")
    name = f'run "{next(_names)}" \\ ü'
    return lambda: open_tables(tmp_path, url, name=name)


@pytest.fixture
def tables(open_store: Open) -> Generator[Tables]:
    opened = open_store()
    yield opened
    opened.close()


def row(number: int, **changes: Any) -> RowRecord:
    record = RowRecord(
        summary=RowSummary(
            row_id=RowId(f"g{number}.0.1"),
            digest="d",
            outcome=OutcomeKind.COMPLETED,
            reward=0.5,
            sampled={},
            versions={},
        ),
        group_id=GroupId(f"g{number}"),
        slot=0,
        epoch=1,
        node_id=NodeId("n"),
        segment=1,
        offset=number * 100,
        length=100,
        delivered_at=1.25,
    )
    known = RowSummary.__struct_fields__
    summary = {name: value for name, value in changes.items() if name in known}
    rest = {name: value for name, value in changes.items() if name not in known}
    return structs.replace(record, summary=structs.replace(record.summary, **summary), **rest)


def group(number: int) -> GroupRecord:
    return GroupRecord(
        group_id=GroupId(f"g{number}"),
        partition=0,
        issue=number,
        source="s",
        ordinal=number,
        task_key="k",
        task="{}",
        num_slots=1,
        due="{}",
        why="{}",
        state=GroupState.CLOSED,
        reason="",
        issued_at=0.0,
        ended_at=0.0,
    )


def test_every_database_keeps_the_same_groups(tables: Tables) -> None:
    """Which ones is part of what the run leaves behind: it must not depend on the database."""
    numbers = [*range(1, 201), (1 << 31) - 1, 1 << 40]
    tables.commit([group(number) for number in numbers])
    tables.commit([row(number, space="train") for number in numbers])
    freed = [FreedRecord(group_id=GroupId(f"g{number}"), at=float(number)) for number in numbers]
    tables.commit(freed)
    half = Kept(limit=RANKS // 2, since=101.0)

    def is_kept(number: int) -> bool:
        return number > 100 and (number % (1 << 31)) * 2654435761 % RANKS < half.limit

    kept = [number for number in numbers if is_kept(number)]
    assert 40 < len(kept) < 60
    assert kept_bytes(tables, half) == 100 * len(kept)
    assert live_bytes(tables, 1, half) == 100 * len(kept)
    assert live_bytes(tables, 1) == 0
    forgotten = MetaRecord(key=gone_key(RowId(f"g{kept[0]}.0.1")), value="forgotten")
    tables.commit([forgotten])
    assert live_bytes(tables, 1, half) == 100 * (len(kept) - 1)


def by_id(tables: Tables) -> list[RowRecord]:
    return sorted(tables.read(RowRecord), key=lambda record: record.offset)


ODD_TEXTS = [
    "",
    "NULL",
    "null",
    "a,b",
    "{x}",
    "NaN",
    "\\x00",
    "'",
    '"',
    "\\",
    '\\"',
    "%s",
    ":x",
    "é\n\t🙂",
    " ",
]


def test_every_value_comes_back_as_it_went_in(tables: Tables) -> None:
    rows = [row(n, digest=text, node_id=NodeId(text)) for n, text in enumerate(ODD_TEXTS)]
    rows += [
        row(100, reward=None),
        row(101, reward=-1e-300, length=2**62),
        row(102, reward=math.inf, delivered_at=1e300),
        row(103, outcome=OutcomeKind.FAILED, reward=-math.inf),
        row(104, sampled={PolicyName('é"'): 2}, versions={PolicyName("p"): ((1, 2), (3, 4))}),
        row(105, roles={PolicyName("p"): {"": 1}}, compute_cost={PolicyName("p"): (2, 4)}),
        row(106, columns={"scores": "d"}, values={"mark": 0.1 + 0.2}),
    ]
    tables.commit(rows)
    assert by_id(tables) == rows
    node = NodeRecord(
        node_id=NodeId("n"), boot_id="s", capacity=1, policies="[]", tags="{}", left=True, at=0.1
    )
    tables.commit([node])
    assert tables.read(NodeRecord, '"left"') == [node]
    assert tables.read(NodeRecord, 'NOT "left"') == []


def test_bytes_come_back_exactly(tables: Tables) -> None:
    batches = [
        BatchRecord(
            consumer=PolicyName("p"),
            seq=seq,
            incarnation=1,
            trains_from=0,
            num_groups=1,
            num_rows=1,
            digest="",
            manifest=manifest,
            reward_mean=0.1 + 0.2,
            staleness_mean=0.0,
            staleness_max=0,
            sealed_at=0.0,
        )
        for seq, manifest in enumerate([b"", bytes(range(256)) * 9, b"\\x00", b"{}"])
    ]
    tables.commit(batches)
    assert sorted(tables.read(BatchRecord), key=lambda record: record.seq) == batches


def test_the_last_of_a_key_stands_in_one_commit_and_over_many(tables: Tables) -> None:
    tables.commit([SourceRecord(name="a", next_ordinal=n) for n in range(5)])
    tables.commit([row(n) for n in range(3000)])
    tables.commit([row(n, digest="new") for n in range(0, 3000, 2)])
    assert tables.read(SourceRecord) == [SourceRecord(name="a", next_ordinal=4)]
    assert [r.summary.digest for r in by_id(tables)] == ["new", "d"] * 1500


def test_a_commit_is_whole_or_not_at_all(tables: Tables) -> None:
    tables.commit([MetaRecord(key="k", value="before")])
    broken = Deletion(kind=RowRecord, where="no_such_column = 1", values={})
    with pytest.raises(Exception, match="no_such_column"):
        tables.commit([MetaRecord(key="k", value="after"), row(1), broken])
    assert tables.read(MetaRecord, "key = 'k'") == [MetaRecord(key="k", value="before")]
    assert tables.read(RowRecord) == []
    tables.commit([row(2)])
    assert tables.read(RowRecord) == [row(2)]


def test_conditions_with_values_and_lists(tables: Tables) -> None:
    tables.commit([row(n) for n in range(600)])
    ids = [f"g{n}.0.1" for n in range(0, 600, 2)]
    found = tables.read(RowRecord, 'row_id IN :ids AND "offset" < :below', ids=ids, below=1000)
    assert sorted(r.offset for r in found) == [0, 200, 400, 600, 800]
    assert tables.scalar("SELECT count(*) FROM rows WHERE row_id IN :ids", ids=ids) == 300
    assert tables.rows("SELECT sum(length) FROM rows WHERE slot = :slot", slot=0) == [(60_000,)]
    assert tables.scalar("SELECT max(slot) FROM rows WHERE row_id = 'none'") is None
    prefix = "SELECT row_id FROM rows WHERE substr(row_id, 1, length(:id)) = :id"
    assert tables.rows(prefix, id="g599") == [("g599.0.1",)], "a value twice, of one type"
    assert tables.read(RowRecord, "row_id IN :ids", ids=[]) == []


def test_erasures_follow_what_the_same_commit_wrote(tables: Tables) -> None:
    erase = Deletion(kind=RowRecord, where="row_id = :key", values={"key": "g1.0.1"})
    tables.commit([row(0), row(1), row(2)])
    tables.commit([row(3), erase])
    assert [r.offset for r in by_id(tables)] == [0, 200, 300]


def test_a_move_changes_only_what_stands_where_it_stood(tables: Tables) -> None:
    column = ColumnRecord(
        space="s",
        row_id=RowId("k"),
        name="c",
        failed="",
        value=None,
        digest="",
        segment=3,
        offset=7,
        length=9,
        writer="",
        at=0.0,
    )
    tables.commit([row(0), row(1), column])

    def moved(number: int, offset: int) -> RowMove:
        return RowMove(
            row_id=row(number).row_id, segment=1, offset=offset, to_segment=9, to_offset=11
        )

    tables.commit([moved(0, 0), moved(1, 99), moved(2, 200)])
    assert tables.read(RowRecord, "segment = 9") == [row(0, segment=9, offset=11)]
    assert tables.read(RowRecord, "segment = 1") == [row(1)]
    move = ColumnMove(
        space="s",
        row_id=RowId("k"),
        name="c",
        segment=3,
        offset=7,
        to_segment=4,
        to_offset=0,
    )
    tables.commit([move])
    assert tables.read(ColumnRecord) == [replace(column, segment=4, offset=0)]


def test_a_bundle_says_where_each_of_its_keys_is(tables: Tables) -> None:
    def bundle(arrival: int, *keys: str) -> BundleRecord:
        return BundleRecord(
            space="s",
            arrival=arrival,
            num_cells=1,
            names="[]",
            keys=msgspec.json.encode(keys).decode(),
            contents=b"\x00",
            segment=3,
            offset=7,
            length=9,
            writer="",
            at=0.5,
            payload=b"\xff",
        )

    odd = ["a", 'b"\\', "\u00e9\U0001f600", "null", "7", "{}"]
    for _ in range(2):  # replaying changes nothing
        tables.commit([bundle(1, *odd), bundle(9, "z")])
        found = tables.rows("SELECT row_id, arrival, bundle FROM items ORDER BY arrival")
        assert found == [*((key, n, 1) for n, key in enumerate(odd, 1)), ("z", 9, 9)]
    assert tables.read(BundleRecord, "arrival = 1") == [bundle(1, *odd)]
    move = BundleMove(space="s", arrival=9, segment=3, offset=7, to_segment=4, to_offset=0)
    tables.commit([move])
    assert tables.rows("SELECT arrival FROM bundles WHERE segment = 4") == [(9,)]


def test_what_is_committed_is_there_after_a_restart(open_store: Open) -> None:
    for life in range(3):
        tables = open_store()
        assert len(tables.read(RowRecord)) == life
        tables.commit([row(life)])
        tables.close()


@pytest.mark.postgres
def test_a_second_writer_is_refused_by_name(postgres_url: str, tmp_path: Path) -> None:
    first = open_tables(tmp_path, postgres_url, name="locked")
    with pytest.raises(StoreError, match=r"ledger locked .* only one writer"):
        open_tables(tmp_path, postgres_url, name="locked")
    other = open_tables(tmp_path, postgres_url, name="another")
    other.commit([row(1)])
    assert first.read(RowRecord) == [], "ledgers in one database know nothing of each other"
    other.close()
    first.close()
    open_tables(tmp_path, postgres_url, name="locked").close()


@pytest.mark.postgres
def test_a_writer_that_lost_its_connection_never_commits_again(
    postgres_url: str, tmp_path: Path
) -> None:
    """Its lock went with the connection, and a successor may write by now."""
    first = open_tables(tmp_path, postgres_url, name="lost")
    first.commit([row(0)])
    [(pid,)] = first.rows(
        "SELECT pid FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE locktype = 'advisory' "
        "AND backend_start = (SELECT max(backend_start) FROM pg_stat_activity JOIN pg_locks "
        "USING (pid) WHERE locktype = 'advisory')"
    )
    first.rows("SELECT pg_terminate_backend(:pid, 5000)", pid=pid)
    successor = open_tables(tmp_path, postgres_url, name="lost")
    for _ in range(3):
        with pytest.raises(StoreError, match=r"lost the database connection .* restart"):
            first.commit([row(1)])
    assert successor.read(RowRecord) == [row(0)]
    first.close()
    successor.close()


@pytest.mark.postgres
def test_reading_goes_on_when_the_server_closed_idle_connections(
    postgres_url: str, tmp_path: Path
) -> None:
    tables = open_tables(tmp_path, postgres_url, name="idle")
    tables.commit([row(0)])
    other = open_tables(tmp_path, postgres_url, name="observer")
    for _ in range(2):
        assert tables.read(RowRecord) == [row(0)]
        [(pid,)] = tables.rows("SELECT pg_backend_pid()")
        assert other.scalar("SELECT pg_terminate_backend(:pid, 5000)", pid=pid)
    assert tables.read(RowRecord, "row_id IN :ids", ids=[row(0).row_id]) == [row(0)]
    tables.commit([row(1)])
    assert by_id(tables) == [row(0), row(1)]
    tables.close()
    other.close()


@pytest.mark.postgres
def test_a_server_that_cannot_be_reached_is_named_without_its_password(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"PostgreSQL at 127\.0\.0\.1/z cannot be reached") as told:
        open_tables(tmp_path, "postgresql://me:secret@127.0.0.1:1/z")
    assert "secret" not in str(told.value)


@pytest.mark.postgres
def test_a_commit_waits_for_the_disk(postgres_url: str, tmp_path: Path) -> None:
    tables = open_tables(tmp_path, postgres_url, name="durable")
    assert tables.scalar("SHOW fsync") == tables.scalar("SHOW synchronous_commit") == "on"
    tables.close()


@pytest.mark.postgres
def test_the_password_may_stand_in_the_environment(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a service finds it: the config of a run folder has none."""
    url = without_password(postgres_url)
    assert url != postgres_url
    monkeypatch.delenv(PASSWORD_ENV, raising=False)
    with pytest.raises(StoreError, match=f"set {PASSWORD_ENV}"):
        open_tables(tmp_path, url, name="silent")
    monkeypatch.setenv(PASSWORD_ENV, password_in(postgres_url))
    tables = open_tables(tmp_path, url, name="silent")
    assert tables.read(RowRecord) == []
    tables.close()
