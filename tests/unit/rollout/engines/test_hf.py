# SPDX-License-Identifier: Apache-2.0
"""Recorded log-probs against a plain forward pass: no cache, no padding, no batch."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.unit.rollout.engines.tiny_qwen3 import (
    END_ID,
    LETTERS,
    VOCAB_SIZE,
    WINDOW,
    write_snapshot,
)
from transformers import (
    AutoModelForCausalLM,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from penstock.errors import EngineError, RequestRejected
from penstock.gateway.generation import Completion, GenerationRequest
from penstock.rollout.decoding.batch import Batch, Row
from penstock.rollout.decoding.hf_decoder import HfDecoder
from penstock.rollout.engine import SpanLog
from penstock.rollout.engines.hf import HfEngine
from penstock.types import (
    FinishReason,
    PolicyName,
    SamplingSpec,
    Version,
    view_ids,
    view_log_probs,
)

POLICY = PolicyName("policy")
TOLERANCE = 1e-4


def version(number: int) -> Version:
    return Version(policy=POLICY, incarnation=1, number=number)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two different models, selected by version number, without an end token."""
    root = tmp_path_factory.mktemp("snapshots")
    return [write_snapshot(root / str(seed), seed=seed, end_id=VOCAB_SIZE) for seed in (0, 1)]


@pytest.fixture(scope="module")
def models(folders: list[Path]) -> list[Any]:
    return [
        AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        for folder in folders
    ]


def expected_logprobs(
    models: list[Any], prompt: list[int], completion: Completion, spec: SamplingSpec
) -> Iterator[float]:
    """Log-prob of each sampled token, under its span's model and transformers' own warpers."""
    sampled = list(view_ids(completion.sampled_ids))
    ids: Any = torch.tensor([[*prompt, *sampled]])
    with torch.inference_mode():
        logits = [model(input_ids=ids, use_cache=False).logits[0] for model in models]
    for span in completion.spans:
        for at in range(span.start, span.end):
            scores = logits[span.number % 2][len(prompt) + at - 1][None]
            if spec.temperature > 0:
                scores = TemperatureLogitsWarper(float(spec.temperature))(ids, scores)
                if spec.top_k:
                    scores = TopKLogitsWarper(spec.top_k)(ids, scores)
                if spec.top_p < 1:
                    scores = TopPLogitsWarper(spec.top_p)(ids, scores)
            yield float(scores.log_softmax(-1)[0, sampled[at]])


def check(
    models: list[Any], prompt: list[int], completion: Completion, spec: SamplingSpec
) -> float:
    expected = list(expected_logprobs(models, prompt, completion, spec))
    recorded = list(view_log_probs(completion.logprobs))
    assert len(recorded) == len(expected) == len(view_ids(completion.sampled_ids))
    assert [span.start for span in completion.spans[1:]] == [s.end for s in completion.spans[:-1]]
    assert completion.spans[0].start == 0 and completion.spans[-1].end == len(recorded)
    return max(abs(a - b) for a, b in zip(expected, recorded, strict=True))


GRID = [
    SamplingSpec(temperature=temperature, top_p=top_p, top_k=top_k, seed=number)
    for number, (temperature, top_p, top_k) in enumerate(
        itertools.product((0.0, 0.6, 1.0, 1.7), (1.0, 0.7), (0, 4))
    )
]


def prompt_of(length: int) -> list[int]:
    return [(7 * at + 3 * length) % VOCAB_SIZE for at in range(length)]


def make_rows(loop: asyncio.AbstractEventLoop, length: int, num_tokens: int) -> list[Row]:
    """One row per spec of the grid, with prompts of different lengths."""
    rows: list[Row] = []
    for number, spec in enumerate(GRID):
        sampling = SamplingSpec(
            temperature=spec.temperature,
            top_p=spec.top_p,
            top_k=spec.top_k,
            seed=spec.seed + length,
            max_tokens=num_tokens + number % 5,
        )
        prompt = prompt_of(1 + (length + 3 * number) % 23)
        request = GenerationRequest(prompt, sampling, policy=POLICY, session="s")
        rows.append(Row(request, loop.create_future(), SpanLog(version(0))))
    return rows


