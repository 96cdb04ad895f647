# SPDX-License-Identifier: Apache-2.0
"""The same intact run as if a stage had scored its rows: the reward is a column."""

from __future__ import annotations

import shutil
import sqlite3
import struct
from pathlib import Path

import crc32c
import msgspec
import pytest
import yaml
from blake3 import blake3
from tests.unit.audit.tampering import (
    ADMITTED_GROUPS,
    Record,
    change,
    insert,
    ledger,
    one,
    payload,
    rewrite_manifest,
    row_in_batch,
    segment,
)

from penstock.audit import AuditReport, audit

SEGMENT = 901
NOTES = "ab" * 32
STAGE = {"name": "judge", "reads": ["turns"], "writes": ["reward", "length", "notes"]}


def failed(report: AuditReport) -> set[str]:
    return {check.name for check in report.checks if not check.ok}


@pytest.fixture(scope="module")
def staged_original(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = shutil.copytree(original, tmp_path_factory.mktemp("runs") / "staged")
    with ledger(run_dir) as connection:
        digests = _strip_rewards(run_dir, connection)
        seqs = [seq for (seq,) in connection.execute("SELECT seq FROM batches")]

    def refresh(manifest: Record) -> None:
        for member in (row for group in manifest["groups"] for row in group["rows"]):
            member["digest"] = digests[member["row_id"]]
            member["values"] = member.get("values", {}) | {"length": 3.0}
            member["columns"] = {"notes": NOTES}

    for seq in seqs:
        rewrite_manifest(run_dir, seq, refresh)
    configure(run_dir, [STAGE])
    return run_dir


@pytest.fixture
def staged(staged_original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(staged_original, tmp_path / "run")


def configure(run_dir: Path, stages: list[Record]) -> None:
    path = run_dir / "config.yaml"
    config = yaml.safe_load(path.read_text())
    config["dataflow"]["stages"] = stages
    path.write_text(yaml.safe_dump(config))


def _strip_rewards(run_dir: Path, connection: sqlite3.Connection) -> dict[str, str]:
    """Move rewards from payload and rows to columns; returns the new digests by row."""
    digests: dict[str, str] = {}
    query = "SELECT row_id, segment, offset, length, reward FROM rows WHERE reward IS NOT NULL"
    found = connection.execute(query).fetchall()
    with segment(run_dir, SEGMENT).open("wb") as file:
        for row_id, number, offset, length, reward in found:
            row = {"segment": number, "offset": offset, "length": length}
            body = msgspec.msgpack.encode(payload(run_dir, row) | {"reward": None})
            digests[row_id] = blake3(body).hexdigest()
            connection.execute(
                "UPDATE rows SET segment = ?, offset = ?, length = ?, digest = ?, reward = NULL "
                "WHERE row_id = ?",
                (SEGMENT, file.tell(), len(body), digests[row_id], row_id),
            )
            file.write(struct.pack("<4sII", b"PSR1", len(body), crc32c.crc32c(body)) + body)
            for name, value, digest in (
                ("reward", reward, ""),
                ("length", 3.0, ""),
                ("notes", None, NOTES),
            ):
                connection.execute(
                    "INSERT INTO columns (space, row_id, name, failed, value, digest) "
                    "VALUES ('train', ?, ?, '', ?, ?)",
                    (row_id, name, value, digest),
                )
    return digests


def test_rows_scored_by_a_stage_pass(staged: Path) -> None:
    report = audit(staged)
    assert report.ok, "\n".join(report.lines())
    assert report.summary.reward_first is not None


@pytest.mark.parametrize(
    ("name", "change_to"),
    [
        ("reward", "value = 0.77"),
        ("reward", "failed = 'attempts', value = NULL"),
        ("length", "value = 4.0"),
        ("notes", "digest = 'cd'"),
        ("notes", "failed = 'overdue', digest = ''"),
    ],
)
def test_sealed_rows_match_their_columns(staged: Path, name: str, change_to: str) -> None:
    row_id = row_in_batch(staged, 2)
    statement = f"UPDATE columns SET {change_to} WHERE row_id = ? AND name = ?"
    change(staged, statement, row_id, name)
    report = audit(staged)
    assert failed(report) == {"batches"}, "\n".join(report.lines())
    told = next(check.first[0] for check in report.checks if check.name == "batches")
    assert row_id in told


def test_rows_without_a_reward_need_a_stage(staged: Path) -> None:
    configure(staged, [])
    assert "rows" in failed(audit(staged))


def test_failed_rows_have_no_reward_with_stages_either(staged: Path) -> None:
    change(staged, "UPDATE rows SET reward = 0.0 WHERE outcome = 'failed'")
    assert failed(audit(staged)) == {"rows"}


def test_group_that_waits_for_columns_is_not_judged(staged: Path) -> None:
    (group_id,) = one(staged, ADMITTED_GROUPS)
    change(staged, "DELETE FROM fates WHERE group_id = ?", group_id)
    assert failed(audit(staged)) == {"groups"}
    waits = {"group_id": group_id, "policy": "policy", "state": "judging", "at": 0.0}
    insert(staged, "completions", waits)
    assert audit(staged).ok
    change(staged, "UPDATE completions SET state = 'reported' WHERE group_id = ?", group_id)
    assert failed(audit(staged)) == {"groups"}
