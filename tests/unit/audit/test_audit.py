# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from tests.unit.audit.corrupt_freed import free_batch
from tests.unit.audit.ledgers import Run, always_completed, eventful_run, small_config
from tests.unit.audit.tampering import (
    ADMITTED_GROUPS,
    change,
    end_lease,
    fetch_record,
    forget_acknowledgement,
    insert,
    last_grant,
    ledger,
    one,
    payload,
    row_in_batch,
    segment,
    store,
)

from penstock.audit import audit
from penstock.audit.evidence import read_contents
from penstock.audit.ledger import open_ledger
from penstock.errors import StoreError


def assert_passes(run_dir: Path) -> None:
    report = audit(run_dir)
    assert report.ok, "\n".join(report.lines())
    assert report.lines()[-1].startswith("audit passed")


def test_stopped_run_passes(original: Path) -> None:
    assert_passes(original)
    with ledger(original) as connection:  # the run has enough events to be meaningful
        ends = {end for (end,) in connection.execute("SELECT DISTINCT ended FROM leases")}
        fates = {f"{s}{r}" for s, r in connection.execute("SELECT state, reason FROM fates")}
    assert ends == {"failed", "released", "expired"}
    assert fates >= {"admitted", "sealed", "droppedstale", "droppedfailed_slots"}


@pytest.mark.parametrize("same_weights", [False, True], ids=["other weights", "bit-equal replay"])
async def test_rewound_and_finished_run_passes(tmp_path: Path, same_weights: bool) -> None:
    """Both incarnations of the trainer commit batches 3 to 5; only the second counts."""
    await eventful_run(tmp_path, finish=True, same_weights=same_weights)
    assert_passes(tmp_path)
    commits = one(tmp_path, "SELECT count(*), count(DISTINCT seq) FROM commits")
    assert commits == (12, 9)
    told = audit(tmp_path).summary
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
    told = audit(tmp_path).summary
    assert told.reward_first == pytest.approx(0.2)
    assert told.reward_last == pytest.approx(0.4)
    change(tmp_path, "UPDATE commits SET skipped = 'why' WHERE seq = 1")
    assert audit(tmp_path).summary.reward_first == pytest.approx(0.55)


async def test_running_run_passes(tmp_path: Path) -> None:
    """The service has the ledger open; its writes are still in the write-ahead log."""
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
    assert audit(killed).summary == audit(tmp_path / "alive").summary
    (killed / "ledger" / "ledger.db-wal").unlink()
    with pytest.raises(StoreError):  # the acknowledged rows were there
        audit(killed)


async def test_run_that_never_trained_passes(tmp_path: Path) -> None:
    run = Run(tmp_path, small_config())
    run.close()
    assert_passes(tmp_path)
    told = audit(tmp_path).summary
    assert (told.reward_first, told.reward_last, told.steps) == (None, None, 0)


def test_torn_last_acknowledgement_is_ignored(run_dir: Path) -> None:
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


def test_unneeded_versions_may_be_deleted(run_dir: Path) -> None:
    """A trainer that could restore number 4 at the earliest, and rows that are one version old."""
    retained = {"policy": "policy", "incarnation": 1, "retained": "[[4,4],[5,5]]", "at": 0}
    insert(run_dir, "checkpoints", retained)
    oldest = 4 - small_config().training.max_staleness
    for number, is_needed in ((oldest - 1, False), (oldest, True)):
        version = fetch_record(run_dir, "versions", f"incarnation = 1 AND number = {number}")
        (run_dir / "weights" / "manifests" / f"{version['manifest_digest']}.json").unlink()
        found = next(check for check in audit(run_dir).checks if check.name == "versions")
        assert found.ok is not is_needed


def test_folder_without_a_run_is_rejected(tmp_path: Path, run_dir: Path) -> None:
    with pytest.raises(StoreError, match=r"config\.yaml"):
        audit(tmp_path)
    shutil.rmtree(run_dir / "ledger")
    with pytest.raises(StoreError, match="no ledger"):
        audit(run_dir)


def test_newer_and_damaged_ledgers_are_rejected(run_dir: Path) -> None:
    change(run_dir, "UPDATE rows SET slot = 'two' WHERE slot = 2")
    with pytest.raises(StoreError, match="table rows"):
        audit(run_dir)
    change(run_dir, "UPDATE meta SET value = '5' WHERE key = 'format'")
    with pytest.raises(StoreError, match="format 5"):
        audit(run_dir)
    (run_dir / "ledger" / "ledger.db").write_bytes(b"no database at all" * 100)
    with pytest.raises(StoreError, match="cannot be read"):
        audit(run_dir)


