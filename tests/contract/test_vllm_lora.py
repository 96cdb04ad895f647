# SPDX-License-Identifier: Apache-2.0
"""Adapters of two policies on one real vLLM for CPUs, against weights merged in float64.

Needs `make setup-engine`. One server for all tests, in float32.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from scripts.setup_engine import CACHE, ENGINE, MARKER

from penstock.errors import EngineError
from penstock.gateway.generation import Completion, GenerationRequest, TokenChunk
from penstock.rollout.engines.vllm import ChildServer, VllmEngine
from penstock.types import PolicyName, SamplingSpec, Version, view_ids, view_log_probs

SOLVER, JUDGE = PolicyName("solver"), PolicyName("judge")
PROMPT = list(range(20, 60))
TOLERANCE = 1e-3
"""In log-probability, token by token."""
START_S = 900.0

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(3 * START_S),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        not (ENGINE / MARKER).exists(), reason=f"no vLLM in {CACHE}; run `make setup-engine`"
    ),
]


def version(number: int, policy: PolicyName = SOLVER) -> Version:
    return Version(policy=policy, incarnation=1, number=number)


@cache
def model_of(folder: Path) -> Any:
    from tests.unit.rollout.engines.lora_snapshots import merged

    return merged(folder)


class Bench:
    """Two engines on one server. The solver's version selects one of three adapters; the judge's is
    the fourth, with another rank and fewer layers."""

    def __init__(self, root: Path) -> None:
        from tests.unit.rollout.engines.byte_qwen3 import write_snapshot
        from tests.unit.rollout.engines.lora_snapshots import write_version

        self.root = root
        self.base = write_snapshot(root / "base", seed=0)
        at = root / "versions"
        self.folders = [write_version(self.base, at / str(seed), seed=seed) for seed in range(3)]
        layers = ("v_proj", "q_proj", "k_proj", "down_proj")
        self.folders.append(write_version(self.base, at / "3", seed=3, rank=9, targets=layers))
        options = ["--dtype", "float32", "--max-num-seqs", "32", "--max-num-batched-tokens", "96"]
        server = ChildServer(
            ENGINE,
            options,
            state_dir=root / "state",
            start_s=START_S,
            num_policies=2,
            adapter_rank=9,
        )
        self.solver = VllmEngine(server)
        self.judge = self.solver.share()

    async def ask(
        self,
        policy: PolicyName,
        *,
        num_tokens: int,
        seed: int,
        heard: list[TokenChunk] | None = None,
    ) -> Completion:
        engine = self.solver if policy == SOLVER else self.judge
        spec = SamplingSpec(max_tokens=num_tokens, seed=seed)
        on_chunk = None if heard is None else heard.append
        return await engine(
            GenerationRequest(PROMPT, spec, policy=policy, session="s", on_chunk=on_chunk)
        )

    def worst(self, answer: Completion, folder: Path) -> float:
        from tests.unit.rollout.engines.lora_snapshots import logprobs_under

        sampled = list(view_ids(answer.sampled_ids))
        right = logprobs_under(model_of(folder), PROMPT, sampled)
        recorded = list(view_log_probs(answer.logprobs))
        return max(abs(one - two) for one, two in zip(recorded, right, strict=True))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    pytest.importorskip("transformers")
    bench = Bench(tmp_path_factory.mktemp("vllm"))
    try:
        await bench.solver.load(bench.folders[0], version(0))
        await bench.judge.load(bench.folders[3], version(7, JUDGE))
        yield bench
    finally:
        await bench.judge.close()
        await bench.solver.close()


async def test_two_adapters_of_one_server_agree_with_merged_weights(bench: Bench) -> None:
    """In one batch; log-probs under the wrong adapter would be off by tenths."""
    calls = [
        bench.ask(policy, num_tokens=24, seed=seed)
        for seed in range(4)
        for policy in (SOLVER, JUDGE)
    ]
    answers = await asyncio.gather(*calls)
    worst = [bench.worst(answers[at], bench.folders[3 * (at % 2)]) for at in range(8)]
    swapped = [bench.worst(answers[at], bench.folders[3 - 3 * (at % 2)]) for at in range(8)]
    print(f"worst {max(worst):.1e}; under the other adapter {min(swapped):.2f} at least")
    assert max(worst) < TOLERANCE
    assert min(swapped) > 0.1
    assert [answer.spans[0].number for answer in answers] == [0, 7] * 4


async def test_a_new_version_interrupts_nobody_and_answers_keep_theirs(bench: Bench) -> None:
    heard: list[TokenChunk] = []
    running = [
        asyncio.create_task(bench.ask(SOLVER, num_tokens=200, seed=1, heard=heard)),
        asyncio.create_task(bench.ask(JUDGE, num_tokens=200, seed=1)),
    ]
    while not heard:  # noqa: ASYNC110 (chunks have no event)
        await asyncio.sleep(0.02)
    for number in (1, 2):
        await bench.solver.load(bench.folders[number], version(number))
        answer = await bench.ask(SOLVER, num_tokens=16, seed=number)
        assert [span.number for span in answer.spans] == [number]
        assert bench.worst(answer, bench.folders[number]) < TOLERANCE
    old, judged = await asyncio.gather(*running)
    assert [span.number for span in old.spans] == [0]
    assert {chunk.version.number for chunk in heard} == {0}
    assert bench.worst(old, bench.folders[0]) < TOLERANCE
    assert bench.worst(judged, bench.folders[3]) < TOLERANCE
    assert (bench.solver.live, bench.judge.live) == (version(2), version(7, JUDGE))


async def test_what_does_not_fit_is_refused_and_the_old_version_serves(bench: Bench) -> None:
    from tests.unit.rollout.engines.byte_qwen3 import write_snapshot
    from tests.unit.rollout.engines.lora_snapshots import write_version

    stranger = write_snapshot(bench.root / "stranger", seed=5)
    folder = write_version(stranger, bench.root / "versions" / "stranger", seed=0)
    with pytest.raises(EngineError, match="different base model"):
        await bench.solver.load(folder, version(3))
    with pytest.raises(EngineError, match="policies share this vLLM"):
        await bench.solver.load(bench.base, version(3))
    number = bench.solver.live
    assert number is not None
    answer = await bench.ask(SOLVER, num_tokens=8, seed=9)
    assert bench.worst(answer, bench.folders[number.number]) < TOLERANCE
