# SPDX-License-Identifier: Apache-2.0
"""SIGKILLs at random moments of one small real run: it completes, and a stranger finds nothing lost
and nothing trained twice.

The plan follows from one seed, which is printed with what was done: repeat a failure with
`PENSTOCK_CHAOS_SEED=… make chaos KILLS=…`. Processes keep their own timing, so the same plan may
still meet them in another state.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.e2e.system import System, assert_complete, is_gone, until

from penstock.audit import audit

NUM_KILLS = int(os.environ.get("PENSTOCK_CHAOS_KILLS", "4"))
SEED = int(os.environ.get("PENSTOCK_CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 10**9)
STEPS = 6 * max(4, NUM_KILLS)
"""On idle cores a step takes a fifth of a second: so many that the last kill still meets a run."""
SMALL = (
    f"training.steps={STEPS}",
    "training.groups_per_batch=16",
    "training.checkpoint_every=3",
    "dataflow.lease.ttl_s=4",
)
LAUNCHER = "launcher"
EACH = ("dataflow", "node-0", "trainer-policy", LAUNCHER)
"""What every campaign kills at least once, if it kills so often."""
ANY = (*EACH, "node-1", "weights")
MAX_BACKOFF_S = 0.5
STEP_S = 600.0
"""For one step, when every process must first import torch anew on busy cores."""

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800 + 120 * NUM_KILLS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    target: str
    at_step: int
    """Not before the trainer has committed so many steps; it may fall back behind them later."""
    delay_s: float

    def __str__(self) -> str:
        return f"{self.target} {self.delay_s:.2f} s after step {self.at_step}"


def make_plan(seed: int, num_kills: int, steps: int) -> list[Kill]:
    """Every kind once in any order, then anything; moments in the run's first half, some together,
    for each kill takes its time."""
    rng = random.Random(seed)
    targets = rng.sample(EACH, k=min(num_kills, len(EACH)))
    targets += rng.choices(ANY, k=num_kills - len(targets))
    moments = sorted(rng.choices(range(1, steps // 2), k=num_kills))
    return [
        Kill(target=target, at_step=step, delay_s=rng.uniform(0.0, MAX_BACKOFF_S))
        for target, step in zip(targets, moments, strict=True)
    ]


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    made = System(tmp_path / "run")
    yield made
    made.close()


def kill_now(system: System, target: str) -> int:
    if target == LAUNCHER:
        system.pids()
        assert system.launcher is not None
        pid = system.launcher.pid
        system.launcher.kill()
        system.launcher.wait()
        system.start()  # at once: its children may still be dying
        return pid

    def incarnations() -> bool:
        assert system.launcher is not None
        assert system.launcher.poll() is None, f"the run ended too early:\n{system.output()}"
        pid = system.pids().get(target)
        return pid is not None and not is_gone(pid)

    until(incarnations, timeout_s=300.0, what=f"{target} runs")
    pid = system.pids()[target]
    os.kill(pid, signal.SIGKILL)
    return pid


def test_random_kills(system: System) -> None:
    plan = make_plan(SEED, NUM_KILLS, STEPS)
    print(f"PENSTOCK_CHAOS_SEED={SEED}, {NUM_KILLS} kills in {STEPS} steps")
    began_at = time.monotonic()
    system.start(*SMALL)
    for kill in plan:
        system.until_step(kill.at_step, timeout_s=STEP_S)
        time.sleep(kill.delay_s)
        step, pid = system.step(), kill_now(system, kill.target)
        print(f"{time.monotonic() - began_at:6.1f} s, step {step}: killed {kill} (pid {pid})")
        report = audit(system.folder.path)
        assert report.ok, "\n".join(report.lines())
        lost = report.checks[0]
        assert lost.name == "lost" and lost.num_examined > 0, "no node kept what it was promised"
    assert system.wait(STEP_S) == 0, system.output()
    print(f"{time.monotonic() - began_at:6.1f} s: finished\n{system.output()}")
    assert_complete(system, steps=STEPS)
    report = audit(system.folder.path)
    print("\n".join(report.lines()))
    # Only what was under way at a kill may lack its line in a node's own record.
    assert report.checks[0].num_examined > 0.8 * report.summary.trajectories


def test_a_seed_names_one_plan() -> None:
    assert make_plan(7, 20, 120) == make_plan(7, 20, 120) != make_plan(8, 20, 120)
    for seed in range(50):
        plan = make_plan(seed, 4, 24)
        assert {kill.target for kill in plan} == set(EACH)
        assert all(1 <= kill.at_step < 12 for kill in plan)
