# SPDX-License-Identifier: Apache-2.0
"""Evaluations in a run of real processes: before the first step, every five, after the last; and
kills in the middle change no figure."""

from __future__ import annotations

import json
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.system import PENSTOCK, System, assert_complete, until

pytestmark = pytest.mark.timeout(1200)

RUN = """
name: evaluated
deterministic: true
models:
  policy: {init: "builtin:tiny-qwen3", capacity: 8}
sources:
  - {name: train, task: penstock.tasks.reverse}
reward: penstock.tasks.reverse:reward
algorithm: {name: grpo, num_generations: 4}
sampling: {max_tokens: 4}
training: {learning_rate: 1.0e-2, groups_per_batch: 4, steps: 6, max_staleness: 0}
eval:
  every: 5
  samples: 2
  temperature: 0.6
  suites: [{name: held_out, task: penstock.tasks.reverse, limit: 24}]
"""
STEPS, QUESTIONS, SAMPLES = 6, 24, 2


def start(folder: Path, *words: str) -> System:
    folder.mkdir(exist_ok=True)
    (folder / "run.yaml").write_text(RUN)
    system = System(folder / "evaluated")
    command = [*PENSTOCK, "run", "run.yaml", f"output_dir={folder}", "--headless", *words]
    with (folder / "evaluated.out").open("ab") as out:
        system.launcher = subprocess.Popen(command, cwd=folder, stdout=out, stderr=out)
    return system


def results(system: System) -> dict[str, Any]:
    """The stored evaluations, without the ids of rows: a lost attempt is another row."""
    found: dict[str, Any] = {}
    for path in sorted((system.folder.path / "evaluations").glob("*@*.json")):
        found[path.stem] = json.loads(path.read_bytes())
        for suite in found[path.stem]["suites"]:
            for answer in suite["answers"]:
                del answer["row"]
    return found


def num_answered(system: System) -> int:
    """Questions that have their answers, by the ledger."""
    path = system.folder.path / "ledger" / "ledger.db"
    if not path.exists():
        return 0
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as ledger:
        try:
            return int(ledger.execute("SELECT count(*) FROM evaluated").fetchone()[0])
        except sqlite3.OperationalError:  # not created yet
            return 0


def assert_evaluated(system: System) -> dict[str, Any]:
    found = results(system)
    assert [*found] == ["policy@0", "policy@5", "policy@6"]
    for name, one in found.items():
        [suite] = one["suites"]
        assert f"policy@{suite['version']}" == name and suite["version"] == one["step"]
        assert len(suite["answers"]) == QUESTIONS * SAMPLES
        assert len({answer["seed"] for answer in suite["answers"]}) == QUESTIONS * SAMPLES
        assert all(answer["score"] is not None for answer in suite["answers"])
    best = json.loads((system.folder.path / "evaluations" / "best.json").read_bytes())
    assert best["policy"] == "policy" and best["version"] in (0, 5, 6)
    lines = [json.loads(line) for line in system.folder.metrics.read_text().splitlines()]
    evaluated = [line["number"] for line in lines if "eval/held_out/avg" in line]
    assert evaluated == [0, 5, 6], "a line of metrics for each, once"
    assert_complete(system, steps=STEPS)
    return found


def test_before_the_first_step_every_five_and_after_the_last(tmp_path: Path) -> None:
    system = start(tmp_path)
    try:
        assert system.wait(600.0) == 0, system.output()
        assert_evaluated(system)
    finally:
        system.close()


@pytest.mark.slow
def test_kills_in_the_middle_change_no_figure(tmp_path: Path) -> None:
    calm, system = start(tmp_path / "calm"), None
    try:
        assert calm.wait(600.0) == 0, calm.output()
        system = start(tmp_path / "killed")
        for service, answered in (
            ("dataflow", 3),
            ("node-0", 10),
            ("trainer-policy", QUESTIONS + 3),
            ("weights", QUESTIONS + 10),
            ("dataflow", 2 * QUESTIONS + 3),
        ):
            until(
                lambda num=answered: num_answered(system) >= num,
                timeout_s=600.0,
                what=f"{answered} questions answered",
            )
            system.kill(service)
        assert system.wait(600.0) == 0, system.output()
        assert assert_evaluated(system) == assert_evaluated(calm)
    finally:
        calm.close()
        if system is not None:
            system.close()