async def test_members_of_a_group_are_computed_once_until_their_answers_differ(
    folders: list[Path], models: list[Any]
) -> None:
    loop, decoder, sizes = asyncio.get_running_loop(), HfDecoder(torch_threads=1), list[int]()
    staged = decoder.stage(folders[0])
    staged.apply()
    decoder.weights.module.register_forward_pre_hook(
        lambda module, args, given: sizes.append(len(given["input_ids"])), with_kwargs=True
    )
    batch = Batch(decoder)
    batch.snapshot = staged.snapshot
    specs = [SamplingSpec(seed=number // 3, max_tokens=6) for number in range(12)]
    rows = [
        Row(
            GenerationRequest(prompt_of(5), spec, policy=POLICY, session="s"),
            loop.create_future(),
            SpanLog(version(0)),
        )
        for spec in specs
    ]
    assert [batch.admit(row, version(0)) for row in rows] == [None] * len(rows)
    answers: list[tuple[int, ...]] = []
    for step in range(6):
        for row, result in batch.step(rows if step == 0 else []):
            assert isinstance(result, Completion)
            assert check(models, prompt_of(5), result, row.request.sampling) < TOLERANCE
            answers.append(tuple(view_ids(result.sampled_ids)))
    assert len(set(answers)) == 4
    assert sizes == [len({ids[:length] for ids in answers}) for length in range(6)]


async def test_logprobs_across_joins_leaves_and_swaps(
    folders: list[Path], models: list[Any]
) -> None:
    loop = asyncio.get_running_loop()
    decoder = HfDecoder(torch_threads=1)
    batch = Batch(decoder)
    waves = {0: make_rows(loop, 1, 12), 3: make_rows(loop, 9, 4), 7: make_rows(loop, 30, 9)}
    finished: list[tuple[Row, Completion]] = []
    live = version(0)
    for step in range(40):
        if step in (0, 5, 6, 10):
            staged = decoder.stage(folders[[0, 5, 6, 10].index(step) % 2])
            staged.apply()
            batch.snapshot = staged.snapshot
            live = version([0, 5, 6, 10].index(step))
            batch.resume(live)
        admitted = waves.get(step, [])
        assert [batch.admit(row, live) for row in admitted] == [None] * len(admitted)
        if admitted or batch.rows:
            for row, result in batch.step(admitted):
                assert isinstance(result, Completion)
                finished.append((row, result))
    assert len(finished) == 3 * len(GRID)
    assert max(len(completion.spans) for _, completion in finished) == 4
    worst = max(
        check(models, list(row.request.prompt_ids), completion, row.request.sampling)
        for row, completion in finished
    )
    assert worst < TOLERANCE


@pytest.mark.parametrize("given", [[VOCAB_SIZE], [-1], [1] * 5_000])
async def test_given_tokens_that_the_model_cannot_read_are_refused(
    folders: list[Path], given: list[int]
) -> None:
    """They come from a row of strangers; the other rows of the batch go on."""
    decoder = HfDecoder(torch_threads=1)
    batch = Batch(decoder)
    staged = decoder.stage(folders[0])
    staged.apply()
    batch.snapshot = staged.snapshot
    spec = SamplingSpec(max_tokens=4)
    request = GenerationRequest([1], spec, policy=POLICY, session="s", given=given)
    row = Row(request, asyncio.get_running_loop().create_future(), SpanLog(version(0)))
    assert isinstance(batch.admit(row, version(0)), RequestRejected)


async def test_logprobs_through_the_engine_while_versions_change(
    folders: list[Path], models: list[Any]
) -> None:
    engine = HfEngine()
    await engine.load(folders[0], version(0))

    async def ask(number: int) -> tuple[list[int], SamplingSpec, Completion]:
        prompt = prompt_of(1 + 5 * number % 17)
        spec = SamplingSpec(max_tokens=60, seed=number, top_p=0.9)
        answer = await engine(GenerationRequest(prompt, spec, policy=POLICY, session="s"))
        return prompt, spec, answer

    calls = asyncio.gather(*(ask(number) for number in range(24)))
    number = 0
    while not calls.done():
        number += 1
        await engine.load(folders[number % 2], version(number))
    answers = await calls
    await engine.close()
    assert max(len(answer.spans) for _, _, answer in answers) > 1
    assert max(check(models, p, answer, spec) for p, spec, answer in answers) < TOLERANCE


async def test_an_answer_does_not_depend_on_its_batch_mates(folders: list[Path]) -> None:
    engine = HfEngine()
    await engine.load(folders[0], version(0))

    async def ask(number: int) -> bytes:
        spec = SamplingSpec(max_tokens=10, seed=number)
        answer = await engine(
            GenerationRequest(prompt_of(1 + number % 13), spec, policy=POLICY, session="s")
        )
        return answer.sampled_ids

    together = await asyncio.gather(*(ask(number) for number in range(40)))
    alone = [await ask(number) for number in range(40)]
    assert together == alone
    assert len(set(together)) > 30
    await engine.close()


async def test_the_end_token_the_stop_string_and_the_window_end_an_answer(tmp_path: Path) -> None:
    folder = write_snapshot(tmp_path / "ends", seed=0, end_id=END_ID)
    engine = HfEngine()
    await engine.load(folder, version(0))

    async def ask(prompt: list[int], *, seed: int = 0, stop: tuple[str, ...] = ()) -> Completion:
        spec = SamplingSpec(max_tokens=400, temperature=1.5, seed=seed, stop=stop)
        return await engine(GenerationRequest(prompt, spec, policy=POLICY, session="s"))

    answers = [await ask([1, 2, 3], seed=seed) for seed in range(20)]
    texts = [list(view_ids(answer.sampled_ids)) for answer in answers]
    assert {answer.finish for answer in answers} == {FinishReason.STOP}
    assert all(ids.index(END_ID) == len(ids) - 1 for ids in texts)
    seed, ids = max(enumerate(texts), key=lambda pair: len(pair[1]))
    letter = next(token for token in ids[1:] if token < len(LETTERS))
    stopped = await ask([1, 2, 3], seed=seed, stop=("zzz", LETTERS[letter]))
    assert list(view_ids(stopped.sampled_ids)) == ids[: ids.index(letter) + 1] != ids
    assert stopped.finish is FinishReason.STOP
    full = await ask([1] * (WINDOW - 2), seed=1)
    assert full.finish is FinishReason.LENGTH or len(view_ids(full.sampled_ids)) < 2
    assert len(view_ids(full.sampled_ids)) <= 2
    for bad in ([1] * WINDOW, [], [VOCAB_SIZE], [-1]):
        with pytest.raises(EngineError, match="prompt"):
            await ask(bad)
    await engine.close()


async def test_a_snapshot_of_another_model_is_refused(folders: list[Path], tmp_path: Path) -> None:
    engine = HfEngine()
    await engine.load(folders[0], version(0))
    before = await engine(GenerationRequest([1, 2], SamplingSpec(), policy=POLICY, session="s"))
    wider = write_snapshot(tmp_path / "wider", seed=0, hidden_size=64)
    with pytest.raises(EngineError, match="with a wrong shape"):
        await engine.load(wider, version(1))
    less = write_snapshot(tmp_path / "less", seed=1)
    tensors = load_file(less / "model.safetensors")
    tensors["surprise"] = tensors.pop("lm_head.weight")
    save_file(tensors, less / "model.safetensors")
    with pytest.raises(EngineError, match=r"1 tensors missing .*lm_head.*1 unknown .*surprise"):
        await engine.load(less, version(1))
    (less / "model.safetensors").unlink()
    with pytest.raises(EngineError, match="missing"):
        await engine.load(less, version(1))
    assert engine.live == version(0)
    after = await engine(GenerationRequest([1, 2], SamplingSpec(), policy=POLICY, session="s"))
    assert after == before
    await engine.close()


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
async def test_tied_embeddings_are_one_tensor_under_either_name(tmp_path: Path, name: str) -> None:
    folder = write_snapshot(tmp_path, seed=3, is_tied=True, end_id=VOCAB_SIZE)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, folder / "model.safetensors")
    engine = HfEngine()
    await engine.load(folder, version(0))
    spec = SamplingSpec(max_tokens=6)
    answer = await engine(GenerationRequest([1, 2, 3], spec, policy=POLICY, session="s"))
    assert check([model, model], [1, 2, 3], answer, spec) < TOLERANCE
    await engine.close()


async def test_broken_weights_fail_requests_and_the_next_version_heals(
    folders: list[Path], tmp_path: Path
) -> None:
    broken = write_snapshot(tmp_path, seed=0)
    tensors = load_file(broken / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * float("nan")
    save_file(tensors, broken / "model.safetensors")
    engine = HfEngine()
    await engine.load(broken, version(0))
    with pytest.raises(EngineError, match="NaN or infinite"):
        await engine(GenerationRequest([1], SamplingSpec(), policy=POLICY, session="s"))
    await engine.load(folders[0], version(1))
    answer = await engine(GenerationRequest([1], SamplingSpec(), policy=POLICY, session="s"))
    assert answer.spans[0].number == 1
    await engine.close()


async def test_a_burst_of_the_demo_costs_little(folders: list[Path]) -> None:
    """512 requests of 4 and 3 tokens took 25 ms on two cores; the bound only catches a collapse."""
    engine = HfEngine()
    await engine.load(folders[0], version(0))
    spent: list[float] = []
    for _ in range(5):
        began = time.process_time()
        await asyncio.gather(
            *(
                engine(
                    GenerationRequest(
                        [number // 16 % 10, 1, 2, 10],
                        SamplingSpec(max_tokens=3, seed=number),
                        policy=POLICY,
                        session="s",
                    ),
                )
                for number in range(512)
            )
        )
        spent.append(time.process_time() - began)
    await engine.close()
    assert min(spent) < 0.2
