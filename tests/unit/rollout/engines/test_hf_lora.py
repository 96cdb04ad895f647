# SPDX-License-Identifier: Apache-2.0
"""Adapters on transformers: log-probs against weights merged in float64, one base for two policies,
and folders that do not fit."""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.unit.rollout.engines.lora_snapshots import (
    CONFIG,
    TARGETS,
    WEIGHTS,
    logprobs_under,
    merged,
    write_version,
)
from tests.unit.rollout.engines.tiny_qwen3 import VOCAB_SIZE, write_snapshot

from penstock.config import LoraConfig
from penstock.errors import EngineError
from penstock.gateway.generation import Completion, GenerationRequest
from penstock.rollout.decoding import hf_decoder
from penstock.rollout.engine import Engine, Shareable
from penstock.rollout.engine_pool import EnginePools
from penstock.rollout.engines.hf import HfEngine
from penstock.trainer.lora import attach_adapter, init_adapter
from penstock.trainer.model_folders import init_model, load_model
from penstock.types import PolicyName, SamplingSpec, Version, view_ids, view_log_probs

SOLVER, JUDGE = PolicyName("solver"), PolicyName("judge")
PROMPT = [1, 2, 3, 10]
TOLERANCE = 5e-5


def version(number: int, policy: PolicyName = SOLVER) -> Version:
    return Version(policy=policy, incarnation=1, number=number)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_snapshot(tmp_path_factory.mktemp("base"), seed=0, end_id=VOCAB_SIZE)


@pytest.fixture(scope="module")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Four adapters of one base; the last has another rank and other layers."""
    root = tmp_path_factory.mktemp("versions")
    alike = [write_version(base, root / str(seed), seed=seed) for seed in range(3)]
    other = write_version(base, root / "3", seed=3, rank=2, targets=("v_proj", "down_proj"))
    return [*alike, other]


@pytest.fixture(scope="module")
def models(folders: list[Path]) -> list[Any]:
    return [merged(folder) for folder in folders]


@asynccontextmanager
async def engine_of() -> AsyncGenerator[HfEngine]:
    engine = HfEngine()
    try:
        yield engine
    finally:
        await engine.close()


async def ask(
    engine: Engine, policy: PolicyName = SOLVER, *, num_tokens: int = 20, seed: int = 0
) -> Completion:
    spec = SamplingSpec(max_tokens=num_tokens, seed=seed)
    return await engine(GenerationRequest(PROMPT, spec, policy=policy, session="s"))


def worst(answer: Completion, model_of: Callable[[int], Any]) -> float:
    """Largest difference from the merged model of each span's version."""
    sampled, recorded = list(view_ids(answer.sampled_ids)), list(view_log_probs(answer.logprobs))
    models = {span.number: model_of(span.number) for span in answer.spans}
    right = {id(model): logprobs_under(model, PROMPT, sampled) for model in models.values()}
    differences = [
        abs(recorded[at] - right[id(models[span.number])][at])
        for span in answer.spans
        for at in range(span.start, span.end)
    ]
    assert len(differences) == len(sampled)
    return max(differences)


# --- one policy -----------------------------------------------------------------------------------


async def test_logprobs_are_those_of_merged_weights_over_swaps_in_mid_answer(
    folders: list[Path], models: list[Any]
) -> None:
    async with engine_of() as engine:
        await engine.load(folders[0], version(0))
        calls = asyncio.gather(*(ask(engine, num_tokens=40, seed=n) for n in range(6)))
        number = 0
        while not calls.done():
            number += 1
            await engine.load(folders[number % 3], version(number))
            await asyncio.sleep(0.02)
        answers = await calls
    assert max(len(answer.spans) for answer in answers) > 1
    error = max(worst(answer, lambda number: models[number % 3]) for answer in answers)
    print(f"worst {error:.1e} over {number} swaps")
    assert error < TOLERANCE
    assert max(worst(answer, lambda number: models[0]) for answer in answers) > 0.1


