# SPDX-License-Identifier: Apache-2.0
"""Patches written into loaded tensors: the same bits as a full load, or a full load after all."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from safetensors.torch import load_file, save_file
from tests.unit.rollout.engines.tiny_qwen3 import VOCAB_SIZE, write_snapshot
from tests.unit.weights.patch_files import patch_between, tensors_of
from transformers import AutoModelForCausalLM

from penstock.errors import EngineError
from penstock.gateway.generation import GenerationRequest
from penstock.rollout.decoding import hf_patch
from penstock.rollout.decoding.hf_decoder import HfDecoder
from penstock.rollout.engines.hf import HfEngine
from penstock.types import PolicyName, SamplingSpec, Version, view_ids, view_log_probs
from penstock.weights.patches import POSITIONS, VALUES

POLICY = PolicyName("policy")
WEIGHTS = "model.safetensors"


def version(number: int) -> Version:
    return Version(policy=POLICY, incarnation=1, number=number)


def write_versions(root: Path, num: int, *, dtype: torch.dtype, is_tied: bool) -> list[Path]:
    """Each changes about 1 % of the elements of every tensor of the one before."""
    folders = [write_snapshot(root / "0", seed=0, end_id=VOCAB_SIZE, is_tied=is_tied)]
    first = load_file(folders[0] / WEIGHTS)
    tensors = {name: tensor.to(dtype) for name, tensor in first.items()}
    draw = torch.Generator().manual_seed(7)
    for number in range(num):
        folder = write_snapshot(root / str(number), seed=0, end_id=VOCAB_SIZE, is_tied=is_tied)
        folders[number:] = [folder]
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        for tensor in tensors.values():
            where = torch.rand(tensor.shape, generator=draw) < 0.01
            where.view(-1)[0] = True
            tensor[where] = (tensor[where] * 1.5 + 0.1).to(dtype)
    return folders


def live_bits(engine: HfEngine) -> dict[str, torch.Tensor]:
    decoder: Any = engine._lane.opened.result()  # pyright: ignore[reportPrivateUsage]
    assert isinstance(decoder, HfDecoder)
    return {name: tensor.clone() for name, tensor in decoder.weights.module.state_dict().items()}


async def full_load(folder: Path) -> dict[str, torch.Tensor]:
    engine = HfEngine()
    await engine.load(folder, version(0))
    bits = live_bits(engine)
    await engine.close()
    return bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
async def test_patched_weights_are_bit_equal(
    tmp_path: Path, dtype: torch.dtype, is_tied: bool
) -> None:
    folders = write_versions(tmp_path / "v", 3, dtype=dtype, is_tied=is_tied)
    engine = HfEngine()
    await engine.load(folders[0], version(0))
    for number in (1, 2):
        patch_between(folders[number - 1], folders[number], tmp_path / "scratch")
        await engine.load(folders[number], version(number))
        assert (engine.num_patches, engine.loaded) == (number, folders[number])
        expected = await full_load(folders[number])
        found = live_bits(engine)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    await engine.load(folders[0], version(3))  # no patch leads back
    assert engine.num_patches == 0
    await engine.close()


async def test_an_answer_that_spans_a_patch_names_both_versions(tmp_path: Path) -> None:
    folders = write_versions(tmp_path / "v", 2, dtype=torch.float32, is_tied=True)
    patch_between(folders[0], folders[1], tmp_path / "scratch")
    auto: Any = AutoModelForCausalLM
    models = [auto.from_pretrained(folder, dtype=torch.float32).eval() for folder in folders]
    engine = HfEngine()
    await engine.load(folders[0], version(0))
    heard, prompt = asyncio.Event(), [1, 2, 3]
    request = GenerationRequest(
        prompt,
        SamplingSpec(max_tokens=200, seed=1),
        policy=POLICY,
        session="s",
        on_chunk=lambda _: heard.set(),
    )
    answering = asyncio.create_task(engine(request))
    await heard.wait()
    await engine.load(folders[1], version(1))
    answer = await answering
    await engine.close()
    assert [span.number for span in answer.spans] == [0, 1]
    sampled = list(view_ids(answer.sampled_ids))
    recorded = list(view_log_probs(answer.logprobs))
    ids: Any = torch.tensor([[*prompt, *sampled]])
    for span in answer.spans:
        with torch.inference_mode():
            logits = models[span.number](input_ids=ids).logits[0].log_softmax(-1)
        for at in range(span.start, span.end):
            off = abs(float(logits[len(prompt) + at - 1, sampled[at]]) - recorded[at])
            assert off < 1e-4, (span, at)


async def test_wrong_bits_lead_to_a_full_load(tmp_path: Path) -> None:
    folders = write_versions(tmp_path / "v", 2, dtype=torch.float32, is_tied=True)
    patch = patch_between(folders[0], folders[1], tmp_path / "scratch")
    tensors = load_file(patch)
    verified = hf_patch.tensors_to_verify([entry.name for entry in tensors_of(folders[1])], 1)
    tensors[VALUES + verified[0]][0] += 1
    _rewrite(patch, tensors)
    engine = HfEngine()
    await engine.load(folders[0], version(0))
    with structlog.testing.capture_logs() as logs:
        await engine.load(folders[1], version(1))
    assert [entry["event"] for entry in logs] == ["wrong bits after a patch, loading full files"]
    assert engine.live == version(1)
    assert (engine.num_patches, engine.loaded) == (0, folders[1])
    expected, found = await full_load(folders[1]), live_bits(engine)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    await engine.close()


@pytest.mark.parametrize("spoil", ["tensor", "element"])
async def test_a_patch_that_does_not_fit_changes_nothing(tmp_path: Path, spoil: str) -> None:
    folders = write_versions(tmp_path / "v", 2, dtype=torch.float32, is_tied=True)
    patch = patch_between(folders[0], folders[1], tmp_path / "scratch")
    tensors = load_file(patch)
    name = "model.norm.weight"
    if spoil == "tensor":
        tensors[VALUES + "model.other"] = torch.ones(3)
    else:
        tensors[POSITIONS + name] = torch.tensor([-1], dtype=torch.int32)
        tensors[VALUES + name] = torch.ones(1)
    _rewrite(patch, tensors)
    decoder = HfDecoder(torch_threads=1)
    decoder.stage(folders[0]).apply()
    with pytest.raises(EngineError, match=r"does not have|outside of"):
        decoder.stage(folders[1], patch)
    engine = HfEngine()
    await engine.load(folders[0], version(0))
    await engine.load(folders[1], version(1))
    assert (engine.live, engine.num_patches) == (version(1), 0)
    await engine.close()


def _rewrite(patch: Path, tensors: dict[str, torch.Tensor]) -> None:
    from safetensors import safe_open

    with safe_open(patch, framework="pt") as file:
        metadata = file.metadata()
    patch.unlink()
    save_file(tensors, patch, metadata=metadata)
