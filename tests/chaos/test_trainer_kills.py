# SPDX-License-Identifier: Apache-2.0
"""SIGKILL of the trainer, of one of its ranks, or of the whole run, at random moments and while a
checkpoint is being written: in a deterministic run every bit of the weights and of the loss curve
is as if nobody had been killed, and as if one node had done all the work.

Variant and plan follow from one seed, which is printed: repeat them with `PENSTOCK_CHAOS_SEED=…`.
A small campaign takes one variant, a large one all of them.
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

import psutil
import pytest
from tests.chaos.test_random_kills import LAUNCHER, kill_now
from tests.e2e.system import System, assert_complete, beside_a_straight_one, until

from penstock.audit import audit
from penstock.dataflow.ledger.recorded import open_recorded_run
from penstock.dataflow.records import CommitRecord, VersionRecord
from penstock.trainer.replay import is_compared

TRAINER, RANK = "trainer-policy", "rank"
WRITING = "whoever writes a checkpoint"
STEP_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What a killed run consists of; the straight one has one node, and as many ranks."""

    nodes: int
    ranks: int

    def __str__(self) -> str:
        return f"nodes {self.nodes}, ranks {self.ranks}"

    @property
    def kinds(self) -> tuple[str, ...]:
        """What can be killed."""
        return (WRITING, TRAINER, LAUNCHER, *([RANK] if self.ranks > 1 else []))


VARIANTS = tuple(Variant(nodes=nodes, ranks=ranks) for ranks in (1, 2) for nodes in (1, 3))


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    target: str
    at_step: int
    """Not before so many steps were committed; the run may fall back behind them later."""
    delay_s: float
    rank: int
    """Which one, where it is a rank that is killed."""


def choose_variants(seed: int, num_kills: int) -> tuple[Variant, ...]:
    """All, when each can have every kind of kill."""
    if num_kills >= sum(len(variant.kinds) for variant in VARIANTS):
        return VARIANTS
    return (random.Random(seed).choice(VARIANTS),)


