# SPDX-License-Identifier: Apache-2.0
"""Weights are swapped and engines lost while agents stream: no agent sees an error or a short
answer, and each token was sampled by the version in its span.

10 swaps and 2 kills in CI; set PENSTOCK_SWAPS and PENSTOCK_ENGINE_KILLS for more."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from pathlib import Path

import pytest
from tests.chaos.results_table import Figures, begin
from tests.chaos.swap_harness import HF, VLLM, Folders, Kind, SwapHarness, world
from tests.unit.rollout.fake_dataflow import POLICY, wanted
from tests.unit.rollout.killable_engine import Paused

from penstock.gateway.generation import GenerationRequest
from penstock.rollout import weight_loader as loader_module
from penstock.rollout.engine_pool import EnginePool
from penstock.rollout.engines.vllm import default_environment
from penstock.rollout.weight_loader import version_of
from penstock.types import SamplingSpec, view_ids

SWAPS = int(os.environ.get("PENSTOCK_SWAPS", "10"))
KILLS = int(os.environ.get("PENSTOCK_ENGINE_KILLS", "2"))
SESSIONS = 32 if SWAPS >= 100 else 20
VERSIONS = min(SWAPS, 50)
MAX_PAUSED = 0.25

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900 + 20 * SWAPS + 120 * KILLS)]

HAS_VLLM = (default_environment() / "bin" / "vllm").exists()
vllm = pytest.param(
    VLLM,
    marks=[
        pytest.mark.vllm,
        pytest.mark.skipif(not HAS_VLLM, reason="needs vLLM: make setup-engine"),
    ],
)
kinds = pytest.mark.parametrize("kind", [HF, vllm], ids=lambda kind: kind.name)


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "RETRY_S", 0.1)
    # By default, every vLLM binds its worker to the same first cores of the machine.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def judge(figures: Figures, made: SwapHarness) -> None:
    figures.acknowledged = made.num_answers
    figures.lost += made.errors
    figures.lost += made.wrong()
    figures.note = made.report()
    num_turns = sum(1 for _ in made.turns())
    if num_turns != made.num_answers:
        figures.lost.append(f"{made.num_answers} answers, {num_turns} turns")
    figures.require_clean()
    assert made.stats.num_failed == 0


@kinds
@pytest.mark.parametrize("is_patched", [False, True], ids=["full", "patched"])
async def test_swaps_that_nobody_notices(kind: Kind, is_patched: bool, tmp_path: Path) -> None:
    what = "patches of 1 %" if is_patched else "weight swap"
    figures = begin(f"{what}, {kind.name}")
    async with world(kind, tmp_path, num_engines=2, is_patched=is_patched) as made:
        async with made.agents(SESSIONS):
            for number in range(1, SWAPS + 1):
                await made.want(number)
                figures.trials += 1
        judge(figures, made)
        assert any(len(turn.spans) > 1 for _, turn in made.turns())
        assert made.paused.peak == made.stats.peak_paused == 1
        assert [engine.num_patches for engine in made.made] == [SWAPS * is_patched] * 2


@kinds
async def test_engines_killed_under_load(kind: Kind, tmp_path: Path) -> None:
    figures = begin(f"engine kill, {kind.name}")
    async with world(kind, tmp_path, num_engines=2) as made:
        async with made.agents(SESSIONS):
            for number in range(1, KILLS + 1):
                await made.until_all_serve()
                await made.made[number % 2].kill()
                figures.trials += 1
                await made.want(number)
            await made.until_all_serve()
        judge(figures, made)
        assert made.stats.num_continued > 0


@pytest.mark.parametrize("kind", [HF, *([vllm] if SWAPS >= 100 else [])], ids=lambda k: k.name)
async def test_four_engines_take_versions_in_turn(kind: Kind, tmp_path: Path) -> None:
    """Compared with swapping all engines together, alternately on the same engines."""
    figures = begin(f"versions on 4 engines, {kind.name}")
    folders = Folders([kind.write(tmp_path / str(seed), seed) for seed in range(3)])
    paused = Paused()
    engines = [kind.make(paused) for _ in range(4)]
    pools = {
        "in turn": EnginePool(engines, max_paused=MAX_PAUSED),
        "at once": EnginePool(engines, max_paused=1),
    }
    most, tokens, spent_s = (
        dict.fromkeys(pools, 0),
        dict.fromkeys(pools, 0),
        dict.fromkeys(pools, 0.0),
    )
    numbers = itertools.count()
    try:
        for _ in range(max(2, VERSIONS // 10)):
            for name, pool in pools.items():
                await _load(pool, folders, next(numbers))
                paused.peak = 0
                began_at = time.monotonic()
                tokens[name] += await _busy(
                    pool, folders, numbers, VERSIONS // max(2, VERSIONS // 10)
                )
                spent_s[name] += time.monotonic() - began_at
                most[name] = max(most[name], paused.peak)
    finally:
        await pools["in turn"].close()
    rates = {name: tokens[name] / spent_s[name] for name in pools}
    figures.trials, figures.acknowledged = next(numbers), sum(tokens.values())
    figures.note = (
        f"tokens/s {rates['in turn']:.0f} in turn, {rates['at once']:.0f} at once "
        f"(ratio {rates['in turn'] / rates['at once']:.2f}); most paused {most}"
    )
    figures.require_clean()
    assert most["in turn"] == pools["in turn"].stats.peak_paused == 1
    assert most["at once"] == 4


async def _load(pool: EnginePool, folders: Folders, number: int) -> None:
    version = version_of(wanted(number))
    await pool.load(await folders("", wanted(number)), version)


async def _busy(
    pool: EnginePool, folders: Folders, numbers: itertools.count[int], num_versions: int
) -> int:
    """Tokens sampled for a fixed number of sessions while new versions keep arriving."""
    num_tokens, is_over = 0, False

    async def session(name: str) -> None:
        nonlocal num_tokens
        for seed in itertools.count():
            spec = SamplingSpec(max_tokens=32, seed=seed)
            answer = await pool(GenerationRequest([1, 2, 3], spec, policy=POLICY, session=name))
            num_tokens += len(view_ids(answer.sampled_ids))
            if is_over:
                return

    async with asyncio.TaskGroup() as tasks:
        for number in range(SESSIONS):
            tasks.create_task(session(str(number)))
        for _ in range(num_versions):
            await asyncio.sleep(0.2)
            await _load(pool, folders, next(numbers))
        is_over = True
    return num_tokens