async def test_a_new_adapter_answers_as_the_base_bit_for_bit(base: Path, tmp_path: Path) -> None:
    async with engine_of() as plain, engine_of() as adapted:
        await plain.load(base, version(0))
        folder = write_version(base, tmp_path / "0", seed=1, spread=0.0)
        await adapted.load(folder, version(0))
        for seed in range(3):
            assert await ask(plain, seed=seed) == await ask(adapted, seed=seed)


async def test_logprobs_are_the_trainers_own(tmp_path: Path) -> None:
    """With a folder as the trainer initializes it, but with a nonzero B."""
    folder = tmp_path / "0"
    init_model("builtin:tiny-qwen3", folder, 0)
    lora = LoraConfig(rank=3, alpha=7)
    init_adapter(folder, lora, seed=1)
    tensors = load_file(folder / WEIGHTS)
    draw = np.random.Generator(np.random.PCG64(2))
    for name in sorted(tensors):
        if ".lora_B." in name:
            tensors[name] = draw.normal(0.0, 0.1, tensors[name].shape).astype(np.float32)
    save_file(tensors, folder / WEIGHTS)
    model: Any = load_model(folder)
    plain = copy.deepcopy(model)
    attach_adapter(model, folder, lora)
    async with engine_of() as engine:
        await engine.load(folder, version(0))
        answer = await ask(engine, num_tokens=8)
    assert worst(answer, lambda number: model) < TOLERANCE
    assert worst(answer, lambda number: plain) > 0.01