def make_plan(seed: int, variant: Variant, num_kills: int) -> list[Kill]:
    """Each kind once, then mostly the trainer and its ranks; moments in the first half of the
    run."""
    rng = random.Random(seed)
    kinds = variant.kinds
    targets = rng.sample(kinds, k=min(num_kills, len(kinds)))
    targets += rng.choices(kinds, weights=(4, 5, 1, 5)[: len(kinds)], k=num_kills - len(targets))
    moments = sorted(rng.choices(range(1, num_steps(num_kills) // 2), k=num_kills))
    return [
        Kill(
            target=target,
            at_step=step,
            delay_s=rng.uniform(0.0, 0.5),
            rank=rng.randrange(variant.ranks),
        )
        for target, step in zip(targets, moments, strict=True)
    ]


def num_steps(num_kills: int) -> int:
    return max(24, 4 * num_kills)


SEED = int(os.environ.get("PENSTOCK_CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 10**9)
CHOSEN = choose_variants(SEED, int(os.environ.get("PENSTOCK_TRAINER_KILLS", "3")))
NUM_KILLS = int(os.environ.get("PENSTOCK_TRAINER_KILLS", "3")) // len(CHOSEN)
"""In each variant."""
STEPS = num_steps(NUM_KILLS)
SMALL = (
    f"training.steps={STEPS}",
    "training.groups_per_batch=4",
    "training.minibatches=4",
    "training.checkpoint_every=2",
    "algorithm.num_generations=4",
    "dataflow.lease.ttl_s=4",
    "deterministic=true",
)

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800 + 120 * NUM_KILLS)]


@pytest.fixture
def systems(tmp_path: Path) -> Iterator[tuple[System, System]]:
    with beside_a_straight_one(tmp_path, "killed") as made:
        yield made


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The processes that train in one run."""

    system: System
    num_ranks: int

    def pid(self, rank: int) -> int | None:
        """Of the process that is this rank now, if any: a child of the trainer's supervisor, or
        the trainer itself where it is alone."""
        trainer = self.system.pids().get(TRAINER)
        if trainer is None or self.num_ranks == 1:
            return trainer
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            for child in psutil.Process(trainer).children():
                if child.environ().get("RANK") == str(rank):
                    return child.pid
        return None

    def kill(self, rank: int) -> None:
        """Kill it, once it is there, and wait until another has taken its place."""
        until(lambda: self.pid(rank) is not None, timeout_s=STEP_S, what=f"rank {rank} runs")
        killed = self.pid(rank)
        with suppress(ProcessLookupError):
            if killed is not None:
                os.kill(killed, signal.SIGKILL)
        until(lambda: self.pid(rank) not in (None, killed), timeout_s=STEP_S, what="a new trainer")


def wait_for_checkpoint_write(system: System) -> bool:
    """Wait until a hidden folder stands among the checkpoints; false when the run ends first."""
    assert system.launcher is not None
    folder = system.folder.checkpoints
    give_up_at = time.monotonic() + STEP_S
    while not any(folder.glob(".partial-*")):
        if system.launcher.poll() is not None:
            return False
        assert time.monotonic() < give_up_at, "no checkpoint is being written"
        time.sleep(0.0005)
    return True


def execute_kill(system: System, kill: Kill, num_ranks: int) -> None:
    system.until_step(kill.at_step, timeout_s=STEP_S)
    ranks = Ranks(system=system, num_ranks=num_ranks)
    if kill.target == WRITING:
        if wait_for_checkpoint_write(system):
            ranks.kill(rank=0)
        return
    time.sleep(kill.delay_s)
    if kill.target == RANK:
        ranks.kill(kill.rank)
    else:
        kill_now(system, kill.target)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedHistory:
    """What a run's ledger says was learned, over all lives of its trainer."""

    weights: dict[int, set[str]]
    """Digests by number."""
    curve: dict[int, set[str]]
    """Stats by batch, without those of the machine."""
    incarnations: int


def read_learned_history(system: System) -> LearnedHistory:
    weights: dict[int, set[str]] = defaultdict(set)
    curve: dict[int, set[str]] = defaultdict(set)
    recorded = open_recorded_run(system.folder.path / "ledger")
    try:
        versions = recorded.coordinator.read(VersionRecord)
        for version in versions:
            weights[version.number].add(version.weights_digest)
        for commit in recorded.coordinator.read(CommitRecord):
            stats = json.loads(commit.stats)
            kept = {name: stats[name] for name in stats if is_compared(name)}
            curve[commit.seq].add(json.dumps([commit.number, commit.skipped, sorted(kept.items())]))
    finally:
        recorded.close()
    incarnations = len({version.incarnation for version in versions})
    return LearnedHistory(weights=dict(weights), curve=dict(curve), incarnations=incarnations)


@pytest.mark.parametrize("variant", CHOSEN, ids=str)
def test_a_killed_run_has_the_bits_of_a_straight_one_on_one_node(
    systems: tuple[System, System], variant: Variant
) -> None:
    straight, killed = systems
    print(f"PENSTOCK_CHAOS_SEED={SEED}, {variant}: {NUM_KILLS} kills in {STEPS} steps")
    words = (*SMALL, f"training.parallel.dp={variant.ranks}")
    straight.start(*words, "models.policy.replicas=1")
    assert straight.wait(600.0 + 10.0 * STEPS) == 0, straight.output()
    killed.start(*words, f"models.policy.replicas={variant.nodes}")
    for kill in make_plan(SEED, variant, NUM_KILLS):
        execute_kill(killed, kill, variant.ranks)
        print(f"step {killed.step()}: killed {kill}")
        report = audit(killed.folder.path)
        assert report.ok, "\n".join(report.lines())
    assert killed.wait(STEP_S) == 0, killed.output()
    for system in systems:
        assert_complete(system, steps=STEPS)
    expected, found = read_learned_history(straight), read_learned_history(killed)
    assert found.incarnations > expected.incarnations == 1
    assert all(len(digests) == 1 for digests in found.weights.values()), "a life did not repeat"
    assert found.curve == expected.curve
    assert found.weights == expected.weights
    assert len(expected.weights) == STEPS + 1


def test_a_large_campaign_has_every_kind_of_kill_in_every_variant() -> None:
    for seed in range(20):
        variants = choose_variants(seed, 200)
        assert {(variant.nodes, variant.ranks) for variant in variants} == {
            (1, 1),
            (3, 1),
            (1, 2),
            (3, 2),
        }
        for variant in variants:
            plan = make_plan(seed, variant, 200 // len(variants))
            assert {kill.target for kill in plan} == {*variant.kinds}
            assert {kill.rank for kill in plan} == {*range(variant.ranks)}
    assert len(choose_variants(7, 3)) == 1
    assert {choose_variants(seed, 3) for seed in range(50)} == {(one,) for one in VARIANTS}
