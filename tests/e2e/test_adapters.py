# SPDX-License-Identifier: Apache-2.0
"""A run of two policies that learn adapters of one model: a node serves both from one engine, each
has a trainer, and a version is its adapter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from tests.e2e.system import System, assert_complete, penstock

STEPS = 4
POLICIES = ("solver", "checker")
RUN = """
name: pair
models:
  solver:
    init: "builtin:tiny-qwen3"
    lora: {rank: 2, targets: [q_proj, v_proj]}
    replicas: 1
  checker:
    init: "builtin:tiny-qwen3"
    lora: {rank: 2, targets: [q_proj, v_proj]}
    replicas: 0  # the one node serves both
sources:
  - {name: train, task: penstock.tasks.reverse}
workflow: my_pair:solve_and_check
reward: penstock.tasks.reverse:reward
algorithm: {num_generations: 4}
sampling: {max_tokens: 3}
training: {learning_rate: 1.0e-2, groups_per_batch: 4, steps: 4, checkpoint_every: 2}
"""
MY_PAIR = """
async def solve_and_check(task, ctx):
    asked = [{"role": "user", "content": task.payload["prompt"]}]
    solved = await ctx.policy("solver").chat(asked)
    checked = await ctx.policy("checker").chat(asked)
    return checked.text or solved.text
"""
MOST_OF_FULL = 0.05


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["hf", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_two_adapters_are_trained_and_served_by_one_engine(engine: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "my_pair.py").write_text(MY_PAIR)
    engines = [f"models.{policy}.engine={engine}" for policy in POLICIES]
    system = System(tmp_path / "pair")
    try:
        system.run_file(tmp_path / "run.yaml", *engines, timeout_s=800.0)
    finally:
        system.close()
    assert_complete(system, steps=STEPS)
    logs = "".join(path.read_text() for path in (system.folder.logs / "latest").iterdir())
    assert logs.count("starting vLLM") == (engine == "vllm")
    told = penstock("weights", "ls", str(system.folder.path), "--json")
    versions = json.loads(told.stdout.splitlines()[-1])["versions"]
    for policy in POLICIES:
        numbers = {version["number"] for version in versions if version["policy"] == policy}
        assert numbers == {*range(STEPS + 1)}
        folder = system.folder.checkpoints / policy / f"step_{STEPS}"
        adapter, model = folder / "adapter_model.safetensors", folder / "model.safetensors"
        assert adapter.stat().st_size <= MOST_OF_FULL * model.stat().st_size
        learned = [tensor for name, tensor in load_file(adapter).items() if "lora_B" in name]
        assert learned and all(tensor.any() for tensor in learned)
