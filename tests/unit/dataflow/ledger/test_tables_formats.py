# SPDX-License-Identifier: Apache-2.0
"""Ledgers of older formats are read and brought up to date; newer ones are refused untouched.

`format_1` holds a ledger as the last penstock of format 1 wrote it: two groups of two rows, of
which one group is sealed and committed."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3
from tests.contract.dataflow_server import POLICY, small_config

from penstock.dataflow.ledger.pinned import read_retained_batches
from penstock.dataflow.ledger.store import Ledger
from penstock.dataflow.ledger.tables import METADATA, open_tables
from penstock.dataflow.records import (
    FORMAT,
    RECORDS,
    BatchRecord,
    FateRecord,
    FreedRecord,
    GrantRecord,
    GroupRecord,
    LeaseEnd,
    LeaseRecord,
    MetaRecord,
    RowRecord,
    SourceRecord,
)
from penstock.dataflow.service.build import build
from penstock.dataflow.service.trainers.messages import BatchRequest, IncarnationRequest
from penstock.errors import StoreError
from penstock.types import GroupId, NodeId, OutcomeKind, PolicyName, RowId

OLD = Path(__file__).parent / "format_1"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A ledger of format 1 to open."""
    (tmp_path / "segments").mkdir()
    shutil.copy(OLD / "seg-00000001.dat", tmp_path / "segments")
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as connection:
        connection.executescript((OLD / "ledger.sql").read_text(encoding="utf-8"))
    return tmp_path


def schema(folder: Path) -> list[tuple[str, str]]:
    with closing(sqlite3.connect(folder / "ledger.db")) as connection:
        return sorted(connection.execute("SELECT name, sql FROM sqlite_master WHERE sql <> ''"))


async def test_every_record_of_format_1_is_read(folder: Path) -> None:
    assert FORMAT > 1, "format 1 is an older one"
    ledger = Ledger(folder)
    rows = ledger.tables.read(RowRecord)
    assert sorted(row.row_id for row in rows) == [
        "p0-1.0.1",
        "p0-1.1.1",
        "p0-2.0.1",
        "p0-2.1.1",
    ]
    assert all(blake3(ledger.payload(row)).hexdigest() == row.digest for row in rows)
    assert len(ledger.tables.read(GroupRecord)) >= 2 and len(ledger.tables.read(FateRecord)) == 2
    await ledger.write([*ledger.start_records(), FreedRecord(group_id=GroupId("p0-1"), at=1.0)])
    ledger.close()
    tables = open_tables(folder)
    assert tables.read(MetaRecord, "key = 'format'")[0].value == str(FORMAT)
    assert len(tables.read(FreedRecord)) == 1
    tables.close()


def test_records_without_a_column_that_came_later_are_read(tmp_path: Path) -> None:
    """Their checksums do not cover it, and say nothing about the record as it is now."""
    tables = open_tables(tmp_path)
    old = MetaRecord(key="format", value=str(FORMAT - 1))
    tables.commit([SourceRecord(name="s", next_ordinal=7), old])
    tables.close()
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as connection:
        connection.execute("ALTER TABLE sources DROP COLUMN skipped")
        connection.execute("UPDATE sources SET checksum = 12345")  # over one field less
        connection.commit()
    tables = open_tables(tmp_path)
    assert tables.read(SourceRecord) == [SourceRecord(name="s", next_ordinal=7)]
    tables.close()


async def test_a_service_goes_on_where_format_1_stopped(folder: Path) -> None:
    """The group that was admitted then is the next batch now, and its rows come as delivered."""
    service = build(small_config(groups_per_batch=1, steps=9), folder)
    request = IncarnationRequest(request_id="new", expected=1, number=1, seq=1)
    life = await service.trainers.incarnate(POLICY, request)
    answer = await service.trainers.batch(
        BatchRequest(consumer=POLICY, seq=2, incarnation=life.incarnation)
    )
    assert answer.manifest is not None
    [group] = answer.manifest.groups
    assert group.group_id == "p0-2" and len(group.rows) == 2
    rows = (await service.trainers.rows(POLICY, 2)).rows
    for row, summary in zip(rows, group.rows, strict=True):
        assert row.payload is not None and blake3(row.payload).hexdigest() == summary.digest
    service.close()