def test_freed_payload_may_be_deleted(run_dir: Path) -> None:
    """Batch 1 is committed and behind the only checkpoint; its rows were acknowledged."""
    free_batch(run_dir, 1, checkpoint=1)
    gone = one(run_dir, "SELECT count(*) FROM rows WHERE segment = 77")
    assert gone >= (12,), "their segment is deleted"
    assert_passes(run_dir)
    assert audit(run_dir).summary.lost == 0


def test_survivors_may_close_without_all(run_dir: Path) -> None:
    """The same ledger with another closing policy: members that failed for good or were cancelled
    are excused while enough remain."""
    (group_id,) = one(run_dir, ADMITTED_GROUPS)
    for slot, end in ((1, "expired"), (3, "truncated")):
        end_lease(run_dir, last_grant(run_dir, group_id, slot), end)
    change(run_dir, "DELETE FROM grants WHERE group_id = ? AND slot = 2", group_id)
    for slot in (1, 2, 3):
        change(run_dir, "DELETE FROM rows WHERE group_id = ? AND slot = ?", group_id, slot)
        forget_acknowledgement(run_dir, f"{group_id}.{slot}.1")
    path = run_dir / "config.yaml"
    text = path.read_text()
    for closing, is_lawful in (("complete", False), ("1", True), ("2", False)):
        policy = closing if closing == "complete" else f"{{survivors: {{min: {closing}}}}}"
        path.write_text(text.replace("closing: complete", f"closing: {policy}"))
        report = audit(run_dir)
        assert report.ok == is_lawful, "\n".join(report.lines())
        assert {check.name for check in report.checks if not check.ok} <= {"slots"}
    path.write_text(text.replace("closing: complete", "closing: {survivors: {min: 1}}"))
    change(run_dir, "UPDATE leases SET ended = 'cancelled' WHERE ended = 'truncated'")
    assert not audit(run_dir).ok, "a lease is cancelled only with its group"


def test_payload_may_be_a_blob(run_dir: Path) -> None:
    row = fetch_record(run_dir, "rows", "row_id = ?", row_in_batch(run_dir, 1))
    start = row["offset"] + 12
    data = segment(run_dir, row["segment"]).read_bytes()[start : start + row["length"]]
    blob = run_dir / "ledger" / "blobs" / row["digest"][:2] / row["digest"]
    blob.parent.mkdir(parents=True)
    blob.write_bytes(data)
    statement = "UPDATE rows SET segment = 0, offset = 0, blob = digest WHERE row_id = ?"
    change(run_dir, statement, row["row_id"])
    assert_passes(run_dir)
    blob.write_bytes(data + b"!")
    assert audit(run_dir).summary.lost == 1
    blob.unlink()
    assert audit(run_dir).summary.lost == 1


def test_payload_moved_while_the_audit_reads_is_found(run_dir: Path) -> None:
    """Compaction by a running service: one row was moved, one is freed and deleted."""
    folder = run_dir / "ledger"
    with open_ledger(folder) as moment:
        before = moment.rows()
    moved, freed = row_in_batch(run_dir, 1), row_in_batch(run_dir, 2)
    row = fetch_record(run_dir, "rows", "row_id = ?", moved)
    elsewhere = store(run_dir, row, payload(run_dir, row))
    assert elsewhere["digest"] == row["digest"]
    change(run_dir, "UPDATE rows SET segment = 900, offset = 0 WHERE row_id = ?", moved)
    insert(run_dir, "freed", {"group_id": freed.partition(".")[0], "at": 0.0})
    segment(run_dir, row["segment"]).unlink()
    contents = read_contents(folder, before, frozenset())
    assert contents[moved].name[0] == moved and not contents[moved].damage
    assert contents[freed].is_freed
    assert any(content.damage for content in contents.values()), "the others really are gone"


async def test_row_of_two_incarnations_is_as_old_as_its_oldest_token(tmp_path: Path) -> None:
    """Tokens by 1.5 and 2.4: incarnation 2 started from number 4 and reproduces number 5."""
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
