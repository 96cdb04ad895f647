# SPDX-License-Identifier: Apache-2.0
"""Holds what clients were promised against what lies on disk: an outsider, it knows SQL and
segments as the audit reads them, and nothing of the service."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.chaos.ack_log import AckLog, Acknowledged
from tests.chaos.results_table import Figures

from penstock.audit import audit
from penstock.audit.payloads import SegmentReader
from penstock.errors import StoreError

PLACES = "row_id, digest, segment, offset, length"
FEW = 2000
TWICE = (
    "SELECT group_id, slot, count(*) FROM rows WHERE reward IS NOT NULL "
    "GROUP BY group_id, slot HAVING count(*) > 1"
)
"""Slots that were answered more than once."""


def databases(run_dir: Path) -> list[Path]:
    """One ledger, or those of home and its partitions."""
    return sorted((run_dir / "ledger").glob("**/ledger.db"))


def missing(run_dir: Path, acked: Acknowledged) -> list[str]:
    """Promises that are not kept: rows, manifests and commits that are gone or are others."""
    try:
        return _missing(run_dir, acked)
    except sqlite3.DatabaseError as error:
        return [f"all {acked.num} promises: {error}"]


def _missing(run_dir: Path, acked: Acknowledged) -> list[str]:
    damage = dict(_damage(run_dir, acked.rows))
    batches = dict(_read(run_dir, "SELECT seq, digest FROM batches"))
    commits = {
        (seq, incarnation): number
        for seq, incarnation, number in _read(
            run_dir, "SELECT seq, incarnation, number FROM commits"
        )
    }
    freed = _freed(run_dir)
    lost = [
        f"{row_id}: {why}"
        for row_id in acked.rows
        if (why := damage.get(row_id, "gone")) and row_id.partition(".")[0] not in freed
    ]
    lost += _differ("batch", acked.batches, batches)
    return lost + _differ("commit", acked.commits, commits)


def _freed(run_dir: Path) -> set[str]:
    """Groups whose payload nobody needs any more: trained and past every checkpoint, or dropped."""
    tables = {name for (name,) in _read(run_dir, "SELECT name FROM sqlite_master")}
    return (
        {g for (g,) in _read(run_dir, "SELECT group_id FROM freed")} if "freed" in tables else set()
    )


def _differ(what: str, acked: Mapping[Any, object], found: Mapping[Any, object]) -> list[str]:
    wrong = [key for key, value in acked.items() if found.get(key) != value]
    return [f"{what} {key}: {acked[key]} promised, {found.get(key)} found" for key in wrong]


def _read(run_dir: Path, query: str) -> Iterator[tuple[Any, ...]]:
    for database in databases(run_dir):
        with closing(sqlite3.connect(database, timeout=60.0)) as ledger:
            yield from ledger.execute(query).fetchall()


def _damage(run_dir: Path, acked: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Of each of these rows that is there, what is wrong with it; empty when nothing is."""
    ids = list(acked)
    for database in databases(run_dir):
        ledger = closing(sqlite3.connect(database, timeout=60.0))
        with ledger as connection, SegmentReader(database.parent / "segments") as segments:
            for start in range(0, len(ids), FEW):
                part = ids[start : start + FEW]
                marks = ", ".join("?" * len(part))
                query = f"SELECT {PLACES} FROM rows WHERE row_id IN ({marks})"
                for row_id, digest, segment, offset, length in connection.execute(query, part):
                    content = segments.content(segment, offset, length, acked[row_id])
                    is_other = digest != acked[row_id]
                    yield row_id, "another digest" if is_other else content.damage


def check(figures: Figures, run_dir: Path, history: AckLog, twice: list[str]) -> None:
    """The end of a campaign: every promise, then the audit's laws over the whole ledger."""
    figures.acknowledged += history.promises.num
    figures.lost += history.lost
    figures.duplicated += history.duplicated
    figures.trained_twice += history.trained_twice + twice
    check_disk(figures, run_dir, history.promises)


def check_disk(figures: Figures, run_dir: Path, acked: Acknowledged) -> None:
    if lost := missing(run_dir, acked):
        figures.lost += lost
        return
    figures.duplicated += [
        f"{group} slot {slot}: {n} results" for group, slot, n in _read(run_dir, TWICE)
    ]
    if len(databases(run_dir)) == 1:  # the audit reads one ledger
        _check_laws(figures, run_dir, acked)


def _check_laws(figures: Figures, run_dir: Path, acked: Acknowledged) -> None:
    acks = run_dir / "acks"
    acks.mkdir(exist_ok=True)
    (acks / "clients.txt").write_text("".join(f"{row_id}\n" for row_id in acked.rows))
    try:
        laws = audit(run_dir).checks
    except StoreError as error:
        figures.lost.append(f"the audit cannot read the ledger: {error}")
        return
    for law in laws:
        broken = [f"{law.name}: {text}" for text in law.first]
        if law.name == "lost":
            figures.lost += broken
        elif law.name == "trained_twice":
            figures.trained_twice += broken
        else:
            figures.duplicated += broken
