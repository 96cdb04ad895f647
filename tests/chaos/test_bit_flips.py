# SPDX-License-Identifier: Apache-2.0
"""Bit flips in every kind of file of a ledger: refused, contained to the record, or harmless; never
served and never cut off without a word."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import tempfile
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from tests.chaos.ack_log import AckLog
from tests.chaos.bit_flips import (
    Records,
    Verdict,
    draw,
    ends_of_commits,
    flip_bit,
    flipped,
    judge_payloads,
    judge_service,
    judge_start,
    read_payloads,
    read_records,
    without_last_commit,
)
from tests.chaos.checker import databases
from tests.chaos.filesystems import scratch
from tests.chaos.load_generator import Load
from tests.chaos.processes import Services, commands, make_run
from tests.chaos.results_table import Figures, begin

from penstock.dataflow.ledger.tables import open_tables
from penstock.dataflow.records import RowRecord
from penstock.fleet.run_folder import RunFolder

FLIPS = int(os.environ.get("PENSTOCK_FLIPS", "500"))
SEED = int(os.environ.get("PENSTOCK_CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 10**9)
SHARES = {"segments": 0.5, "database": 0.4, "log": 0.1}
ROWS = 60
SERVICE_EVERY = 200
"""One flip of so many is also shown to a whole service."""

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800 + FLIPS)]


@pytest.fixture
def work(tmp_path: Path):
    with tempfile.TemporaryDirectory(prefix="penstock-flips-", dir=scratch(tmp_path)) as name:
        yield Path(name)


async def killed_run(work: Path) -> tuple[RunFolder, AckLog]:
    """A run whose services were killed under load: the log of its ledger holds what the database
    file lacks."""
    folder = make_run(work / "run")
    with (
        AckLog(work / "history.jsonl") as history,
        Services(commands(folder), folder.logs) as services,
    ):
        await services.start_all()
        async with Load(folder, services, history, SEED) as load:
            for _ in range(2):
                await load.progress(ROWS)
                for name in services.names:
                    services.kill(name)
                await services.start_all()
            await load.progress(ROWS)
            while len(ends_of_commits(last_log(folder).read_bytes())) < 2:
                await load.progress(ROWS)  # a slow machine puts many rows into one commit
            for name in services.names:
                services.kill(name)
    return folder, history


def last_log(folder: RunFolder) -> Path:
    return databases(folder.path)[-1].with_name("ledger.db-wal")


async def killed_ledger(work: Path) -> Path:
    folder, _ = await killed_run(work)
    return databases(folder.path)[-1].parent


def settled(killed: Path, work: Path) -> Path:
    """The same ledger with everything in its database file and an empty log."""
    folder = work / "settled"
    shutil.copytree(killed, folder)
    for database in sorted(folder.glob("**/ledger.db")):
        with closing(sqlite3.connect(database)) as ledger:
            ledger.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return folder


def conclude(figures: Figures, verdicts: Counter[str]) -> None:
    figures.trials = verdicts.total()
    figures.note = ", ".join(f"{verdicts[v]:,} {v}" for v in Verdict if verdicts[v])
    figures.require_clean()


async def test_flips_in_segments(work: Path) -> None:
    figures, rng, verdicts = begin("bit flip in a segment"), random.Random(SEED), Counter[str]()
    folder = settled(await killed_ledger(work), work)
    tables = open_tables(folder)
    rows = tables.read(RowRecord)
    tables.close()
    truth = read_payloads(folder, rows)
    figures.acknowledged = len(truth)
    assert None not in truth.values()
    files = sorted((folder / "segments").iterdir())
    for _ in range(int(FLIPS * SHARES["segments"])):
        flip = draw(files, rng)
        with flipped(flip):
            verdict, why = judge_payloads(read_payloads(folder, rows), truth)
        verdicts[verdict] += 1
        if verdict is Verdict.SILENT:
            figures.lost.append(f"{flip}: {why}")
    conclude(figures, verdicts)


async def test_flips_in_the_database(work: Path) -> None:
    figures, rng, verdicts = begin("bit flip in the database"), random.Random(SEED), Counter[str]()
    folder = settled(await killed_ledger(work), work)
    database = folder / "ledger.db"
    tables = open_tables(folder)
    truth = read_records(tables)
    tables.close()
    figures.acknowledged = sum(map(len, truth.values()))
    whole = database.read_bytes()
    for _ in range(int(FLIPS * SHARES["database"])):
        flip = draw([database], rng)
        flip_bit(flip)
        verdict, why = judge_start(folder, truth)
        database.write_bytes(whole)
        verdicts[verdict] += 1
        if verdict is Verdict.SILENT:
            figures.lost.append(f"{flip}: {why}")
    conclude(figures, verdicts)


async def test_flips_in_the_log(work: Path) -> None:
    figures, rng, verdicts = begin("bit flip in the log"), random.Random(SEED), Counter[str]()
    killed, folder = await killed_ledger(work), work / "flipped"
    folder.mkdir()
    database, log = (killed / "ledger.db").read_bytes(), (killed / "ledger.db-wal").read_bytes()

    def lay(log: bytes) -> Path:
        (folder / "ledger.db").write_bytes(database)
        (folder / "ledger.db-wal").write_bytes(log)
        return folder

    def read(log: bytes) -> Records:
        tables = open_tables(lay(log))
        try:
            return read_records(tables)
        finally:
            tables.close()

    truth, before_last = read(log), read(without_last_commit(log))
    figures.acknowledged = sum(map(len, truth.values()))
    for _ in range(int(FLIPS * SHARES["log"])):
        flip = draw([lay(log) / "ledger.db-wal"], rng)
        flip_bit(flip)
        verdict, why = judge_start(folder, truth, before_last)
        verdicts[verdict] += 1
        if verdict is Verdict.SILENT:
            figures.lost.append(f"{flip}: {why}")
    conclude(figures, verdicts)


async def test_flips_under_a_whole_service(work: Path) -> None:
    """A sample: started on the damaged ledger, it refuses, or serves what was promised."""
    figures, rng = begin("bit flip, whole service"), random.Random(SEED)
    verdicts = Counter[str]()
    folder, history = await killed_run(work)
    ledger, killed = folder.path / "ledger", work / "killed"
    shutil.copytree(ledger, killed)
    states = (killed, settled(killed, work))
    figures.acknowledged = history.promises.num
    with Services(commands(folder), folder.logs) as services:
        for _ in range(1 + FLIPS // SERVICE_EVERY):
            shutil.rmtree(ledger)
            shutil.copytree(rng.choice(states), ledger)
            flip = draw(damageable(ledger), rng)
            flip_bit(flip)
            verdict, why = await judge_service(services, folder, history.promises)
            verdicts[verdict] += 1
            if verdict is Verdict.SILENT:
                figures.lost.append(f"{flip}: {why}")
    conclude(figures, verdicts)


def damageable(ledger: Path) -> list[Path]:
    return [path for path in sorted(ledger.rglob("*")) if path.suffix in (".dat", ".db", ".db-wal")]
