# SPDX-License-Identifier: Apache-2.0
"""One GPU: a step in bfloat16, its memory, and vLLM with CUDA graphs, a swap and router replay."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.gpu.machines import ENGINE, needs_gpus, needs_vllm
from tests.gpu.processes import run_alone

from penstock.devices import visible_devices
from penstock.gateway.generation import Completion, GenerationRequest
from penstock.rollout.engines.vllm import ChildServer, VllmEngine
from penstock.types import PolicyName, SamplingSpec, Turn, Version, view_ids, view_log_probs

pytestmark = needs_gpus(1)
POLICY = PolicyName("policy")
PROMPT = list(range(20, 60))
LEAST_SHARE, MOST_SHARE = 0.85, 1.5
"""Of the predicted memory: a step also holds activations, and AdamW's update temporary copies."""
TOLERANCE = 0.2
"""In log-probability, bfloat16 against float32."""

Record = Callable[[str, object], None]


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What three steps of a model of 0.27 billion parameters saw."""
    from tests.gpu.training_jobs import LARGE, write_model

    return run_alone("bf16", write_model(tmp_path_factory.mktemp("large"), LARGE))


def test_every_matmul_of_a_step_is_bfloat16(step: dict[str, Any], record_property: Record) -> None:
    record_property("matmuls", step["matmuls"])
    assert step["device"] != "cpu"
    assert set(step["matmuls"]) == {"bfloat16"}


def test_memory_of_a_step_is_as_planned(step: dict[str, Any], record_property: Record) -> None:
    share = step["peak_bytes"] / step["predicted_bytes"]
    record_property("peak_gb", round(step["peak_bytes"] / 1e9, 3))
    record_property("predicted_gb", round(step["predicted_bytes"] / 1e9, 3))
    assert LEAST_SHARE <= share <= MOST_SHARE, f"{share:.2f} of what `penstock plan` predicts"


@needs_vllm()
def test_vllm_decodes_with_cuda_graphs_and_swaps(tmp_path: Path, record_property: Record) -> None:
    found = asyncio.run(_swap(tmp_path))
    for name, value in found.items():
        record_property(name, value)


async def _swap(root: Path) -> dict[str, float]:
    """Load one version, ask, load another, ask: each answer agrees with the weights it names."""
    from tests.unit.rollout.engines.byte_qwen3 import write_snapshot

    folders = [write_snapshot(root / "versions" / str(seed), seed=seed) for seed in (0, 1)]
    devices = (visible_devices()[0].id,)
    options = ("--gpu-memory-utilization", "0.3")
    engine = VllmEngine(ChildServer(ENGINE, options, devices=devices, state_dir=root / "state"))
    figures: dict[str, float] = {}
    try:
        for number, folder in enumerate(folders):
            await engine.load(folder, Version(policy=POLICY, incarnation=1, number=number))
            answer = await _ask(engine)
            assert {span.number for span in answer.spans} == {number}
            worst = _worst_difference(folder, answer)
            figures[f"logprob_error_{number}"] = round(worst, 5)
            assert worst < TOLERANCE
        figures["pause_s"] = round(engine.paused_s, 4)
        logs = "".join(path.read_text() for path in (root / "state").glob("*.log"))
    finally:
        await engine.close()
    assert "enforce_eager=False" in logs and "graph" in logs.lower(), "CUDA graphs were captured"
    return figures


@needs_vllm()
def test_vllm_is_patched_in_place(tmp_path: Path, record_property: Record) -> None:
    for name, value in asyncio.run(_patch(tmp_path)).items():
        record_property(name, value)


async def _patch(root: Path) -> dict[str, float]:
    """Two versions that differ in 1 % of their elements: the second as a patch, then in full."""
    from safetensors.torch import load_file, save_file
    from tests.unit.rollout.engines.byte_qwen3 import write_snapshot
    from tests.unit.weights.patch_files import patch_between

    folders = [write_snapshot(root / "versions" / str(number), seed=0) for number in range(3)]
    for number in (1, 2):
        tensors = load_file(folders[0] / "model.safetensors")
        for tensor in tensors.values():
            tensor.view(-1)[:: 100 + number] += 0.1
        save_file(tensors, folders[number] / "model.safetensors", metadata={"format": "pt"})
    patch_between(folders[0], folders[1], root / "scratch")
    devices = (visible_devices()[0].id,)
    options = ("--gpu-memory-utilization", "0.3")
    engine = VllmEngine(ChildServer(ENGINE, options, devices=devices, state_dir=root / "state"))
    paused_s: list[float] = []
    try:
        for number, folder in enumerate(folders):
            await engine.load(folder, Version(policy=POLICY, incarnation=1, number=number))
            assert engine.full_model is not None
            assert engine.full_model.num_patches == (number == 1), "patched once, then in full"
            paused_s.append(engine.paused_s)
            assert _worst_difference(folder, await _ask(engine)) < TOLERANCE
    finally:
        await engine.close()
    return {"patch_pause_s": round(paused_s[1], 4), "full_pause_s": round(paused_s[2], 4)}


async def _ask(engine: VllmEngine) -> Completion:
    spec = SamplingSpec(max_tokens=64, seed=3)
    return await engine(GenerationRequest(PROMPT, spec, policy=POLICY, session="s"))


def _worst_difference(folder: Path, answer: Completion) -> float:
    """Of the recorded log-probs from those of the trainer's model in float32."""
    import torch

    from penstock.trainer.model_folders import load_model

    ids = view_ids(answer.sampled_ids).tolist()
    with torch.no_grad():
        logits = load_model(folder).eval()(torch.tensor([[*PROMPT, *ids]])).logits[0]
    logprobs = torch.log_softmax(logits[len(PROMPT) - 1 : -1].float(), -1)
    expected = logprobs[range(len(ids)), torch.tensor(ids)]
    return float((expected - torch.tensor(view_log_probs(answer.logprobs))).abs().max())


