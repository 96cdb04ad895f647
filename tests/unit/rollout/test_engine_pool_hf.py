# SPDX-License-Identifier: Apache-2.0
"""Answers that change engine and weights midway, against a plain forward pass of the versions in
their spans."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from tests.unit.rollout.engines.test_hf import (
    POLICY,
    TOLERANCE,
    check,
    folders,
    models,
    prompt_of,
    version,
)
from tests.unit.rollout.killable_engine import Restartable
from tests.unit.rollout.polling import eventually

from penstock.gateway.generation import Completion, GenerationRequest, TokenChunk
from penstock.rollout.engine_pool import EnginePool
from penstock.rollout.engines.hf import HfEngine
from penstock.types import SamplingSpec, view_ids

__all__ = ["folders", "models"]


async def test_every_token_is_of_the_version_it_names(
    folders: list[Path], models: list[Any]
) -> None:
    engines = [Restartable(HfEngine) for _ in range(2)]
    pool = EnginePool(engines)
    await pool.load(folders[0], version(0))
    heard: dict[int, list[TokenChunk]] = {number: [] for number in range(8)}

    async def ask(number: int) -> tuple[list[int], SamplingSpec, Completion]:
        prompt, spec = prompt_of(3 + number), SamplingSpec(max_tokens=60, seed=number)
        answer = await pool(
            GenerationRequest(
                prompt, spec, policy=POLICY, session=str(number), on_chunk=heard[number].append
            )
        )
        return prompt, spec, answer

    calls = [asyncio.create_task(ask(number)) for number in heard]
    for number in (1, 2):
        await eventually(lambda n=number: sum(map(len, heard.values())) > 80 * n)
        await engines[number % 2].kill()
        await pool.load(folders[number % 2], version(number))
    for number, (prompt, spec, answer) in enumerate(await asyncio.gather(*calls)):
        assert len(view_ids(answer.sampled_ids)) == 60
        assert check(models, prompt, answer, spec) < TOLERANCE
        told = [token for chunk in heard[number] for token in chunk.sampled_ids]
        assert told == list(view_ids(answer.sampled_ids))
        assert len({span.number for span in answer.spans}) >= 2
    assert pool.stats.num_continued >= 4
    assert pool.stats.num_failed == 0
    await pool.close()