async def test_the_base_is_read_once(
    folders: list[Path], base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new version reads only its adapter; the base file has the same inode."""
    read: list[str] = []
    load_file_before = hf_decoder.load_file

    def counting(path: Path) -> Any:
        read.append(Path(path).name)
        return load_file_before(path)

    monkeypatch.setattr(hf_decoder, "load_file", counting)
    async with engine_of() as engine:
        for number in range(3):
            await engine.load(folders[number], version(number))
    assert read == ["model.safetensors", WEIGHTS, WEIGHTS, WEIGHTS]


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "rank of the config": (lambda at: edit_config(at, r=3), "with a wrong shape"),
    "a layer less": (lambda at: edit_tensors(at, lambda t: t.pop(FIRST)), "1 tensors missing"),
    "an unknown layer": (
        lambda at: edit_tensors(
            at, lambda t: t.update({"base_model.model.x.lora_A.weight": t[FIRST]})
        ),
        "1 unknown",
    ),
    "fewer targets than tensors": (
        lambda at: edit_config(at, target_modules=["q_proj"]),
        "unknown",
    ),
    "no layer of these names": (lambda at: edit_config(at, target_modules=["query"]), "unknown"),
    "another kind": (lambda at: edit_config(at, use_dora=True), "use_dora is True"),
    "a pattern of ranks": (lambda at: edit_config(at, rank_pattern={"q_proj": 8}), "rank_pattern"),
    "no config": (lambda at: (at / CONFIG).unlink(), "cannot read"),
    "no tensors": (lambda at: (at / WEIGHTS).unlink(), "damaged"),
}


@pytest.mark.parametrize("name", DAMAGES)
async def test_an_adapter_that_does_not_fit_is_refused(
    base: Path, folders: list[Path], tmp_path: Path, name: str
) -> None:
    damage, says = DAMAGES[name]
    folder = write_version(base, tmp_path / "bad", seed=2)
    damage(folder)
    async with engine_of() as engine:
        await engine.load(folders[0], version(0))
        before = await ask(engine)
        with pytest.raises(EngineError, match=says):
            await engine.load(folder, version(1))
        assert engine.live == version(0)
        assert await ask(engine) == before


async def test_another_base_other_layers_and_whole_models_are_refused(
    base: Path, folders: list[Path], tmp_path: Path
) -> None:
    stranger = write_snapshot(tmp_path / "stranger", seed=9, end_id=VOCAB_SIZE)
    async with engine_of() as engine:
        await engine.load(folders[0], version(0))
        before = await ask(engine)
        with pytest.raises(EngineError, match="different base model"):
            await engine.load(write_version(stranger, tmp_path / "1", seed=0), version(1))
        with pytest.raises(EngineError, match=r"rank 2 for 4 layers.* rank 4 for 14"):
            await engine.load(folders[3], version(1))
        with pytest.raises(EngineError, match="has no adapter, unlike"):
            await engine.load(base, version(1))
        assert engine.live == version(0)
        assert await ask(engine) == before
    async with engine_of() as engine:
        await engine.load(base, version(0))
        with pytest.raises(EngineError, match="has an adapter, unlike"):
            await engine.load(folders[0], version(1))
    embedding = write_version(base, tmp_path / "2", seed=0, targets=("embed_tokens",))
    async with engine_of() as engine:
        with pytest.raises(EngineError, match=r"embed_tokens.* not linear layers"):
            await engine.load(embedding, version(0))


# --- two policies ---------------------------------------------------------------------------------


async def test_two_policies_answer_at_once_from_one_base(
    folders: list[Path], models: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with different ranks and layers. Swaps of one do not affect answers of the other."""
    built: list[Path] = []
    build_before: Any = hf_decoder._build  # pyright: ignore[reportPrivateUsage]

    def counting(folder: Path) -> Any:
        built.append(folder)
        return build_before(folder)

    monkeypatch.setattr(hf_decoder, "_build", counting)
    async with engine_of() as solver:
        judge = solver.share()
        assert isinstance(solver, Shareable)
        await asyncio.gather(
            solver.load(folders[0], version(0)), judge.load(folders[3], version(7, JUDGE))
        )
        assert (solver.live, judge.live) == (version(0), version(7, JUDGE))
        alone = await ask(judge, JUDGE, num_tokens=60, seed=5)
        calls = asyncio.gather(
            *(ask(solver, num_tokens=40, seed=n) for n in range(3)),
            ask(judge, JUDGE, num_tokens=60, seed=5),
        )
        number = 0
        while not calls.done():
            number += 1
            await solver.load(folders[number % 3], version(number))
            await asyncio.sleep(0.02)
        *solved, judged = await calls
        await judge.close()
        assert solver.live is not None, "the other one's end is not its own"
        assert await ask(solver)
    assert len(built) == 1, "one base in memory"
    assert judged.spans == alone.spans and [span.number for span in judged.spans] == [7]
    assert judged.sampled_ids == alone.sampled_ids
    assert worst(judged, lambda number: models[3]) < TOLERANCE
    assert max(len(answer.spans) for answer in solved) > 1
    assert max(worst(answer, lambda number: models[number % 3]) for answer in solved) < TOLERANCE


async def test_a_whole_model_does_not_overwrite_a_shared_base(
    base: Path, folders: list[Path]
) -> None:
    async with engine_of() as solver:
        judge = solver.share()
        await solver.load(folders[0], version(0))
        before = await ask(solver)
        with pytest.raises(EngineError, match="2 policies share"):
            await judge.load(base, version(0, JUDGE))
        assert judge.live is None
        assert await ask(solver) == before
        await judge.close()


async def test_pools_of_a_node_share_their_engines(folders: list[Path]) -> None:
    alone = PolicyName("critic")
    made: list[HfEngine] = []

    def make() -> Engine:
        made.append(HfEngine())
        return made[-1]

    engines = EnginePools([SOLVER, alone, JUDGE], make, num_engines=2, sharing=[(SOLVER, JUDGE)])
    try:
        assert len(made) == 4, "two for the pair, two for the one alone"
        assert engines.policies == {SOLVER, JUDGE, alone}
        await engines.load(folders[0], version(0))
        await engines.load(folders[1], version(3, JUDGE))
        assert {(live.policy, live.number) for live in engines.live()} == {(SOLVER, 0), (JUDGE, 3)}
        for policy, number in ((SOLVER, 0), (JUDGE, 3)):
            answer = await engines(
                GenerationRequest(PROMPT, SamplingSpec(), policy=policy, session="s")
            )
            assert [span.number for span in answer.spans] == [number]
    finally:
        await engines.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "hf-decode"]


def test_default_layers_are_all_that_the_model_has(folders: list[Path]) -> None:
    """Otherwise the tests above would check less than they claim."""
    names = {name.split(".")[-3] for name in load_file(folders[0] / WEIGHTS)}
    assert names == set(TARGETS)