def test_leases_of_format_2_go_on(tmp_path: Path) -> None:
    """Those that run become grants of one slot each; those that ended stay as they are."""
    tables = open_tables(tmp_path)
    grant = GrantRecord(
        group_id=GroupId("p0-1"),
        slot=0,
        epoch=2,
        num_slots=1,
        attempt=1,
        node_id=NodeId("n"),
        boot_id="s",
        request_id="r",
        granted_at=5.0,
    )
    ended = replace(grant, epoch=1).lease(0, LeaseEnd.RELEASED, 4.0)
    tables.commit([MetaRecord(key="format", value="2"), ended, grant.lease(0)])
    tables.close()
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as connection:
        connection.execute("DROP TABLE grants")
        connection.commit()
    for _ in range(2):
        tables = open_tables(tmp_path)
        assert tables.read(GrantRecord) == [grant]
        assert tables.read(LeaseRecord) == [ended]
        assert tables.read(MetaRecord, "key = 'format'")[0].value == str(FORMAT)
        tables.close()


def test_rows_of_format_3_do_not_say_what_they_cost(tmp_path: Path) -> None:
    """Nobody reads their payload for it; a trainer goes by their sampled tokens."""
    tables = open_tables(tmp_path)
    row = RowRecord(
        row_id=RowId("p0-1.0.1"),
        group_id=GroupId("p0-1"),
        slot=0,
        epoch=1,
        node_id=NodeId("n"),
        digest="d",
        segment=1,
        offset=0,
        length=1,
        outcome=OutcomeKind.COMPLETED,
        reward=1.0,
        sampled='{"policy":3}',
        versions='{"policy":[[1,0]]}',
        delivered_at=1.0,
    )
    tables.commit([MetaRecord(key="format", value="3"), row])
    tables.close()
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as connection:
        connection.execute("ALTER TABLE rows DROP COLUMN compute_cost")
        connection.commit()
    for _ in range(2):
        tables = open_tables(tmp_path)
        [found] = tables.read(RowRecord)
        assert found == row and found.summary.compute_cost_for(POLICY, None) == (3, 9)
        assert tables.read(MetaRecord, "key = 'format'")[0].value == str(FORMAT)
        tables.close()


def test_an_upgraded_ledger_has_what_a_new_one_has(folder: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    new.mkdir()
    open_tables(new).close()
    open_tables(folder).close()
    for (old_name, old_sql), (name, sql) in zip(schema(folder), schema(new), strict=True):
        assert old_name == name
        if old_sql.startswith("CREATE INDEX"):
            assert old_sql == sql
    before = schema(folder)
    open_tables(folder).close()
    assert schema(folder) == before, "the second start finds nothing to do"


def test_an_interrupted_upgrade_is_continued(folder: Path) -> None:
    """As if a start ended after the first column it added."""
    with closing(sqlite3.connect(folder / "ledger.db")) as connection:
        connection.execute("ALTER TABLE rows ADD COLUMN space TEXT DEFAULT 'train'")
        connection.commit()
    tables = open_tables(folder)
    assert {row.space for row in tables.read(RowRecord)} == {"train"}
    assert {row.blob for row in tables.read(RowRecord)} == {""}
    tables.close()


def test_batches_of_format_1_are_pinned(folder: Path) -> None:
    tables = open_tables(folder)
    assert len(tables.read(BatchRecord)) == 1
    assert read_retained_batches(tables, PolicyName("policy")).batches == {1: ("p0-1",)}
    tables.close()


def test_a_newer_format_is_refused_and_left_as_it_is(folder: Path) -> None:
    with closing(sqlite3.connect(folder / "ledger.db")) as connection:
        connection.execute("UPDATE meta SET value = ? WHERE key = 'format'", (str(FORMAT + 1),))
        connection.commit()
    before = schema(folder)
    with pytest.raises(StoreError, match=f"format {FORMAT + 1}.*reads up to {FORMAT}"):
        open_tables(folder)
    assert schema(folder) == before


def test_a_table_without_what_cannot_be_guessed_is_refused(folder: Path) -> None:
    with closing(sqlite3.connect(folder / "ledger.db")) as connection:
        connection.execute("ALTER TABLE rows DROP COLUMN digest")
        connection.commit()
    with pytest.raises(StoreError, match="table rows of this ledger has no column digest"):
        open_tables(folder)


def test_every_table_belongs_to_a_record() -> None:
    assert set(METADATA.tables) == {kind.TABLE for kind in RECORDS}
