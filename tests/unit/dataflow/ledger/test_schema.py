# SPDX-License-Identifier: Apache-2.0
"""A ledger of another format is refused by name and left untouched."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from penstock.dataflow.ledger.recorded import open_recorded_run
from penstock.dataflow.ledger.tables import open_tables
from penstock.dataflow.records import FORMAT, MetaRecord, SourceRecord
from penstock.errors import StoreError


def schema(folder: Path) -> list[tuple[str, str]]:
    with closing(sqlite3.connect(folder / "ledger.db")) as connection:
        return sorted(connection.execute("SELECT name, sql FROM sqlite_master WHERE sql <> ''"))


def change(folder: Path, statement: str) -> None:
    with closing(sqlite3.connect(folder / "ledger.db")) as connection:
        connection.execute(statement)
        connection.commit()


def test_a_new_ledger_has_this_format(tmp_path: Path) -> None:
    open_tables(tmp_path).close()
    before = schema(tmp_path)
    tables = open_tables(tmp_path)
    assert tables.read(MetaRecord) == [MetaRecord(key="format", value=str(FORMAT))]
    tables.close()
    assert schema(tmp_path) == before, "the second start changes nothing"


@pytest.mark.parametrize("other", ["0", str(FORMAT + 1), "x"])
def test_another_format_is_refused_and_left_as_it_is(tmp_path: Path, other: str) -> None:
    tables = open_tables(tmp_path)
    tables.commit([SourceRecord(name="s", next_ordinal=7)])
    tables.close()
    change(tmp_path, f"UPDATE meta SET value = '{other}' WHERE key = 'format'")
    before = (tmp_path / "ledger.db").read_bytes()
    message = f"has format {other}, .* reads format {FORMAT}; continue the run with the penstock"
    with pytest.raises(StoreError, match=message):
        open_tables(tmp_path)
    with pytest.raises(StoreError, match=message):
        open_recorded_run(tmp_path)
    assert (tmp_path / "ledger.db").read_bytes() == before


def test_a_table_without_one_of_its_columns_is_refused(tmp_path: Path) -> None:
    open_tables(tmp_path).close()
    change(tmp_path, "ALTER TABLE rows DROP COLUMN digest")
    with pytest.raises(StoreError, match="damaged: table rows lacks digest; restore it from"):
        open_tables(tmp_path)
