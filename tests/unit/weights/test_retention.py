# SPDX-License-Identifier: Apache-2.0
"""Deletion from a store: everything in use stays available."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from tests.unit.weights.version_history import VersionHistory

from penstock.errors import WeightsError
from penstock.weights import retention
from penstock.weights.rebuild import rebuild_blob
from penstock.weights.retention import GRACE_S, DeletionPlan, execute_plan, plan_deletion
from penstock.weights.store import DirectoryStore


def sweep(
    history: VersionHistory,
    in_use: list[int],
    newest: list[int] | None = None,
    anchor_every: int = 25,
) -> DeletionPlan:
    """Delete as the publisher does, with all versions past the grace period."""
    store = history.store
    with store.deleting() as has_lock:
        assert has_lock
        found = plan_deletion(
            store,
            [history.digest(number) for number in in_use],
            [history.digest(number) for number in newest or [len(history.versions) - 1]],
            anchor_every=anchor_every,
        )
        execute_plan(store, found)
    return found


@pytest.fixture(autouse=True)
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "GRACE_S", -1.0)


def test_full_files_are_deleted_if_deltas_can_rebuild_them(tmp_path: Path) -> None:
    history = VersionHistory(tmp_path / "store")
    history.add_versions(6)
    sweep(history, list(range(6)))
    assert history.whole() == [0, 5]
    for number in range(6):
        path = rebuild_blob(history.store, history.file(number).blob)
        assert path.stat().st_size == history.file(number).bytes


def test_anchors_stay_stored_in_full(tmp_path: Path) -> None:
    history = VersionHistory(tmp_path / "store", share=0.001)
    for _ in range(12):
        history.add_versions()
        sweep(history, list(range(len(history.versions))), anchor_every=5)
    assert history.whole() == [0, 5, 10, 11]


def test_a_chain_never_costs_more_than_a_file(tmp_path: Path) -> None:
    history = VersionHistory(tmp_path / "store", share=1.0)
    history.add_versions(2)
    (step,) = history.store.deltas_to(history.file(1).blob)
    enough = history.file(0).bytes // step.bytes + 2
    for _ in range(enough):
        history.add_versions()
        sweep(history, list(range(len(history.versions))), anchor_every=1000)
    assert (
        len(history.whole()) == 3
    )  # the first, the last, and one where the chain became too expensive


def test_unreferenced_versions_are_deleted_with_their_deltas(tmp_path: Path) -> None:
    history = VersionHistory(tmp_path / "store")
    history.add_versions(5)
    found = sweep(history, [])
    assert (len(found.manifests), found.num_versions) == (4, 1)
    assert list(history.store.manifests()) == [history.digest(4)]
    assert len(list(history.store.blobs())) == 2  # the weights and config.json
    assert list(history.store.deltas()) == []
    used = sum(path.stat().st_size for path in (tmp_path / "store" / "blobs").iterdir())
    assert used == found.kept_bytes


def test_a_version_in_use_stays_within_reach_when_its_anchor_is_not_in_use(tmp_path: Path) -> None:
    history = VersionHistory(tmp_path / "store")
    history.add_versions(8)
    sweep(history, list(range(8)))
    sweep(history, [3])
    assert list(history.store.manifests()) == sorted([history.digest(3), history.digest(7)])
    assert rebuild_blob(history.store, history.file(3).blob).exists()


def test_a_node_that_is_behind_finds_a_chain(tmp_path: Path) -> None:
    history = VersionHistory(tmp_path / "store")
    history.add_versions(8)
    sweep(history, [3])
    base, newest = history.file(3), history.file(7)
    assert len(history.store.chain_to(newest.blob, newest.bytes, [base.blob])) == 4


def test_blobs_that_are_read_are_kept_within_a_limit(tmp_path: Path) -> None:
    """Who reads a byte of every version keeps a few of them, those that were read last."""
    history = VersionHistory(tmp_path / "store")
    history.add_versions(8)
    for number in range(8):
        history.store.mark_read(history.file(number).blob)
        read_at = time.time() - 10 + number
        os.utime(tmp_path / "store" / "reading" / history.file(number).blob, (read_at, read_at))
    sweep(history, list(range(8)), newest=[7])
    assert history.whole() == [0, 3, 4, 5, 6, 7]


def test_young_manifests_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored, and about to be published by another process."""
    monkeypatch.setattr(retention, "GRACE_S", GRACE_S)
    history = VersionHistory(tmp_path / "store")
    history.add_versions(3)
    long_ago = time.time() - 2 * GRACE_S
    os.utime(tmp_path / "store" / "manifests" / f"{history.digest(0)}.json", (long_ago, long_ago))
    assert sweep(history, [], newest=[2]).manifests == (history.digest(0),)


