# SPDX-License-Identifier: Apache-2.0
"""A run that starts from a version of another one, and gets an opponent frozen at a version of its
own while it trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.e2e.system import System, assert_complete, penstock

RUN = """
name: NAME
models:
  solver: {init: INIT, capacity: 8}
roles: {solver: solver}
sources:
  - {name: train, task: penstock.tasks.reverse}
workflow: duel:play
algorithm: {num_generations: 2}
sampling: {max_tokens: 3}
training: {learning_rate: 1.0e-3, groups_per_batch: 2, steps: 3, lr_scheduler_type: constant}
"""
DUEL = """
import random

async def play(task, ctx):
    asked = [{"role": "user", "content": task.payload["prompt"]}]
    for name in NAMES:
        await ctx.policy(name).chat(asked)
    return random.random()
"""


def write(folder: Path, name: str, init: str, opponent: str = "") -> Path:
    text = RUN.replace("NAME", name).replace("INIT", init)
    if opponent:
        line = f"  opponent: {{init: {opponent}, frozen: true, replicas: 0}}\nroles:"
        text = text.replace("roles:", line).replace("steps: 3", "steps: 5")
    (folder / "run.yaml").write_text(text)
    names = '("solver", "opponent")' if opponent else '("solver",)'
    (folder / "duel.py").write_text(DUEL.replace("NAMES", names))
    return folder / "run.yaml"


def digests(system: System) -> dict[str, str]:
    """Of the weights of each version, by name."""
    told = penstock("weights", "ls", str(system.folder.path), "--json")
    return {
        f"{one['policy']}@{one['number']}": one["weights_digest"]
        for one in json.loads(told.stdout.splitlines()[-1])["versions"]
    }


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_goes_on_from_another_and_meets_its_older_self(tmp_path: Path) -> None:
    first, second = System(tmp_path / "first"), System(tmp_path / "second")
    try:
        first.run_file(write(tmp_path, "first", '"builtin:tiny-qwen3"'), timeout_s=500.0)
        second.run_file(write(tmp_path, "second", "run:first@3"), timeout_s=500.0)
        assert digests(second)["solver@0"] == digests(first)["solver@3"]
        file = write(tmp_path, "second", "run:first@3", opponent="solver@2")
        second.run_file(file, "--accept-changes", timeout_s=500.0)
    finally:
        first.close()
        second.close()
    found = digests(second)
    assert found["opponent@0"] == found["solver@2"] != found["solver@3"]
    assert_complete(second, steps=5)
