# SPDX-License-Identifier: Apache-2.0
"""One contract for every engine and for pools: spans, chunks, swaps, damaged snapshots, seeds,
closing, names."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from penstock.errors import ConfigError, EngineError, RequestRejected
from penstock.gateway.generation import Completion, GenerationRequest, TokenChunk
from penstock.plugins import builtin_names
from penstock.rollout.engine import Engine, EngineSettings, Pausable
from penstock.rollout.engine_pool import EnginePool
from penstock.rollout.engines import find_engine
from penstock.rollout.engines.hf import HfEngine
from penstock.rollout.engines.scripted import ScriptedEngine
from penstock.rollout.engines.simulated import LoadProfile, SimulatedEngine
from penstock.rollout.engines.vllm import VllmEngine
from penstock.types import (
    FinishReason,
    PolicyName,
    SamplingSpec,
    Version,
    view_ids,
    view_log_probs,
)

pytest.importorskip("transformers")

POLICY = PolicyName("policy")
PROMPT = [1, 2, 3, 10]


def long_script(prompt_ids: object, sampling: SamplingSpec) -> list[int]:
    return [(sampling.seed + at) % 11 for at in range(sampling.max_tokens)]


def simulated() -> SimulatedEngine:
    return SimulatedEngine(LoadProfile(first_token_s=0.001, token_s=0.001), seed=5)


MAKERS: dict[str, Callable[[], Engine]] = {
    "scripted": lambda: ScriptedEngine(long_script),
    "simulated": simulated,
    "hf": HfEngine,
    "pool of simulated": lambda: EnginePool([simulated() for _ in range(2)]),
}


def version(number: int) -> Version:
    return Version(policy=POLICY, incarnation=1, number=number)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    from tests.unit.rollout.engines.tiny_qwen3 import VOCAB_SIZE, write_snapshot

    root = tmp_path_factory.mktemp("snapshots")
    return [write_snapshot(root / str(seed), seed=seed, end_id=VOCAB_SIZE) for seed in (0, 1)]


@pytest.fixture(params=MAKERS)
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    engine = MAKERS[request.param]()
    yield engine
    await engine.close()


async def ask(
    engine: Engine, *, seed: int = 0, num_tokens: int = 5, prompt: list[int] = PROMPT
) -> Completion:
    spec = SamplingSpec(max_tokens=num_tokens, seed=seed)
    return await engine(GenerationRequest(prompt, spec, policy=POLICY, session="s"))


async def pause(engine: Engine) -> None:
    """Long enough for a few tokens; a script returns one per event-loop iteration."""
    if isinstance(engine, ScriptedEngine):
        for _ in range(5):
            await asyncio.sleep(0)
    else:
        await asyncio.sleep(0.005)


def check(completion: Completion) -> None:
    num_tokens = len(view_ids(completion.sampled_ids))
    logprobs = list(view_log_probs(completion.logprobs))
    assert len(logprobs) == num_tokens
    assert all(logprob <= 0 for logprob in logprobs)
    covered = [at for span in completion.spans for at in range(span.start, span.end)]
    assert covered == list(range(num_tokens))
    assert all(span.start < span.end for span in completion.spans)
    for one, two in zip(completion.spans, completion.spans[1:], strict=False):
        assert (one.incarnation, one.number) != (two.incarnation, two.number)


async def test_nothing_is_served_before_a_first_load(engine: Engine) -> None:
    assert engine.live is None
    with pytest.raises(EngineError, match="no version"):
        await ask(engine)


async def test_an_answer_is_covered_by_the_live_version(
    engine: Engine, folders: list[Path]
) -> None:
    await engine.load(folders[0], version(0))
    assert engine.live == version(0)
    completion = await ask(engine)
    check(completion)
    assert len(view_ids(completion.sampled_ids)) == 5
    assert completion.finish is FinishReason.LENGTH
    await engine.load(folders[1], version(4))
    assert engine.live == version(4)
    assert [span.number for span in (await ask(engine)).spans] == [4]


async def test_pieces_are_the_answer_as_it_is_sampled(engine: Engine, folders: list[Path]) -> None:
    """Also during swaps: every chunk has one version, in order and without gaps."""
    await engine.load(folders[0], version(0))
    heard: list[TokenChunk] = []
    spec = SamplingSpec(max_tokens=150, seed=3)
    call = asyncio.create_task(
        engine(GenerationRequest(PROMPT, spec, policy=POLICY, session="s", on_chunk=heard.append))
    )
    number, num_early = 0, 0
    while not call.done():
        num_early = len(heard)
        number += 1
        await engine.load(folders[number % 2], version(number))
        await pause(engine)
    completion = await call
    assert 0 < num_early < len(heard), "nothing was told before the end"
    assert [i for chunk in heard for i in chunk.sampled_ids] == list(
        view_ids(completion.sampled_ids)
    )
    told = [logprob for chunk in heard for logprob in chunk.logprobs]
    assert told == pytest.approx(list(view_log_probs(completion.logprobs)))
    by_token = [chunk.version.number for chunk in heard for _ in chunk.sampled_ids]
    spans = [span.number for span in completion.spans for _ in range(span.start, span.end)]
    assert by_token == spans
    assert len(completion.spans) >= 2


async def test_nobody_hears_the_pieces_of_another(engine: Engine, folders: list[Path]) -> None:
    await engine.load(folders[0], version(0))
    heard: dict[int, list[int]] = {seed: [] for seed in range(8)}

    async def listen_to(seed: int) -> Completion:
        spec = SamplingSpec(max_tokens=3 + seed, seed=seed)
        return await engine(
            GenerationRequest(
                PROMPT,
                spec,
                policy=POLICY,
                session=str(seed),
                on_chunk=lambda chunk: heard[seed].extend(chunk.sampled_ids),
            ),
        )

    answers = await asyncio.gather(*map(listen_to, heard))
    assert [list(view_ids(answer.sampled_ids)) for answer in answers] == list(heard.values())


async def test_another_policy_is_refused(engine: Engine, folders: list[Path]) -> None:
    await engine.load(folders[0], version(0))
    with pytest.raises(RequestRejected, match="serves 'policy', not 'judge'"):
        await engine(
            GenerationRequest(PROMPT, SamplingSpec(), policy=PolicyName("judge"), session="s")
        )


async def test_a_swap_in_mid_answer_gives_two_spans(engine: Engine, folders: list[Path]) -> None:
    await engine.load(folders[0], version(0))
    call = asyncio.create_task(ask(engine, num_tokens=150))
    number = 0
    while not call.done():
        number += 1
        await engine.load(folders[number % 2], version(number))
        await pause(engine)
    completion = await call
    check(completion)
    assert len(view_ids(completion.sampled_ids)) == 150
    numbers = [span.number for span in completion.spans]
    assert len(numbers) >= 2
    assert numbers == sorted(numbers)


async def test_versions_that_are_adapters_are_versions_like_any_other(
    engine: Engine, folders: list[Path], tmp_path: Path
) -> None:
    """A base with an adapter; engines without a model ignore it."""
    from tests.unit.rollout.engines.lora_snapshots import write_version

    adapted = [write_version(folders[0], tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    await engine.load(adapted[0], version(0))
    call = asyncio.create_task(ask(engine, num_tokens=60))
    number = 0
    while not call.done():
        number += 1
        await engine.load(adapted[number % 2], version(number))
        await pause(engine)
    completion = await call
    check(completion)
    assert len(completion.spans) >= 2
    path = adapted[0] / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(EngineError, match="damaged"):
        await engine.load(adapted[0], version(number + 1))
    assert engine.live == version(number)


async def test_loading_the_same_version_again_keeps_one_span(
    engine: Engine, folders: list[Path]
) -> None:
    await engine.load(folders[0], version(0))
    call = asyncio.create_task(ask(engine, num_tokens=60))
    while not call.done():
        await engine.load(folders[0], version(0))
        await pause(engine)
    completion = await call
    check(completion)
    assert len(completion.spans) == 1


@pytest.mark.parametrize("damage", ["cut tensors", "no config", "broken config", "gone"])
async def test_a_damaged_folder_keeps_the_old_version(
    engine: Engine, folders: list[Path], tmp_path: Path, damage: str
) -> None:
    await engine.load(folders[0], version(0))
    before = await ask(engine, seed=9)
    folder = tmp_path / "damaged"
    shutil.copytree(folders[1], folder)
    if damage == "cut tensors":
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "no config":
        (folder / "config.json").unlink()
    elif damage == "broken config":
        (folder / "config.json").write_text("{")
    else:
        shutil.rmtree(folder)
    with pytest.raises(EngineError):
        await engine.load(folder, version(1))
    assert engine.live == version(0)
    assert await ask(engine, seed=9) == before


async def test_seeds_are_reproducible_alone_and_in_a_crowd(
    engine: Engine, folders: list[Path]
) -> None:
    await engine.load(folders[0], version(0))
    alone = [await ask(engine, seed=seed) for seed in range(4)]
    crowd = await asyncio.gather(*(ask(engine, seed=seed % 4) for seed in range(32)))
    for number, completion in enumerate(crowd):
        assert completion.sampled_ids == alone[number % 4].sampled_ids
    assert len({completion.sampled_ids for completion in alone}) == 4


async def test_many_requests_at_once(engine: Engine, folders: list[Path]) -> None:
    await engine.load(folders[0], version(0))
    answers = await asyncio.gather(
        *(
            ask(engine, seed=n, num_tokens=1 + n % 7, prompt=[n % 11] * (1 + n % 29))
            for n in range(1500)
        )
    )
    for number, completion in enumerate(answers):
        check(completion)
        assert len(view_ids(completion.sampled_ids)) == 1 + number % 7


async def test_a_cancelled_request_disturbs_nobody(engine: Engine, folders: list[Path]) -> None:
    await engine.load(folders[0], version(0))
    expected = await ask(engine, seed=1, num_tokens=150)
    calls = [asyncio.create_task(ask(engine, seed=n, num_tokens=150)) for n in range(4)]
    await pause(engine)
    calls[0].cancel()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert not isinstance(results[1], BaseException)
    assert results[1].sampled_ids == expected.sampled_ids


async def test_close_fails_what_is_running_and_what_comes(
    engine: Engine, folders: list[Path]
) -> None:
    """No answer may end before: `hf` has a window of 512 tokens, `simulated` a second per 1000."""
    await engine.load(folders[0], version(0))
    num_tokens = 400 if isinstance(engine, HfEngine) else 20_000
    calls = [asyncio.create_task(ask(engine, seed=n, num_tokens=num_tokens)) for n in range(5)]
    await pause(engine)
    late = asyncio.create_task(ask(engine, num_tokens=num_tokens))
    await asyncio.sleep(0)
    await engine.close()
    for result in await asyncio.gather(*calls, late, return_exceptions=True):
        assert isinstance(result, EngineError), result
    assert engine.live is None
    with pytest.raises(EngineError, match="closed"):
        await ask(engine)
    await engine.close()


async def test_engines_are_found_by_the_names_of_their_modules() -> None:
    assert builtin_names("penstock.rollout.engines") == (
        *("hf", "scripted", "sglang", "simulated", "vllm"),
    )
    for name, expected in (
        ("hf", HfEngine),
        ("simulated", SimulatedEngine),
        ("scripted", ScriptedEngine),
        ("vllm", VllmEngine),
    ):
        engine = find_engine(name).build(EngineSettings())
        assert isinstance(engine, expected)
        await engine.close()
    sglang = find_engine("sglang").build(EngineSettings(url="http://127.0.0.1:1"))
    await sglang.close()
    with pytest.raises(ConfigError, match='did you mean "sglang"'):
        find_engine("sgl")
    with pytest.raises(ConfigError, match="set sglang"):
        find_engine("sglang").build(EngineSettings())


class CustomEngine(ScriptedEngine):
    """An engine as a user would write it, outside penstock."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__([[settings.seed]])