# --- a mixture of experts -------------------------------------------------------------------------

NUM_ANSWERS = 16


@needs_vllm()
def test_router_replay_narrows_the_gap_to_vllm(tmp_path: Path, record_property: Record) -> None:
    """Log-probs of vLLM against the trainer's, with its own choice of experts and with vLLM's."""
    from tests.unit.trainer.test_router_replay import BF16, actor_of, gap, shape_of_turns

    folder = _write_mixture(tmp_path / "versions" / "0")
    turns = asyncio.run(_sampled_turns(folder, tmp_path / "state"))
    actor = actor_of(folder, BF16)
    before, after = (gap(actor, turns, shape) for shape in (None, shape_of_turns(turns)))
    record_property("gap_before", round(before, 5))
    record_property("gap_after", round(after, 5))
    assert after < before


def _write_mixture(folder: Path) -> Path:
    import torch
    from tests.unit.rollout.engines.byte_qwen3 import write_snapshot
    from transformers import AutoConfig, AutoModelForCausalLM

    dense = write_snapshot(folder, seed=0)
    own: Any = AutoConfig.from_pretrained(dense)
    changes = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64}
    kept = {name: value for name, value in own.to_dict().items() if name != "model_type"}
    configs: Any = AutoConfig
    config = configs.for_model(
        "qwen3_moe", **{**kept, **changes, "architectures": ["Qwen3MoeForCausalLM"]}
    )
    torch.manual_seed(0)
    maker: Any = AutoModelForCausalLM
    (folder / "model.safetensors").unlink()
    maker.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


async def _sampled_turns(folder: Path, state: Path) -> list[Turn]:
    from dataclasses import replace

    from tests.unit.trainer.doubles import make_turn

    options = ("--gpu-memory-utilization", "0.3")
    devices = (visible_devices()[0].id,)
    server = ChildServer(ENGINE, options, devices=devices, state_dir=state, records_experts=True)
    engine = VllmEngine(server, records_experts=True)
    try:
        await engine.load(folder, Version(policy=POLICY, incarnation=1, number=0))
        requests = [
            GenerationRequest(
                PROMPT, SamplingSpec(max_tokens=64, seed=seed), policy=POLICY, session=str(seed)
            )
            for seed in range(NUM_ANSWERS)
        ]
        answers = [await engine(request) for request in requests]
    finally:
        await engine.close()
    assert all(one.experts is not None for one in answers)
    return [
        replace(
            make_turn(
                PROMPT,
                view_ids(one.sampled_ids).tolist(),
                logprobs=view_log_probs(one.logprobs).tolist(),
            ),
            experts=one.experts,
        )
        for one in answers
    ]
