# SPDX-License-Identifier: Apache-2.0
"""A run with a second partition passes with messages in flight, and every violation is found."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from tests.unit.audit import corrupt_partitions
from tests.unit.audit.ledgers import small_config
from tests.unit.audit.partitioned_ledgers import PartitionedRun, disconnected_run, synced_run
from tests.unit.audit.tampering import change, one, partition_1

from penstock.audit import AuditReport, audit, evidence
from penstock.audit.ledger import LedgerReader, open_ledger
from penstock.errors import StoreError


def failed(report: AuditReport) -> set[str]:
    return {check.name for check in report.checks if not check.ok}


def assert_passes(run_dir: Path) -> AuditReport:
    report = audit(run_dir)
    assert report.ok, "\n".join(report.lines())
    return report


@pytest.fixture(scope="session")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "quiet"
    asyncio.run(synced_run(run_dir))
    return run_dir


@pytest.fixture(scope="session")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "cut"
    asyncio.run(disconnected_run(run_dir))
    return run_dir


CORRUPTIONS = [
    pytest.param(kind, name, corrupt, id=f"{kind}-{name}-{corrupt.__name__}")
    for kind, laws in (("quiet", corrupt_partitions.IN_QUIET), ("cut", corrupt_partitions.IN_CUT))
    for name, corruptions in laws.items()
    for corrupt in corruptions
]


@pytest.mark.parametrize(("kind", "name", "corrupt"), CORRUPTIONS)
def test_corruption_is_named(
    quiet: Path, cut: Path, tmp_path: Path, kind: str, name: str, corrupt: Callable[[Path], str]
) -> None:
    run_dir = shutil.copytree(quiet if kind == "quiet" else cut, tmp_path / "run")
    culprit = corrupt(run_dir)
    report = audit(run_dir)
    assert failed(report) == {name}, "\n".join(report.lines())
    told = next(check.first for check in report.checks if check.name == name)
    assert any(culprit in line for line in told), told


def test_quiet_run_passes(quiet: Path) -> None:
    report = assert_passes(quiet)
    rows = [one(path, "SELECT count(*) FROM rows")[0] for path in (quiet, partition_1(quiet))]
    assert report.summary.trajectories == sum(rows) and min(rows) > 0
    assert one(partition_1(quiet), "SELECT count(*) FROM freed")[0] > 0
    assert one(quiet, "SELECT count(*) FROM fates WHERE state = 'sealed' AND group_id LIKE 'p1-%'")


def test_cut_run_passes(cut: Path) -> None:
    """Messages in flight are allowed in both directions, and each kind occurs."""
    assert_passes(cut)
    for path, kind in ((cut, "IssueGroup"), (cut, "Committed"), (partition_1(cut), "GroupEnded")):
        corrupt_partitions.undelivered(path, kind)
    unjudged = (
        "SELECT group_id FROM groups WHERE group_id = ? "
        "AND group_id NOT IN (SELECT group_id FROM fates)"
    )
    _, message = corrupt_partitions.undelivered(partition_1(cut), "GroupEnded")
    one(cut, unjudged, message["group_id"])


async def test_running_run_passes(tmp_path: Path) -> None:
    """Read repeatedly while both partitions and their link are working."""
    run = PartitionedRun(tmp_path, small_config())
    await run.start()
    steps = asyncio.create_task(_steps(run, 6))
    num_audits = 0
    while not steps.done():
        await asyncio.to_thread(assert_passes, tmp_path)
        num_audits += 1
    assert await steps and num_audits > 3
    await run.stop()


async def test_partitions_may_be_ahead_of_the_first_read_of_the_coordinator_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ledgers of two moments of one run, in the order a slow audit would read them."""
    run = PartitionedRun(tmp_path / "after", small_config())
    await run.start()
    assert await _steps(run, 1)
    await run.exchange()
    before = shutil.copytree(tmp_path / "after", tmp_path / "before")
    assert await _steps(run, 3)
    await run.exchange()
    await run.stop()
    after = tmp_path / "after"
    assert_passes(before)
    assert_passes(after)

    def read_as(first: Path, partition: Path, second: Path) -> set[str]:
        looks = iter([first / "ledger", partition_1(partition), second / "ledger"])

        def next_look(folder: Path) -> AbstractContextManager[LedgerReader]:
            return open_ledger(next(looks, folder))

        monkeypatch.setattr(evidence, "open_ledger", next_look)
        mixed = shutil.copytree(first, tmp_path / f"{first.name}-{partition.name}-{second.name}")
        shutil.rmtree(partition_1(mixed))
        shutil.copytree(partition_1(partition), partition_1(mixed))
        return failed(audit(mixed))

    assert read_as(before, after, after) == set()
    assert read_as(before, after, before) >= {"sampled_by_policy", "partitions", "messages"}
    assert read_as(after, before, after) >= {"lost", "groups", "batches", "messages"}


async def test_finished_run_passes(tmp_path: Path) -> None:
    run = PartitionedRun(tmp_path, small_config())
    await run.start()
    while await run.step():
        pass
    await run.stop()
    assert assert_passes(tmp_path).summary.steps == 8


async def _steps(run: PartitionedRun, count: int) -> bool:
    return all([await run.step() for _ in range(count)])


async def test_lost_partition_excuses_its_rows(tmp_path: Path) -> None:
    run = PartitionedRun(tmp_path, small_config())
    await run.start()
    assert await _steps(run, 3)
    await run.partition_node.work(2)
    run.line.cut()
    await run.service.partitions.lose(1)
    await run.stop()
    assert one(tmp_path, "SELECT count(*) FROM batches WHERE instr(manifest, 'p1-')")[0] > 0
    whole = audit(tmp_path).summary
    shutil.rmtree(partition_1(tmp_path))
    report = assert_passes(tmp_path)
    assert report.summary == whole and report.summary.lost == 0
    change(tmp_path, "UPDATE partitions SET state = 'gone'")
    assert failed(audit(tmp_path)) >= {"lost", "groups"}, "nothing of it was freed"
    change(tmp_path, "UPDATE partitions SET state = 'serving'")
    with pytest.raises(StoreError, match="p1"):
        audit(tmp_path)


async def test_lost_partition_excuses_nothing_else(tmp_path: Path) -> None:
    run = PartitionedRun(tmp_path, small_config())
    await run.start()
    assert await _steps(run, 2)
    await run.service.partitions.lose(1)
    await run.stop()
    acks = tmp_path / "acks" / "node-0.txt"
    acks.write_text(acks.read_text() + "p0-1.0.9\np2-1.0.9\n")
    (group_id,) = one(
        tmp_path,
        "SELECT group_id FROM fates WHERE reason = 'partition_lost' AND group_id LIKE 'p1-%'",
    )
    for table in ("fates", "freed"):
        change(tmp_path, f"DELETE FROM {table} WHERE group_id = ?", group_id)
    report = audit(tmp_path)
    assert failed(report) == {"lost", "groups"}
    assert report.summary.lost == 2
