# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from tests.unit.audit.ledgers import Run, always_completed, eventful_run, small_config
from tests.unit.audit.run_files import change, ledger, one

from penstock.audit import audit, summary
from penstock.errors import StoreError


def assert_passes(run_dir: Path) -> None:
    report = audit(run_dir)
    assert report.ok, "\n".join(report.lines())
    assert report.lines()[-1].startswith("audit passed")


def test_stopped_run_passes(original: Path) -> None:
    assert_passes(original)
    with ledger(original) as connection:  # the run is eventful enough to mean something
        ends = {end for (end,) in connection.execute("SELECT DISTINCT ended FROM leases")}
        fates = {f"{s}{r}" for s, r in connection.execute("SELECT state, reason FROM fates")}
    assert ends == {"", "delivered", "failed", "released", "expired"}
    assert fates >= {"admitted", "sealed", "droppedstale", "droppedfailed_slots"}


@pytest.mark.parametrize("same_weights", [False, True], ids=["other weights", "bit-equal replay"])
async def test_rewound_and_finished_run_passes(tmp_path: Path, same_weights: bool) -> None:
    """Batches 3 to 5 are committed by both lives of the trainer; only the second counts."""
    await eventful_run(tmp_path, finish=True, same_weights=same_weights)
    assert_passes(tmp_path)
    commits = one(tmp_path, "SELECT count(*), count(DISTINCT seq) FROM commits")
    assert commits == (12, 9)
    told = summary(tmp_path)
    assert (told.steps, told.lost, told.trained_twice) == (8, 0, 0)
    assert told.trajectories == one(tmp_path, "SELECT count(*) FROM rows")[0]
    assert told.reward_first == told.reward_last == pytest.approx((0 + 1 + 2 + 3) / 16)


async def test_summary_reads_rewards_of_the_surviving_batches(tmp_path: Path) -> None:
    run = Run(tmp_path, small_config(), choose=always_completed)
    await run.start()
    for _ in range(3):
        await run.step()
    run.close()
    with ledger(tmp_path) as connection:
        for seq, reward in ((1, 0.1), (2, 0.3), (3, 0.8)):
            connection.execute(
                "UPDATE rows SET reward = ? WHERE group_id IN "
                "(SELECT group_id FROM fates WHERE seq = ?)",
                (reward, seq),
            )
    told = summary(tmp_path)
    assert told.reward_first == pytest.approx(0.2)
    assert told.reward_last == pytest.approx(0.4)
    change(tmp_path, "UPDATE commits SET skipped = 'why' WHERE seq = 1")
    assert summary(tmp_path).reward_first == pytest.approx(0.55)


async def test_running_run_passes(tmp_path: Path) -> None:
    """The service has the ledger open; what it wrote is still in its write-ahead log."""
    run = Run(tmp_path, small_config())
    await run.start()
    for _ in range(2):
        await run.step()
        await asyncio.to_thread(assert_passes, tmp_path)
    run.close()


async def test_killed_run_passes(tmp_path: Path) -> None:
    """The files as a SIGKILL leaves them: the newest facts are only in the write-ahead log."""
    run = Run(tmp_path / "alive", small_config())
    await run.start()
    await run.step()
    killed = shutil.copytree(tmp_path / "alive", tmp_path / "killed")
    run.close()
    assert (killed / "ledger" / "ledger.db-wal").stat().st_size > 0
    assert_passes(killed)
    assert summary(killed) == summary(tmp_path / "alive")
    (killed / "ledger" / "ledger.db-wal").unlink()
    with pytest.raises(StoreError):  # what was acknowledged stood there
        audit(killed)


async def test_run_that_never_trained_passes(tmp_path: Path) -> None:
    run = Run(tmp_path, small_config())
    run.close()
    assert_passes(tmp_path)
    told = summary(tmp_path)
    assert (told.reward_first, told.reward_last, told.steps) == (None, None, 0)


def test_torn_last_acknowledgement_is_no_loss(run_dir: Path) -> None:
    with (run_dir / "acks" / "node-0.txt").open("a") as log:
        log.write("p0-17.")
    assert_passes(run_dir)


def test_audit_changes_nothing(run_dir: Path) -> None:
    def files() -> dict[str, bytes]:
        found = (path for path in sorted(run_dir.rglob("*")) if path.is_file())
        return {str(path): path.read_bytes() for path in found}

    before = files()
    assert_passes(run_dir)
    assert files() == before


def test_run_without_weights_folder_passes(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "weights")
    assert_passes(run_dir)


def test_folder_without_a_run_is_refused(tmp_path: Path, run_dir: Path) -> None:
    with pytest.raises(StoreError, match=r"config\.yaml"):
        audit(tmp_path)
    shutil.rmtree(run_dir / "ledger")
    with pytest.raises(StoreError, match="no ledger"):
        audit(run_dir)


def test_newer_and_damaged_ledgers_are_refused(run_dir: Path) -> None:
    change(run_dir, "UPDATE rows SET slot = 'two' WHERE slot = 2")
    with pytest.raises(StoreError, match="table rows"):
        audit(run_dir)
    change(run_dir, "UPDATE meta SET value = '2' WHERE key = 'format'")
    with pytest.raises(StoreError, match="format 2"):
        audit(run_dir)
    (run_dir / "ledger" / "ledger.db").write_bytes(b"no database at all" * 100)
    with pytest.raises(StoreError, match="cannot be read"):
        audit(run_dir)


def test_survivors_may_close_without_all(run_dir: Path) -> None:
    """The same ledger under another closing policy: a member that failed for good is excused."""
    (group_id,) = one(
        run_dir,
        "SELECT g.group_id FROM groups g JOIN fates f ON f.group_id = g.group_id "
        "WHERE f.state = 'admitted'",
    )
    change(run_dir, "DELETE FROM rows WHERE group_id = ? AND slot = 1", group_id)
    change(run_dir, "UPDATE leases SET ended = 'expired' WHERE group_id = ? AND slot = 1", group_id)
    for log in (run_dir / "acks").glob("*.txt"):
        lines = [x for x in log.read_text().split("\n") if not x.startswith(f"{group_id}.1.")]
        log.write_text("\n".join(lines))
    assert not audit(run_dir).ok
    path = run_dir / "config.yaml"
    text = path.read_text().replace("closing: complete", "closing: {survivors: {min: 2}}")
    path.write_text(text)
    assert_passes(run_dir)


async def test_row_of_two_lives_is_as_old_as_its_oldest_token(tmp_path: Path) -> None:
    """Tokens by 1.5 and 2.4, where life 2 started from number 4 and makes number 5 again."""
    run = Run(tmp_path, small_config(), choose=always_completed)
    run.trainer.makes_same_weights = True
    await run.start()
    node = run.nodes[0]
    while run.trainer.number < 5:
        while await run.trainer.batch() is None:
            await node.work(12)
        await run.trainer.commit()
        await node.load()
    await node.lease(12)
    await run.trainer.incarnate(4, 4)
    await node.load()
    assert await node.deliver(across_load=True) == 12
    assert await run.trainer.batch() is not None
    await run.trainer.commit()
    assert await run.trainer.batch() is not None
    run.close()
    assert_passes(tmp_path)