def test_versions_of_other_policies_share_files(tmp_path: Path) -> None:
    history, other = (
        VersionHistory(tmp_path / "store"),
        VersionHistory(tmp_path / "store", policy="other"),
    )
    history.add_versions(3)
    other.add_versions(2)
    store = history.store
    with store.deleting():
        found = plan_deletion(store, [], [history.digest(2), other.digest(1)])
        execute_plan(store, found)
    assert rebuild_blob(store, history.file(2).blob) and rebuild_blob(store, other.file(1).blob)
    manifest = store.read_manifest(other.digest(1))
    assert b"config.json" in manifest


def test_nothing_is_deleted_during_a_write(tmp_path: Path) -> None:
    history = VersionHistory(tmp_path / "store")
    history.add_versions(1)
    with history.store.writing(), history.store.deleting() as has_lock:
        assert not has_lock
    with history.store.deleting() as has_lock:
        assert has_lock


def test_publishing_counts_as_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = VersionHistory(tmp_path / "store")
    seen: list[bool] = []
    sync = DirectoryStore.sync_blobs

    def look(store: DirectoryStore) -> None:
        with store.deleting() as has_lock:
            seen.append(has_lock)
        sync(store)

    monkeypatch.setattr(DirectoryStore, "sync_blobs", look)
    history.add_versions(1)
    assert seen == [False]


def test_a_damaged_delta_leaves_nothing_behind(tmp_path: Path) -> None:
    history = VersionHistory(tmp_path / "store")
    history.add_versions(3)
    sweep(history, [0, 1, 2])
    (entry,) = history.store.deltas_to(history.file(1).blob)
    path = history.store.blob_path(entry.blob)
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[-20] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(WeightsError):
        rebuild_blob(history.store, history.file(1).blob)
    assert not history.store.has_blob(history.file(1).blob)
    assert not list((tmp_path / "store" / "incoming").iterdir())


def test_a_blob_that_cannot_be_rebuilt(tmp_path: Path) -> None:
    history = VersionHistory(tmp_path / "store")
    history.add_versions(1)
    history.store.delete_blob(history.file(0).blob)
    with pytest.raises(WeightsError, match="publish the version again"):
        rebuild_blob(history.store, history.file(0).blob)


def test_five_hundred_versions_stay_within_the_budget(tmp_path: Path) -> None:
    """A trainer with a checkpoint every 20 versions, of which it keeps two, and rows that may be 4
    versions old: only the newest two versions and the anchors are stored in full, and there are few
    deltas."""
    history = VersionHistory(tmp_path / "store", share=0.003)
    worst = 0.0
    for number in range(0, 500, 5):
        history.add_versions(1 if number == 0 else 5)
        oldest = max(0, number // 20 * 20 - 20) - 4
        in_use = [*range(max(0, oldest), number + 1)]
        sweep(history, in_use, newest=[max(0, number - 1), number])
        used = sum(path.stat().st_size for path in (tmp_path / "store").rglob("*"))
        worst = max(worst, used / history.file(number).bytes)
    num_anchors = -(-64 // 25) + 1  # of at most 64 in use, and the one before them
    assert 2 < worst < 2 + num_anchors + 0.5, worst
    assert len(list(history.store.manifests())) == 40
