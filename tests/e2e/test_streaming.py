# SPDX-License-Identifier: Apache-2.0
"""Batches streamed into steps, in real processes: the loss curve of complete batches, and every bit
the same when trainer and service are killed between two instalments."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.e2e.system import System, assert_complete, penstock, until

from penstock.dataflow.ledger.recorded import open_recorded_run
from penstock.dataflow.records import CommitRecord, InstalmentRecord, VersionRecord
from penstock.trainer.replay import is_compared

STEPS = 6
SMALL = (
    f"training.steps={STEPS}",
    "training.groups_per_batch=4",
    "training.minibatches=1",
    "training.checkpoint_every=2",
    "algorithm.num_generations=4",
    "algorithm.aggregation=fixed-constant",
    "dataflow.lease.ttl_s=4",
    "deterministic=true",
)
OPEN_BATCH = (
    "SELECT count(*), max(seq) FROM instalments i WHERE seq > "
    "(SELECT coalesce(max(seq), 0) FROM batches) AND seq > ?"
)
TIMEOUT_S = 600.0

pytestmark = pytest.mark.slow


@pytest.fixture
def systems(tmp_path: Path) -> Iterator[tuple[System, System, System]]:
    made = System(tmp_path / "complete"), System(tmp_path / "streamed"), System(tmp_path / "killed")
    try:
        yield made
    finally:
        for system in made:
            system.close()


def until_open(system: System, after: int) -> int:
    """Wait for a batch after this one of which some instalments are sealed, and not the last."""
    database = system.folder.path / "ledger" / "ledger.db"
    found: list[int] = []

    def is_open() -> bool:
        assert system.launcher is not None
        assert system.launcher.poll() is None, f"ended before an open batch:\n{system.output()}"
        if not database.exists():
            return False
        try:
            with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
                num_open, seq = connection.execute(OPEN_BATCH, (after,)).fetchone()
        except sqlite3.OperationalError:
            return False  # it is being created
        found.append(seq or 0)
        return num_open > 0

    until(is_open, timeout_s=TIMEOUT_S, what="an open batch")
    return found[-1]


def curve(system: System) -> dict[int, list[dict[str, float]]]:
    """Stats by batch, without those of the machine, of every life."""
    found: dict[int, list[dict[str, float]]] = {}
    with closing(open_recorded_run(system.folder.path / "ledger")) as recorded:
        for commit in recorded.coordinator.read(CommitRecord):
            stats = json.loads(commit.stats)
            kept = {name: stats[name] for name in stats if is_compared(name)}
            found.setdefault(commit.seq, []).append(kept)
    return found


def weights(system: System) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    with closing(open_recorded_run(system.folder.path / "ledger")) as recorded:
        for version in recorded.coordinator.read(VersionRecord):
            found.setdefault(version.number, set()).add(version.weights_digest)
    return found


def num_instalments(system: System) -> int:
    with closing(open_recorded_run(system.folder.path / "ledger")) as recorded:
        return len(recorded.coordinator.read(InstalmentRecord))


def test_streamed_steps_have_the_curve_of_complete_ones_and_kills_change_no_bit(
    systems: tuple[System, System, System],
) -> None:
    complete, streamed, killed = systems
    complete.start(*SMALL)
    assert complete.wait(TIMEOUT_S) == 0, complete.output()
    streamed.start(*SMALL, "training.stream=true")
    assert streamed.wait(TIMEOUT_S) == 0, streamed.output()
    killed.start(*SMALL, "training.stream=true")
    seq = 0
    for service in ("trainer-policy", "dataflow", "trainer-policy"):
        seq = until_open(killed, after=seq)
        killed.until_back(service, other_than=killed.kill(service))
    assert killed.wait(TIMEOUT_S) == 0, killed.output()
    for system in systems:
        assert_complete(system, steps=STEPS)
    assert num_instalments(complete) == 0 and num_instalments(streamed) > STEPS
    expected, found = curve(complete), curve(streamed)
    assert found.keys() == expected.keys()
    for number, [stats] in expected.items():
        [again] = found[number]
        assert again.get("loss", 0.0) == pytest.approx(stats.get("loss", 0.0), abs=1e-6)
        assert again["reward/mean"] == stats["reward/mean"], "the answers are the same"
    assert sum("loss" in stats for [stats] in expected.values()) == STEPS, "others were skipped"
    assert all(stats == found[number][0] for number in found for stats in curve(killed)[number])
    assert weights(killed) == weights(streamed) and len(weights(streamed)) == STEPS + 1
    done = penstock("replay", str(killed.folder.path), str(STEPS))
    assert done.returncode == 0, done.stdout + done.stderr
    done = penstock("fork", str(killed.folder.path), "--at", str(STEPS - 2))
    assert done.returncode == 0, done.stdout + done.stderr
