# SPDX-License-Identifier: Apache-2.0
"""The SGLang engine against a fake server; never tested with a real one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.contract.dataflow_server import serving
from tests.contract.fake_sglang_server import SglangDouble, token
from tests.contract.fake_vllm_server import weights_of
from tests.contract.test_engines_vllm import LONG, POLICY, PROMPT, numbers, version, write_folder
from tests.contract.test_engines_vllm_lora import write_base
from tests.contract.test_engines_vllm_lora import write_version as write_adapter_version

from penstock.errors import EngineError, RequestRejected
from penstock.gateway.generation import Completion, GenerationRequest, TokenChunk
from penstock.rollout.engines import sglang
from penstock.rollout.engines.sglang import SglangEngine
from penstock.types import SamplingSpec, view_ids


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return [write_folder(tmp_path / "versions" / str(n), n) for n in range(3)]


@pytest.fixture
def double() -> SglangDouble:
    return SglangDouble()


@pytest.fixture
async def engine(double: SglangDouble) -> AsyncIterator[SglangEngine]:
    with serving(double.app()) as url:
        engine = SglangEngine(url)
        yield engine
        await engine.close()


async def ask(
    engine: SglangEngine, spec: SamplingSpec, heard: list[TokenChunk] | None = None
) -> Completion:
    on_chunk = None if heard is None else heard.append
    return await engine(
        GenerationRequest(PROMPT, spec, policy=POLICY, session="s", on_chunk=on_chunk)
    )


def check_tokens(completion: Completion, folders: list[Path]) -> None:
    expected = [
        token(weights_of(folders[number % 3]), len(PROMPT) + at)
        for at, number in enumerate(numbers(completion))
    ]
    assert list(view_ids(completion.sampled_ids)) == expected


@pytest.mark.parametrize("is_incremental", [False, True])
async def test_answers_go_on_over_swaps_and_every_token_has_its_version(
    engine: SglangEngine, double: SglangDouble, folders: list[Path], is_incremental: bool
) -> None:
    double.token_s, double.is_incremental = 0.004, is_incremental
    await engine.load(folders[0], version(0))
    heard: list[list[TokenChunk]] = [[] for _ in range(3)]
    spec = SamplingSpec(max_tokens=LONG)
    calls = [asyncio.create_task(ask(engine, spec, pieces)) for pieces in heard]
    calls += [asyncio.create_task(ask(engine, spec)) for _ in range(3)]
    for number in range(1, 5):
        await asyncio.sleep(0.03)
        await engine.load(folders[number % 3], version(number))
    answers = await asyncio.gather(*calls)
    for answer in answers:
        assert len(view_ids(answer.sampled_ids)) == LONG
        assert len(answer.spans) >= 3
        check_tokens(answer, folders)
    for answer, pieces in zip(answers, heard, strict=False):
        told = [(chunk.version.number, i) for chunk in pieces for i in chunk.sampled_ids]
        assert told == list(zip(numbers(answer), view_ids(answer.sampled_ids), strict=True))


async def test_an_adapter_is_refused(
    engine: SglangEngine, double: SglangDouble, tmp_path: Path
) -> None:
    folder = write_adapter_version(write_base(tmp_path / "base", 1), tmp_path / "0", 2)
    with pytest.raises(EngineError, match="set engine: hf or vllm"):
        await engine.load(folder, version(0))
    assert engine.live is None


async def test_an_answer_with_a_stop_string_begins_anew(
    engine: SglangEngine, double: SglangDouble, folders: list[Path]
) -> None:
    double.token_s = 0.004
    await engine.load(folders[0], version(0))
    call = asyncio.create_task(ask(engine, SamplingSpec(max_tokens=LONG, stop=("x",)), []))
    await asyncio.sleep(0.05)
    await engine.load(folders[1], version(1))
    answer = await call
    assert set(numbers(answer)) == {1}
    check_tokens(answer, folders)
    assert double.bodies[-1]["input_ids"] == PROMPT


async def test_an_answer_that_is_not_given_back_is_taken_back(
    engine: SglangEngine,
    double: SglangDouble,
    folders: list[Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sglang, "ABORT_S", 0.1)
    double.token_s, double.keeps_ended = 0.004, True
    await engine.load(folders[0], version(0))
    call = asyncio.create_task(ask(engine, SamplingSpec(max_tokens=LONG), []))
    await asyncio.sleep(0.05)
    for _ in range(500):  # the fake server needs a moment to notice the disconnect
        try:
            await engine.load(folders[1], version(1))
            break
        except EngineError:
            await asyncio.sleep(0.02)
    answer = await call
    check_tokens(answer, folders)
    assert len(view_ids(answer.sampled_ids)) == LONG


async def test_what_its_log_probs_do_not_know_is_refused(
    engine: SglangEngine, double: SglangDouble, folders: list[Path]
) -> None:
    double.is_raw = True
    with pytest.raises(EngineError, match="do not match the sampling distribution"):
        await engine.load(folders[0], version(0))
    assert engine.live is None
    double.is_raw = False
    await engine.load(folders[0], version(0))
    for spec in (SamplingSpec(top_p=0.9), SamplingSpec(top_k=5), SamplingSpec(min_p=0.1)):
        with pytest.raises(RequestRejected, match="set engine: vllm"):
            await ask(engine, spec)


async def test_a_load_that_fails_puts_the_old_weights_back_or_answers_nobody(
    engine: SglangEngine, double: SglangDouble, folders: list[Path]
) -> None:
    await engine.load(folders[0], version(0))
    double.fail_loads = 1
    with pytest.raises(EngineError, match="half of it"):
        await engine.load(folders[1], version(1))
    assert engine.live == version(0)
    check_tokens(await ask(engine, SamplingSpec()), folders)
    double.fail_loads = 2
    with pytest.raises(EngineError, match="half of it"):
        await engine.load(folders[1], version(1))
    assert engine.live is None
    with pytest.raises(EngineError, match="no version"):
        await ask(engine, SamplingSpec())
    await engine.load(folders[1], version(1))
    check_tokens(await ask(engine, SamplingSpec()), folders)


async def test_close_fails_what_is_running(
    engine: SglangEngine, double: SglangDouble, folders: list[Path]
) -> None:
    await engine.load(folders[0], version(0))
    double.token_s = 0.05
    call = asyncio.create_task(ask(engine, SamplingSpec(max_tokens=LONG)))
    await asyncio.sleep(0.1)
    await engine.close()
    with pytest.raises(EngineError):
        await call
    with pytest.raises(EngineError, match="closed"):
        await ask(engine, SamplingSpec())
