# SPDX-License-Identifier: Apache-2.0
"""One run.yaml; only `engine` is changed by an override, and the audit passes on each."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.e2e.system import PENSTOCK, System

RUN = """
name: any-engine
models:
  policy: {init: "builtin:tiny-qwen3", engine: hf, capacity: 8}
sources:
  - {name: train, task: penstock.tasks.reverse}
workflow: single_turn
reward: chance:reward
algorithm: {name: grpo, num_generations: 2}
sampling: {max_tokens: 8}
training: {learning_rate: 1.0e-3, groups_per_batch: 2, steps: 3, max_staleness: 2}
"""
REWARD = """
import random

def reward(completions, **columns):
    return [random.random() for _ in completions]
"""
"""A script gives every member of a group the same answer: only chance tells them apart."""


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param("scripted", marks=pytest.mark.slow),  # as test_foreign
        pytest.param("hf", marks=pytest.mark.slow),  # as every other run here
        pytest.param("vllm", marks=pytest.mark.vllm),
    ],
)
def test_a_run_may_change_its_engine(tmp_path: Path, engine: str) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "chance.py").write_text(REWARD)
    overrides = (f"models.policy.engine={engine}", f"output_dir={tmp_path}")
    done = subprocess.run(
        [*PENSTOCK, "run", "run.yaml", *overrides, "--headless"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = System(tmp_path / "any-engine").audit()["summary"]
    assert (summary["steps"], summary["lost"], summary["trained_twice"]) == (3, 0, 0)
