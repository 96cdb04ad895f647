# SPDX-License-Identifier: Apache-2.0
"""`kv: keep`: what the log-probs of an answer are when its keys and values outlive a swap."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.rollout.engines.tiny_qwen3 import VOCAB_SIZE, write_snapshot
from transformers import AutoModelForCausalLM, DynamicCache

from penstock.gateway.generation import Completion, GenerationRequest, TokenChunk
from penstock.rollout.engines.hf import HfEngine
from penstock.types import PolicyName, SamplingSpec, Version, view_ids, view_log_probs

POLICY = PolicyName("policy")
PROMPTS = ([1], [1, 2, 3, 4, 5, 6, 7])
"""Of different lengths, so that one is padded."""


def version(number: int) -> Version:
    return Version(policy=POLICY, incarnation=1, number=number)


async def answers_over_a_swap(
    folders: list[Path], *, keeps_kv: bool
) -> tuple[list[Completion], list[TokenChunk]]:
    engine, heard, chunks = HfEngine(keeps_kv=keeps_kv), asyncio.Event(), list[TokenChunk]()

    def on_chunk(chunk: TokenChunk) -> None:
        chunks.append(chunk)
        if len(chunks) >= 8:
            heard.set()

    await engine.load(folders[0], version(0))
    requests = [
        GenerationRequest(
            prompt,
            SamplingSpec(max_tokens=150, seed=seed),
            policy=POLICY,
            session=str(seed),
            on_chunk=on_chunk,
        )
        for seed, prompt in enumerate(PROMPTS)
    ]
    answering = asyncio.gather(*map(engine, requests))
    await heard.wait()
    await engine.load(folders[1], version(1))
    answers = await answering
    await engine.close()
    return answers, chunks


def mixed_logprobs(models: list[Any], prompt: list[int], answer: Completion) -> list[float]:
    """One token at a time with one cache, each token by the model of its span; the last token
    before a swap is computed by both, and the cache gets that of the new one."""
    ids = [*prompt, *view_ids(answer.sampled_ids)]
    number_at = [span.number for span in answer.spans for _ in range(span.start, span.end)]
    cache, found = DynamicCache(), list[float]()
    with torch.inference_mode():
        for at, token in enumerate(ids[:-1]):
            model = models[number_at[max(0, at + 1 - len(prompt))]]
            output = model(input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            if at + 1 >= len(prompt):
                found.append(float(output.logits[0, -1].log_softmax(-1)[ids[at + 1]]))
    return found


@pytest.mark.parametrize("keeps_kv", [False, True], ids=["drop", "keep"])
async def test_tokens_after_a_swap_see_old_keys_and_values_only_if_kept(
    tmp_path: Path, keeps_kv: bool
) -> None:
    folders = [write_snapshot(tmp_path / str(n), seed=n, end_id=VOCAB_SIZE) for n in (0, 1)]
    auto: Any = AutoModelForCausalLM
    models = [auto.from_pretrained(folder, dtype=torch.float32).eval() for folder in folders]
    answers, chunks = await answers_over_a_swap(folders, keeps_kv=keeps_kv)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert [span.number for span in answer.spans] == [0, 1]
        expected = torch.tensor(mixed_logprobs(models, prompt, answer))
        recorded = torch.tensor(list(view_log_probs(answer.logprobs)))
        off = (expected - recorded).abs()
        before = answer.spans[0].end
        assert off[:before].max() < 1e-4
        if keeps_kv:
            assert off[before:].max() < 1e-4
        else:
            assert off[before:].max() > 0.1, "two unrelated models: old keys would show"
    expected_kv = (1, 0) if keeps_kv else None
    assert {answer.kv for answer in answers} == {chunk.kv for chunk in chunks} == {expected_kv}
