# SPDX-License-Identifier: Apache-2.0
"""The ledger of a run folder of somebody else is a database of their making: reading it ends,
writes nothing elsewhere, and fills no memory."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.attacks.test_bombs import bounded_memory
from tests.attacks.test_foreign_folders import foreign_folder
from tests.unit.dashboard.recorded_run import record_run

from penstock.audit import audit
from penstock.audit.ledger import open_ledger
from penstock.dashboard.rows import read_group
from penstock.dashboard.shown_run import ShownRun
from penstock.dataflow.column_records import ColumnRecord
from penstock.dataflow.explain.explain import explain
from penstock.dataflow.ledger.recorded import open_recorded_run
from penstock.dataflow.ledger.tables import open_tables
from penstock.dataflow.records import (
    CommitRecord,
    DecisionRecord,
    GrantRecord,
    GroupRecord,
    IncarnationRecord,
    RowRecord,
    RuleStateRecord,
)
from penstock.errors import StoreError
from penstock.fleet.run_folder import RunFolder
from penstock.foreign_ledger import open_foreign
from penstock.runs.agent_tree import agent_tree
from penstock.runs.decoded import DecodedTurn
from penstock.runs.explained import explain_with_text
from penstock.runs.history import open_run
from penstock.runs.listing import list_runs
from penstock.runs.recorded_trajectory import PayloadState
from penstock.types import PolicyName, RowId
from penstock.wire.codec import encode

ENDLESS = "WITH RECURSIVE e(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM e)"
COUNT = "SELECT count(*) FROM rows WHERE space = 'train'"
OPENINGS: dict[str, Callable[[Path], object]] = {
    "recorded": lambda folder: open_recorded_run(folder).coordinator.scalar(COUNT),
    "audit": lambda folder: open_ledger(folder).__enter__().rows(),
}


def _ledger(folder: Path, *statements: str) -> Path:
    """A ledger whose owner ran these statements in it."""
    folder.mkdir(parents=True)
    open_tables(folder).close()
    with closing(sqlite3.connect(folder / "ledger.db")) as connection:
        for statement in ("PRAGMA journal_mode=DELETE", *statements):
            connection.execute(statement)
        connection.commit()
    return folder


def _columns(folder: Path, table: str = "rows") -> list[str]:
    with closing(sqlite3.connect(_ledger(folder) / "ledger.db")) as connection:
        return [name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})")]


def _programs(columns: list[str]) -> dict[str, tuple[str, ...]]:
    train = {"space": "'train'"}
    values = ", ".join(f'{train.get(name, "n")} AS "{name}"' for name in columns)
    names = ", ".join(f'"{name}"' for name in columns)
    view = f"CREATE VIEW evil AS {ENDLESS} SELECT n AS rowid, {values} FROM e"
    return {
        "virtual": (
            "DROP TABLE rows",
            view,
            f"CREATE VIRTUAL TABLE rows USING fts5({names}, content='evil', content_rowid='rowid')",
        ),
        "view": ("DROP TABLE rows", view.replace("evil", "rows")),
        "generated": ('ALTER TABLE rows ADD COLUMN "more" TEXT AS (hex(zeroblob(1000000)))',),
        "expression": ("CREATE INDEX more ON rows (hex(row_id))",),
        "trigger": ("CREATE TRIGGER more DELETE ON rows BEGIN SELECT 1; END",),
    }


@pytest.mark.parametrize("opening", OPENINGS)
@pytest.mark.parametrize("kind", _programs([]))
def test_a_ledger_has_no_program(tmp_path: Path, kind: str, opening: str) -> None:
    """A virtual table in place of `rows` kept `penstock ls` counting for ever."""
    folder = _ledger(tmp_path / "ledger", *_programs(_columns(tmp_path / "own"))[kind])
    with pytest.raises(StoreError, match="which no ledger has"):
        OPENINGS[opening](folder)


@pytest.mark.parametrize("kind", _programs([]))
def test_a_list_of_runs_goes_on_after_such_a_ledger(tmp_path: Path, kind: str) -> None:
    run = foreign_folder(tmp_path / "shared" / "evil").path
    _ledger(run / "ledger", *_programs(_columns(tmp_path / "own"))[kind])
    foreign_folder(tmp_path / "shared" / "honest")
    assert {found.name for found in list_runs(tmp_path / "shared")} == {"evil", "honest"}


def test_values_that_are_no_numbers_make_one_run_unreadable(tmp_path: Path) -> None:
    run = foreign_folder(tmp_path / "shared" / "evil").path
    names = _columns(tmp_path / "own", "incarnations")
    values = ", ".join("'policy'" if name == "policy" else "'many'" for name in names)
    _ledger(run / "ledger", f"INSERT INTO incarnations VALUES ({values})")
    [found] = list_runs(tmp_path / "shared")
    assert found.state == "unreadable" and "is damaged" in found.why


@pytest.mark.parametrize(
    ("query", "why"),
    [
        (f"{ENDLESS} SELECT count(*) FROM e", "takes longer than its size explains"),
        (f"{ENDLESS} SELECT hex(zeroblob(500000)) FROM e", "returns more than it has"),
        ("SELECT zeroblob(1 << 29)", "too big"),
    ],
)
def test_a_query_ends(tmp_path: Path, query: str, why: str) -> None:
    """Pages of a forged ledger may lead back to themselves: it has rows without end, or one that is
    as long as it says."""
    ledger = open_foreign(_ledger(tmp_path / "ledger") / "ledger.db")
    with closing(ledger), pytest.raises(StoreError, match=why):
        ledger.rows(query)


def test_a_task_key_is_no_pattern(tmp_path: Path) -> None:
    """One LIKE cannot be interrupted, and its cost is the product of both lengths."""
    key, long = "a" * 10_000 + "b", "a" * 500_000
    skipped = DecisionRecord(
        number=1, hook="curate", rule="r", subject=key, verdict="skipped", detail="{}", at=1.0
    )
    known = [RuleStateRecord(rule="r", key=one, value="1") for one in (long, f"p/{key}")]
    with closing(open_tables(_ledger(tmp_path / "ledger"))) as tables:
        tables.commit([skipped, *known])
    with closing(open_recorded_run(tmp_path / "ledger")) as recorded:
        started = time.process_time()
        found = explain(recorded, key)
        assert time.process_time() - started < 1
    [remembered] = [step.text for step in found.steps if step.what == "remembered"]
    assert f"'p/{key}'" in remembered


def _repeated(folder: Path, times: int) -> str:
    """A run in which so many more rows of a group name the payload of its first one; the group."""
    record_run(folder)
    with closing(open_tables(folder / "ledger")) as tables:
        [row, *_] = tables.read(RowRecord, "outcome = 'completed' ORDER BY arrival")
        last = int(tables.scalar("SELECT max(arrival) FROM rows"))
        more = [
            msgspec.structs.replace(
                row,
                summary=msgspec.structs.replace(
                    row.summary, row_id=RowId(f"{row.group_id}.{at}.99")
                ),
                slot=at,
                epoch=99,
                arrival=last + 1 + at,
            )
            for at in range(times)
        ]
        columns = [
            ColumnRecord(
                space="train",
                row_id=row.row_id,
                name=f"c{at}",
                failed="",
                value=None,
                digest="0" * 64,
                segment=row.segment,
                offset=row.offset,
                length=row.length,
                writer="stage",
                at=1.0,
            )
            for at in range(times)
        ]
        tables.commit([*more, *columns])
    return row.group_id


def test_rows_that_name_one_payload_do_not_fill_the_memory_of_who_looks_at_their_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """60 rows of one payload of 4 MB took 455 MB of a dashboard, which may show the runs of others
    too. The bounds are small here, so that the test is quick."""
    group = _repeated(tmp_path, times=200)
    monkeypatch.setattr("penstock.runs.samples.MAX_GROUP_ROWS", 100, raising=False)
    monkeypatch.setattr("penstock.runs.samples.MAX_GROUP_BYTES", 1 << 14, raising=False)
    monkeypatch.setattr("penstock.runs.trajectories.MAX_BLOB_BYTES", 1 << 12, raising=False)
    with open_run(tmp_path) as run:
        most = max(len(encode(one.columns)) for one in run.trajectories(group=group))
    assert most < 3 << 12, "of the columns of one row"
    shown = read_group(ShownRun(RunFolder(tmp_path), "run"), group)["rows"]
    stored = [one["sample"] for one in shown if one["sample"].turns]
    assert len(shown) == 100 and 0 < len(stored) < 60
    [*_, last] = shown
    assert (
        last["sample"].state == "unreadable" and "of its group have more" in last["sample"].detail
    )
    assert 0 < len(explain_with_text(RunFolder(tmp_path), group)[1]) < 60
    # A sparse file of 1 GiB takes no disk; as token ids it would take many times its length.
    monkeypatch.setattr("penstock.runs.trajectories.MAX_ROW_BYTES", 8, raising=False)
    with open_run(tmp_path) as run:
        assert all(one.state is not PayloadState.STORED for one in run.trajectories(group=group))


@pytest.mark.parametrize("name", ["ledger.db", "ledger.db-wal", "ledger.db-shm"])
@pytest.mark.parametrize("opening", OPENINGS)
def test_a_ledger_is_no_link_or_pipe(tmp_path: Path, name: str, opening: str) -> None:
    """SQLite would create the file to which `-wal` leads."""
    folder = _ledger(tmp_path / "ledger")
    with closing(sqlite3.connect(folder / "ledger.db")) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
    home = tmp_path / "home"
    home.mkdir()
    if name == "ledger.db":
        shutil.move(folder / name, home / name)
    else:
        (folder / "ledger.db-wal").touch()
        (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(home / name)
    before = sorted(os.listdir(home))
    with pytest.raises(StoreError, match="or a link"):
        OPENINGS[opening](folder)
    assert sorted(os.listdir(home)) == before
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(StoreError, match=r"or a link|there is no ledger"):
        OPENINGS[opening](folder)


def _forge(folder: Path, statement: str) -> None:
    """Its records stay sound: a checksum is no secret."""
    with closing(sqlite3.connect(folder / "ledger" / "ledger.db")) as connection:
        assert connection.execute(statement).rowcount > 0
        connection.commit()


def _replaced(folder: Path, kind: type[Any], **changes: Any) -> Any:
    """The first record of this kind, with changes."""
    with closing(open_tables(folder / "ledger")) as tables:
        changed = dataclasses.replace(tables.read(kind)[0], **changes)
        tables.commit([changed])
    return changed


def test_numbers_of_a_ledger_make_no_long_lists(tmp_path: Path) -> None:
    """One record of a partition 2^62, or of a lease of as many slots, filled the memory of whoever
    looked at a group, on a dashboard too."""
    record_run(tmp_path)
    group = _replaced(tmp_path, GroupRecord, partition=1 << 62)
    with closing(open_recorded_run(tmp_path / "ledger")) as recorded, bounded_memory():
        assert explain(recorded, group.group_id).kind == "group"
    _replaced(tmp_path, GrantRecord, group_id=group.group_id, num_slots=1 << 62)
    with (
        closing(open_recorded_run(tmp_path / "ledger")) as recorded,
        bounded_memory(),
        pytest.raises(StoreError, match="leases"),
    ):
        explain(recorded, group.group_id)


FORGERIES = {
    "slots": ("UPDATE groups SET num_slots = 1 << 62", "slots"),
    "grant": ("UPDATE grants SET num_slots = 1 << 62", "slots"),
    "tasks": ("UPDATE sources SET next_ordinal = 1 << 62", ""),
    "incarnation": ("UPDATE batches SET incarnation = 1 << 62", ""),
    "forks": ("UPDATE incarnations SET incarnation = 1 << 62", ""),
}


@pytest.mark.parametrize("what", FORGERIES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_an_audit_ends_whatever_the_numbers(
    tmp_path: Path, what: str, *, deterministic: bool
) -> None:
    record_run(tmp_path)
    statement, why = FORGERIES[what]
    _forge(tmp_path, statement)
    if what == "forks":
        _forge(tmp_path, FORGERIES["incarnation"][0])
    config = tmp_path / "config.yaml"
    config.write_text(
        config.read_text().replace(
            "deterministic: false", f"deterministic: {deterministic}".lower()
        )
    )
    with bounded_memory():
        if why:
            with pytest.raises(StoreError, match=why):
                audit(tmp_path)
        else:
            assert not audit(tmp_path).ok


def test_logs_beside_a_ledger_are_read_line_by_line(tmp_path: Path) -> None:
    """A sparse file of 1 GB took no disk, and an audit three times as much memory."""
    record_run(tmp_path)
    (tmp_path / "acks").mkdir(exist_ok=True)
    for name in ("acks/node", "admin.jsonl"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(1 << 30)
    with bounded_memory():
        with pytest.raises(StoreError, match="not the id of a row"):
            audit(tmp_path)
        (tmp_path / "acks" / "node").unlink()
        [log] = [one for one in audit(tmp_path).checks if one.name == "admin_log"]
        assert log.num_examined == 1 and not log.ok
        (tmp_path / "admin.jsonl").write_bytes(b"\n" * 2000)
        [log] = [one for one in audit(tmp_path).checks if one.name == "admin_log"]
        assert log.num_examined == 1000


def test_commits_are_looked_at_once_for_all_incarnations(tmp_path: Path) -> None:
    """A ledger of 2 MB with 20,000 of both held up its reader for minutes."""
    policy = PolicyName("policy")
    commits = [
        CommitRecord(
            consumer=policy, seq=at, incarnation=1, number=at, skipped="", stats="{}", at=1.0
        )
        for at in range(1, 4001)
    ]
    forks = [
        IncarnationRecord(
            policy=policy, incarnation=at, number=0, seq=0, request_id=str(at), at=1.0
        )
        for at in range(1, 4001)
    ]
    with closing(open_tables(_ledger(tmp_path / "ledger"))) as tables:
        tables.commit([*commits, *forks])
    with closing(open_recorded_run(tmp_path / "ledger")) as recorded:
        started = time.process_time()
        assert recorded.lineage(policy, 4000).incarnation == 4000
        assert time.process_time() - started < 2


def test_sub_agents_of_a_row_are_found_in_time_that_grows_with_it() -> None:
    """Their names are a node's words: 4,096 turns of as many paths held up `explain` for 40
    minutes."""
    draw = random.Random(0)
    turns = [
        DecodedTurn(
            policy="p",
            role="",
            parent=-1,
            prompt="",
            answer="",
            reasoning="",
            tool_calls=(),
            versions=(),
            finish="stop",
            num_tokens=1,
            agent=".".join(str(draw.randrange(10)) for _ in range(32)),
        )
        for _ in range(500)
    ]
    started = time.process_time()
    assert agent_tree(turns).num_agents > 10_000
    assert time.process_time() - started < 5
