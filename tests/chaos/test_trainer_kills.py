# SPDX-License-Identifier: Apache-2.0
"""SIGKILL of the trainer, or of the whole run, at random moments and while a checkpoint is being
written: in a deterministic run every bit of the weights and of the loss curve is as if nobody had
been killed, and as if one node had done all the work.

The plan follows from one seed, which is printed: repeat it with `PENSTOCK_CHAOS_SEED=…`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.chaos.test_random_kills import LAUNCHER, kill_now
from tests.e2e.system import System, assert_complete, until

from penstock.audit import audit
from penstock.dataflow.recorded import open_recorded
from penstock.dataflow.records import CommitRecord, VersionRecord
from penstock.trainer.replay import is_compared

NUM_KILLS = int(os.environ.get("PENSTOCK_TRAINER_KILLS", "3"))
SEED = int(os.environ.get("PENSTOCK_CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 10**9)
STEPS = max(12, 4 * NUM_KILLS)
TRAINER, WRITING = "trainer-policy", "trainer-policy, writing a checkpoint"
STEP_S = 240.0
SMALL = (
    f"training.steps={STEPS}",
    "training.groups_per_batch=4",
    "training.minibatches=4",
    "training.checkpoint_every=2",
    "algorithm.num_generations=4",
    "dataflow.lease.ttl_s=4",
    "deterministic=true",
)

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600 + 120 * NUM_KILLS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    target: str
    at_step: int
    """Not before so many steps were committed; the run may fall back behind them later."""
    delay_s: float


def make_plan(seed: int, num_kills: int, steps: int) -> list[Kill]:
    """Each kind once, then mostly the trainer; moments in the first half of the run."""
    rng = random.Random(seed)
    kinds = (WRITING, TRAINER, LAUNCHER)
    targets = rng.sample(kinds, k=min(num_kills, len(kinds)))
    targets += rng.choices(kinds, weights=(4, 5, 1), k=num_kills - len(targets))
    moments = sorted(rng.choices(range(1, steps // 2), k=num_kills))
    return [
        Kill(target=target, at_step=step, delay_s=rng.uniform(0.0, 0.5))
        for target, step in zip(targets, moments, strict=True)
    ]


@pytest.fixture
def systems(tmp_path: Path) -> Iterator[tuple[System, System]]:
    made = System(tmp_path / "straight"), System(tmp_path / "killed")
    yield made
    for system in made:
        system.close()


def kill_while_writing(system: System) -> None:
    """As soon as a hidden folder stands among the checkpoints, or when the run ends first."""
    folder = system.folder.checkpoints

    def is_writing() -> bool:
        assert system.launcher is not None
        return system.launcher.poll() is not None or any(folder.glob(".partial-*"))

    give_up_at = time.monotonic() + STEP_S
    while not is_writing():
        assert time.monotonic() < give_up_at, "no checkpoint is being written"
        time.sleep(0.0005)
    with suppress(ProcessLookupError, KeyError):
        os.kill(system.pids()[TRAINER], signal.SIGKILL)


def carry_out(system: System, kill: Kill) -> None:
    system.until_step(kill.at_step, timeout_s=STEP_S)
    if kill.target == WRITING:
        before = system.pids().get(TRAINER)
        kill_while_writing(system)
        until(lambda: system.pids().get(TRAINER) != before, timeout_s=60.0, what="a new trainer")
        return
    time.sleep(kill.delay_s)
    kill_now(system, kill.target)


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a run's ledger says was learned, over all lives of its trainer."""

    weights: dict[int, set[str]]
    """Digests by number."""
    curve: dict[int, set[str]]
    """Stats by batch, without those of the machine."""
    lives: int


def read_told(system: System) -> Told:
    weights: dict[int, set[str]] = defaultdict(set)
    curve: dict[int, set[str]] = defaultdict(set)
    recorded = open_recorded(system.folder.path / "ledger")
    try:
        versions = recorded.home.read(VersionRecord)
        for version in versions:
            weights[version.number].add(version.weights_digest)
        for commit in recorded.home.read(CommitRecord):
            stats = json.loads(commit.stats)
            kept = {name: stats[name] for name in stats if is_compared(name)}
            curve[commit.seq].add(json.dumps([commit.number, commit.skipped, sorted(kept.items())]))
    finally:
        recorded.close()
    lives = len({version.incarnation for version in versions})
    return Told(weights=dict(weights), curve=dict(curve), lives=lives)


def test_a_killed_run_on_three_nodes_has_the_bits_of_a_straight_one_on_one(
    systems: tuple[System, System],
) -> None:
    straight, killed = systems
    print(f"PENSTOCK_CHAOS_SEED={SEED}, {NUM_KILLS} kills in {STEPS} steps")
    straight.start(*SMALL, "models.policy.replicas=1")
    assert straight.wait(600.0) == 0, straight.output()
    killed.start(*SMALL, "models.policy.replicas=3")
    for kill in make_plan(SEED, NUM_KILLS, STEPS):
        carry_out(killed, kill)
        print(f"step {killed.step()}: killed {kill}")
        report = audit(killed.folder.path)
        assert report.ok, "\n".join(report.lines())
    assert killed.wait(STEP_S) == 0, killed.output()
    for system in systems:
        assert_complete(system, steps=STEPS)
    expected, found = read_told(straight), read_told(killed)
    assert found.lives > expected.lives == 1
    assert all(len(digests) == 1 for digests in found.weights.values()), "a life did not repeat"
    assert found.curve == expected.curve
    assert found.weights == expected.weights
    assert len(expected.weights) == STEPS + 1
