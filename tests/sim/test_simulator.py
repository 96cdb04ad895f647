# SPDX-License-Identifier: Apache-2.0
"""Home, partitions, nodes and trainers under faults: every law after every event, and progress once
the faults stop.

PENSTOCK_SIM_SEEDS says how many seeds; PENSTOCK_SIM_SEED=123 runs one and prints all its events.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.sim.plans import random_plan
from tests.sim.simulation import Simulation, run

SEEDS = int(os.environ.get("PENSTOCK_SIM_SEEDS", "100"))
ONE = os.environ.get("PENSTOCK_SIM_SEED")
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("seed", [int(ONE)] if ONE else range(SEEDS))
def test_every_law_holds_and_the_run_gets_on(seed: int) -> None:
    run(seed)


@pytest.mark.parametrize("seed", [3, 4])
def test_a_seed_replays_exactly(seed: int) -> None:
    """In this process, and in another one that orders its sets otherwise."""
    digest = run(seed).engine.digest
    assert run(seed).engine.digest == digest
    assert run(seed + 100).engine.digest != digest
    code = f"from tests.sim.simulation import run; print(run({seed}).engine.digest)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONHASHSEED": "7",
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [digest]


def test_a_named_seed_prints_its_events(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_SIM_SEED", "5")
    log = run(5).engine.log
    assert capsys.readouterr().out.splitlines() == log


def test_blows_of_every_kind_fall() -> None:
    """The faults are there: a simulator that harms nobody proves nothing."""
    seen: set[str] = set()
    words = {
        "killed",
        "disk failed",
        "stands still",
        "clock of",
        "nobody reaches",
        "dies for ever",
        "new life",
        "stopped for two ttl",
        "crashes",
        "second trainer",
        "pauses",
        "fenced",
        "was replaced by",
        "joins",
        "drains",
        "nobody needs it any more",
        "it was declared lost",
    }
    for seed in range(40):
        simulation = Simulation(random_plan(seed))
        try:
            simulation.run()
        finally:
            simulation.close()
        text = "\n".join(simulation.engine.log)
        seen |= {word for word in words if word in text}
        seen |= {"fenced"} if simulation.laws.fenced else set()
        if seen == words:
            return
    raise AssertionError(f"40 seeds without {words - seen}")
