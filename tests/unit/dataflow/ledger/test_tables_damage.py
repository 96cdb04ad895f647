# SPDX-License-Identifier: Apache-2.0
"""A SQLite file with a flipped bit where no checksum of a record sees it: said aloud, never read as
if something had not been."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from tests.contract.dataflow_server import small_config

from penstock.dataflow.ledger.tables import open_tables
from penstock.dataflow.records import SourceRecord
from penstock.dataflow.service.build import build
from penstock.errors import StoreError

SOURCES = [SourceRecord(name=f"source-{index}", next_ordinal=index) for index in range(20)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A ledger with some records, all in its database file."""
    tables = open_tables(tmp_path)
    tables.commit(SOURCES)
    tables.close()
    return tmp_path


def damage(folder: Path, *statements: str) -> None:
    with closing(sqlite3.connect(folder / "ledger.db")) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


def root_page(folder: Path, table: str) -> int:
    query = "SELECT rootpage FROM sqlite_master WHERE name = ?"
    with closing(sqlite3.connect(folder / "ledger.db")) as connection:
        [page] = connection.execute(query, (table,)).fetchone()
        [size] = connection.execute("PRAGMA page_size").fetchone()
    return (page - 1) * size


def drop_records(folder: Path, table: str, *, keep: int) -> None:
    """One byte says how many records the page has."""
    at = root_page(folder, table) + 4
    with (folder / "ledger.db").open("r+b") as file:
        file.seek(at)
        file.write(keep.to_bytes(1, "big"))


def test_whole_files_pass(folder: Path) -> None:
    tables = open_tables(folder)
    tables.verify()
    assert tables.read(SourceRecord) == SOURCES
    tables.close()


def test_a_record_that_fell_out_of_its_page_is_missed(folder: Path) -> None:
    drop_records(folder, "sources", keep=len(SOURCES) - 4)
    tables = open_tables(folder)
    assert len(tables.read(SourceRecord)) < len(SOURCES), "no checksum tells"
    with pytest.raises(StoreError, match="damaged"):
        tables.verify()
    tables.close()


async def test_a_service_that_finds_such_damage_ends(tmp_path: Path) -> None:
    config = small_config(groups_per_batch=1, steps=9)
    service = build(config, tmp_path)
    service.process.ledger.tables.commit(SOURCES)
    service.close()
    drop_records(tmp_path, "sources", keep=len(SOURCES) - 4)
    ended = asyncio.get_running_loop().create_future()
    service = build(config, tmp_path, on_failure=ended.set_result)
    loops = asyncio.create_task(service.run_timers())
    async with asyncio.timeout(60):
        assert "damaged" in str(await ended)
    with pytest.raises(ExceptionGroup):
        await loops
    service.close()


@pytest.mark.parametrize("made_up", ["0", "NULL"])
def test_a_record_without_its_checksum_is_refused(folder: Path, made_up: str) -> None:
    """What SQLite makes up for a record that ends too early."""
    damage(folder, f"UPDATE sources SET checksum = {made_up}, next_ordinal = 5")
    tables = open_tables(folder)
    with pytest.raises(StoreError, match="table sources is damaged"):
        tables.read(SourceRecord)
    tables.close()


@pytest.mark.parametrize(
    "statement",
    [
        "ALTER TABLE sources RENAME TO sourcer",
        "ALTER TABLE sources RENAME COLUMN skipped TO skippee",
        "ALTER TABLE meta RENAME TO mete",
        "DELETE FROM meta",
    ],
)
def test_what_is_hidden_is_not_made_anew(folder: Path, statement: str) -> None:
    damage(folder, statement)
    with pytest.raises(StoreError, match="damaged"):
        open_tables(folder)


def test_a_first_start_that_was_cut_off_is_continued(folder: Path, tmp_path: Path) -> None:
    damage(folder, "DELETE FROM sources", "DROP TABLE rows", "DROP TABLE meta")
    tables = open_tables(folder)
    tables.commit(SOURCES)
    tables.close()
    tables = open_tables(folder)
    assert tables.read(SourceRecord) == SOURCES
    tables.close()
