# SPDX-License-Identifier: Apache-2.0
"""Many runs on one machine: no port is taken twice, and however a launcher ends, nothing outlives
it. `PENSTOCK_ROUNDS=5 PENSTOCK_ENDS=20 make e2e-long PYTEST_ARGS="-k many_runs"`."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from tests.e2e.system import System, assert_complete, is_gone, until

ROUNDS = int(os.environ.get("PENSTOCK_ROUNDS", "1"))
ENDS = int(os.environ.get("PENSTOCK_ENDS", "3"))
SEED = int(os.environ.get("PENSTOCK_CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 10**9)
NUM_RUNS = 8
STEPS = 3
TINY = (
    "training.groups_per_batch=4",
    "training.lr_scheduler_type=constant",
    "algorithm.num_generations=2",
    "models.policy.replicas=1",
)
NUM_PROCESSES = 6
"""Launcher, fork server, dataflow, weights, trainer and node. A launcher ends when some number of
them was seen, or after the first steps: at any speed of the machine, in any phase of a run."""
TIMEOUT_S = 1500.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800 * max(1, ROUNDS, ENDS // 4))]


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """A shell that starts the tests in the background lets them, and all that they start, ignore
    SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def systems(tmp_path: Path) -> Iterator[list[System]]:
    made: list[System] = []
    yield made
    for system in made:
        system.close()


def family(system: System) -> set[int]:
    """The launcher and everything below it."""
    assert system.launcher is not None
    with suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(system.launcher.pid)
        return {launcher.pid, *(child.pid for child in launcher.children(recursive=True))}
    return {system.launcher.pid}


def until_all_gone(pids: set[int]) -> None:
    until(lambda: all(map(is_gone, pids)), timeout_s=600.0, what="no orphan is left")


def test_eight_runs_at_once(systems: list[System], tmp_path: Path) -> None:
    for round_ in range(ROUNDS):
        now = [System(tmp_path / f"run-{round_}-{index}") for index in range(NUM_RUNS)]
        systems += now
        for system in now:
            system.start(f"training.steps={STEPS}", *TINY)
        seen = set[int]()

        def all_ended(now: list[System] = now, seen: set[int] = seen) -> bool:
            for system in now:
                seen |= family(system)
            return all(one.launcher and one.launcher.poll() is not None for one in now)

        until(all_ended, timeout_s=TIMEOUT_S, what="eight runs end")
        for system in now:
            assert system.wait(1.0) == 0, system.output()
            assert "in use" not in system.output()
            assert_complete(system, steps=STEPS)
        until_all_gone(seen)


def test_a_launcher_that_ends_leaves_nothing(systems: list[System], tmp_path: Path) -> None:
    rng = random.Random(SEED)
    print(f"PENSTOCK_CHAOS_SEED={SEED}")
    for number in range(ENDS):
        system = System(tmp_path / f"run-{number}")
        systems.append(system)
        system.start("training.steps=100000", *TINY)
        seen, phase = set[int](), rng.randint(1, NUM_PROCESSES + 2)

        def is_there(system: System = system, seen: set[int] = seen, phase: int = phase) -> bool:
            seen |= family(system)
            return len(seen) >= min(phase, NUM_PROCESSES) and system.step() >= phase - NUM_PROCESSES

        until(is_there, timeout_s=TIMEOUT_S, what=f"phase {phase}")
        time.sleep(rng.uniform(0.0, 1.0))
        seen |= family(system)
        assert system.launcher is not None
        number_sent = SIGNALS[number % len(SIGNALS)]
        system.launcher.send_signal(number_sent)
        system.wait(300.0)
        print(f"run {number}: {number_sent.name} in phase {phase}, {len(seen)} processes seen")
        until_all_gone(seen)
