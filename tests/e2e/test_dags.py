# SPDX-License-Identifier: Apache-2.0
"""Runs whose algorithm is their DAG: GRPO and PPO with a critic from two files that differ in their
stages alone, and a user's graph with a reward stage and a loss of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from tests.e2e.system import System, assert_complete

DAGS = Path(__file__).parents[2] / "recipes" / "dags"
TARGET = 0.8
"""The demo's."""
OWN = """
name: own
models:
  policy: {init: "builtin:tiny-qwen3", engine: hf}
sources:
  - {name: train, task: penstock.tasks.reverse}
workflow: single_turn
reward: null
algorithm: {num_generations: 4}
sampling: {max_tokens: 3}
training: {learning_rate: 1.0e-3, groups_per_batch: 4, steps: 3, max_staleness: 1}
pipeline:
  stages:
    - {id: judge, type: infer, role: reward, fn: "my_dag:judge", place: [cpu], reads: [turns],
       writes: [reward]}
    - {id: shape, type: compute, role: shaping, fn: "my_dag:shape", reads: [reward],
       writes: [shaped], options: {factor: 2.0}}
    - {id: advantage, type: compute, role: advantage, reads: [shaped], rename: {shaped: reward},
       writes: [advantage]}
    - {id: train, type: train, role: actor, fn: "my_dag:plain", reads: [turns, advantage]}
"""
MY_DAG = """
from collections.abc import Mapping
from typing import Any
from penstock.trainer.losses.tokens import TokenLoss

def judge(trajectory) -> Mapping[str, float]:
    return {"reward": sum(trajectory.turns[0].sampled_ids) % 7 / 7}

def shape(layout, *, reward, factor: float) -> Mapping[str, Any]:
    return {"shaped": factor * reward}

def plain(tokens) -> TokenLoss:
    loss = -tokens.logprobs_K * tokens.advantages_K
    return TokenLoss(loss_K=loss, told={"my/loss": loss.detach()})
"""


def test_the_two_files_differ_in_their_stages_alone() -> None:
    grpo, ppo = (yaml.safe_load((DAGS / f"{name}.yaml").read_text()) for name in ("grpo", "ppo"))
    assert {key for key in grpo.keys() | ppo.keys() if grpo.get(key) != ppo.get(key)} == {
        "name",
        "pipeline",
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_a_run_defined_by_its_dag_reaches_the_target(name: str, tmp_path: Path) -> None:
    system = System(tmp_path / f"dag-{name}")
    try:
        system.run_file(DAGS / f"{name}.yaml", timeout_s=1500.0)
    finally:
        system.close()
    assert_complete(system, steps=70)
    summary = system.audit()["summary"]
    assert summary["reward_first"] <= 0.35
    assert summary["reward_last"] >= TARGET
    last = json.loads(system.folder.metrics.read_text().splitlines()[-1])
    assert ("critic/value" in last) == (name == "ppo")


@pytest.mark.slow
def test_a_users_graph_needs_no_change_of_penstock(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(OWN)
    (tmp_path / "my_dag.py").write_text(MY_DAG)
    system = System(tmp_path / "own")
    try:
        system.run_file(tmp_path / "run.yaml", timeout_s=900.0)
    finally:
        system.close()
    assert_complete(system, steps=3)
    lines = [json.loads(line) for line in system.folder.metrics.read_text().splitlines()]
    assert all("my/loss" in line and "seconds/stage/shape" in line for line in lines)
    assert any(0 < line["reward/mean"] < 1 for line in lines), "what the judge gave"