async def test_a_custom_engine_is_named_by_module_and_class(folders: list[Path]) -> None:
    engine = find_engine(f"{__name__}:CustomEngine").build(EngineSettings(seed=7))
    await engine.load(folders[0], version(0))
    assert list(view_ids((await ask(engine)).sampled_ids)) == [7]
    with pytest.raises(ConfigError, match="not callable"):
        find_engine(f"{__name__}:PROMPT")
    with pytest.raises(ConfigError, match="missing_module"):
        find_engine("missing_module:Engine")


def test_an_engine_type_says_what_config_may_combine_it_with() -> None:
    names = builtin_names("penstock.rollout.engines")
    types = {name: find_engine(name) for name in names}
    assert {name for name in names if types[name].serves_adapters} == {
        *("hf", "scripted", "simulated", "vllm")
    }
    assert {name for name in names if types[name].is_reproducible} == {"hf", "scripted"}


async def test_simulated_failures_and_lengths_follow_the_declared_load(
    folders: list[Path],
) -> None:
    engine = SimulatedEngine(LoadProfile(median_tokens=20, failure_probability=0.25), seed=1)
    await engine.load(folders[0], version(0))
    calls = (ask(engine, seed=n, num_tokens=100) for n in range(800))
    results = await asyncio.gather(*calls, return_exceptions=True)
    lengths = sorted(len(view_ids(r.sampled_ids)) for r in results if isinstance(r, Completion))
    assert 0.2 < 1 - len(lengths) / 800 < 0.3
    assert 17 <= lengths[len(lengths) // 2] <= 23
    assert lengths[0] < 10 and lengths[-1] > 40


async def test_a_script_that_runs_out_says_so(folders: list[Path]) -> None:
    engine = ScriptedEngine([[1, 2], [3]])
    await engine.load(folders[0], version(0))
    assert list(view_ids((await ask(engine)).sampled_ids)) == [1, 2]
    assert (await ask(engine)).finish is FinishReason.STOP
    with pytest.raises(EngineError, match="no answer left"):
        await ask(engine)


PAUSABLE = ["simulated", "hf", "pool of simulated"]


@pytest.mark.parametrize("engine", PAUSABLE, indirect=True)
async def test_a_pause_loses_no_token_and_its_caller_sees_nothing(
    engine: Engine, folders: list[Path]
) -> None:
    assert isinstance(engine, Pausable)
    await engine.load(folders[0], version(0))
    expected = await ask(engine, seed=3, num_tokens=60)
    chunks: list[TokenChunk] = []
    has_begun = asyncio.Event()

    def on_chunk(chunk: TokenChunk) -> None:
        chunks.append(chunk)
        has_begun.set()

    spec = SamplingSpec(max_tokens=60, seed=3)
    request = GenerationRequest(PROMPT, spec, policy=POLICY, session="s", on_chunk=on_chunk)
    running = asyncio.create_task(engine(request))
    await asyncio.wait_for(has_begun.wait(), 60)
    recomputed = await engine.pause()
    assert await engine.pause() == 0, "again has no effect"
    num_chunks = len(chunks)
    new = asyncio.create_task(ask(engine, seed=4, num_tokens=5))
    await asyncio.sleep(0.05)
    assert len(chunks) == num_chunks and not running.done() and not new.done()
    if isinstance(engine, HfEngine):
        num_sampled = sum(len(chunk.sampled_ids) for chunk in chunks)
        assert recomputed == len(PROMPT) + num_sampled
    await engine.resume()
    found = await asyncio.wait_for(running, 60)
    check(found)
    assert view_ids(found.sampled_ids).tolist() == view_ids(expected.sampled_ids).tolist()
    assert len(view_ids((await asyncio.wait_for(new, 60)).sampled_ids)) == 5


async def test_an_engine_that_cannot_pause_says_so() -> None:
    pool = EnginePool([ScriptedEngine(long_script)])
    with pytest.raises(EngineError, match="ScriptedEngine cannot be paused"):
        await pool.pause()
    await pool.close()
