# SPDX-License-Identifier: Apache-2.0
"""OpenAI Completions as the unmodified `openai` package sees it."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from tests.unit.gateway.gateway_harness import END_ID, ON_FIRE, VOCAB, WINDOW, GatewayHarness

from penstock.errors import BadRequest
from penstock.gateway.dialects.completions import COMPLETIONS


async def test_text_and_ids_go_in_without_a_template(harness: GatewayHarness) -> None:
    ids = [VOCAB[letter] for letter in "ab"]
    async with harness.openai() as agent:
        answer = await agent.completions.create(model="policy", prompt="once", logprobs=0, seed=4)
        choice = answer.choices[0]
        assert (choice.text, choice.finish_reason) == ("abc", "stop")
        assert choice.logprobs is not None
        assert choice.logprobs.tokens == ["a", "b", "c", "<|im_end|>"]
        assert choice.logprobs.token_logprobs == [-0.25] * 4
        assert choice.logprobs.text_offset == [0, 1, 2, 3]
        assert harness.prompt() == "once"
        assert harness.engine.specs[-1].seed == 4
        await agent.completions.create(model="policy", prompt=ids)
        assert harness.engine.prompts[-1] == ids  # not merged into the one token of the text "ab"
        with pytest.raises(openai.BadRequestError, match="outside"):
            await agent.completions.create(model="policy", prompt=[END_ID + 1])


async def test_several_prompts_and_choices(harness: GatewayHarness) -> None:
    async with harness.openai() as agent:
        answer = await agent.completions.create(
            model="policy", prompt=["one", "three"], n=2, stop="c", max_tokens=9
        )
        assert [choice.text for choice in answer.choices] == ["ab"] * 4
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert answer.usage is not None and answer.usage.prompt_tokens == len("onethree")
        with pytest.raises(openai.BadRequestError, match="between 1 and 64"):
            await agent.completions.create(model="policy", prompt=["x"] * 33, n=2)
    assert sorted(map(len, harness.engine.prompts)) == [3, 3, 5, 5]


@pytest.mark.parametrize("is_live", [True, False])
async def test_a_stream(harness: GatewayHarness, is_live: bool) -> None:
    harness.engine.is_live = is_live
    async with harness.openai() as agent:
        stream = await agent.completions.create(
            model="policy", prompt="x", stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "abc"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage is not None and chunks[-1].usage.total_tokens == 5


async def test_errors(harness: GatewayHarness) -> None:
    async with harness.openai() as agent:
        with pytest.raises(openai.BadRequestError) as over:
            await agent.completions.create(model="policy", prompt="x" * WINDOW)
        assert over.value.code == "context_length_exceeded"
        with pytest.raises(openai.InternalServerError, match="on fire"):
            await agent.completions.create(model="policy", prompt="x", temperature=ON_FIRE)


UNSUPPORTED: list[Any] = [
    {"echo": True},
    {"suffix": "x"},
    {"best_of": 3},
    {"logprobs": 2},
    {"prompt_embeds": "AAAA"},
    {"prompt": []},
    {"prompt": [1, "x"]},
    {"prompt": [[1], 2]},
    {"prompt": {"x": 1}},
    {"logit_bias": {"3": 1}},
]


@pytest.mark.parametrize("extra", UNSUPPORTED, ids=str)
def test_unsupported_fields_are_rejected(extra: Any) -> None:
    with pytest.raises(BadRequest):
        COMPLETIONS.read({"model": "policy", "prompt": "x", **extra})
