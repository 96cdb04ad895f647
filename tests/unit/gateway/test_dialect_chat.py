# SPDX-License-Identifier: Apache-2.0
"""OpenAI Chat Completions as the unmodified `openai` package sees it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from tests.unit.gateway.gateway_harness import ON_FIRE, WINDOW, GatewayHarness

from penstock.errors import BadRequest
from penstock.gateway.dialects.chat import CHAT

ASK: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
    }
]
CALL = '<tool_call>{"name": "add", "arguments": {"a":1,  "b": 2}}</tool_call>'


async def test_a_plain_call_is_recorded_exactly(harness: GatewayHarness) -> None:
    async with harness.openai() as agent:
        answer = await agent.chat.completions.create(
            model="policy", messages=ASK, logprobs=True, temperature=0.5, user="me"
        )
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("abc", "stop")
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [entry.logprob for entry in choice.logprobs.content] == [-0.25] * 4
    assert "".join(entry.token for entry in choice.logprobs.content) == "abc<|im_end|>"
    assert answer.usage is not None and answer.usage.completion_tokens == 4
    (turn,) = harness.gateway.close(harness.session)
    assert turn.sampling.temperature == 0.5
    assert turn.reached_agent


@pytest.mark.parametrize("is_live", [True, False])
async def test_a_stream_comes_as_it_grows_or_after_completion(
    harness: GatewayHarness, is_live: bool
) -> None:
    harness.engine.is_live = is_live
    path = f"/sessions/{harness.session.id}/v1"
    async with harness.openai(path=path) as agent:
        assert [model.id async for model in agent.models.list()] == ["policy"]
        stream = await agent.chat.completions.create(
            model="policy", messages=ASK, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    texts = [c.choices[0].delta.content for c in chunks if c.choices and c.choices[0].delta.content]
    assert "".join(texts) == "abc"
    assert (len(texts) > 1) is is_live
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert len(harness.session.turns()) == 1


async def test_a_stream_is_seen_before_its_end(harness: GatewayHarness) -> None:
    harness.engine.waits_at = 2
    harness.engine.gate.clear()
    async with harness.openai() as agent:
        stream = await agent.chat.completions.create(model="policy", messages=ASK, stream=True)
        seen = ""
        async for chunk in stream:
            seen += chunk.choices[0].delta.content or ""
            if seen and not harness.engine.gate.is_set():
                assert harness.session.turns() == ()
                harness.engine.gate.set()
    assert seen == "abc"


async def test_logprobs_in_a_stream(harness: GatewayHarness) -> None:
    async with harness.openai() as agent:
        stream = await agent.chat.completions.create(
            model="policy", messages=ASK, stream=True, logprobs=True
        )
        entries = [
            entry.logprob
            async for chunk in stream
            if chunk.choices[0].logprobs
            for entry in chunk.choices[0].logprobs.content or ()
        ]
    assert entries == [-0.25] * 4


@pytest.mark.parametrize("is_stream", [False, True])
async def test_tool_calls_and_their_results(harness: GatewayHarness, is_stream: bool) -> None:
    harness.engine.lines = [f"I add.{CALL}", "done"]
    async with harness.openai() as agent:
        if is_stream:
            async with agent.chat.completions.stream(
                model="policy", messages=ASK, tools=TOOLS
            ) as stream:
                completion: Any = await stream.get_final_completion()
        else:
            completion = await agent.chat.completions.create(
                model="policy", messages=ASK, tools=TOOLS
            )
        choice = completion.choices[0]
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert call.function.name == "add"
        assert json.loads(call.function.arguments) == {"a": 1, "b": 2}
        said = choice.message.model_dump(exclude_none=True, exclude={"parsed"})
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "3"}
        await agent.chat.completions.create(
            model="policy", messages=[*ASK, said, result], tools=TOOLS
        )
    assert '"name": "add"' in harness.prompt(0)
    assert harness.prompt().endswith("<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n")
    assert [turn.parent for turn in harness.session.turns()] == [-1, 0]


async def test_tool_choice_none_hides_the_tools_and_others_are_refused(
    harness: GatewayHarness,
) -> None:
    named: Any = {"type": "function", "function": {"name": "add"}}
    async with harness.openai() as agent:
        await agent.chat.completions.create(
            model="policy", messages=ASK, tools=TOOLS, tool_choice="none"
        )
        assert '"name": "add"' not in harness.prompt()
        for choice in ("required", named):
            with pytest.raises(openai.BadRequestError, match="tool_choice"):
                await agent.chat.completions.create(
                    model="policy", messages=ASK, tools=TOOLS, tool_choice=choice
                )
    assert harness.engine.num_started == 1


async def test_choices_share_a_prompt_and_differ_in_seed(harness: GatewayHarness) -> None:
    async with harness.openai() as agent:
        answer = await agent.chat.completions.create(
            model="policy", messages=ASK, n=3, seed=5, max_completion_tokens=6, stop=["c"]
        )
        stream = await agent.chat.completions.create(
            model="policy", messages=ASK, n=2, stream=True, stream_options={"include_usage": True}
        )
        texts = {0: "", 1: ""}
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        with pytest.raises(openai.BadRequestError, match="between 1 and 64"):
            await agent.chat.completions.create(model="policy", messages=ASK, n=65)
    assert [choice.message.content for choice in answer.choices] == ["ab"] * 3
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(harness.engine.prompts[0])
    assert texts == {0: "abc", 1: "abc"}
    turns = harness.session.turns()
    assert len(turns) == 5
    assert {turn.sampling.max_tokens for turn in turns[:3]} == {6}
    seeds = [turn.sampling.seed for turn in turns[:3]]
    assert 5 in seeds and len(set(seeds)) == 3


async def test_thinking_is_switched_and_told_apart(harness: GatewayHarness) -> None:
    harness.engine.lines = ["<think>why</think>abc"]
    body: Any = {"chat_template_kwargs": {"enable_thinking": True}}
    async with harness.openai() as agent:
        answer = await agent.chat.completions.create(model="policy", messages=ASK, extra_body=body)
        message: Any = answer.choices[0].message
        assert (message.content, message.reasoning_content) == ("abc", "why")
        stream = await agent.chat.completions.create(model="policy", messages=ASK, stream=True)
        deltas: list[Any] = [chunk.choices[0].delta async for chunk in stream]
        assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "why"
        assert "".join(delta.content or "" for delta in deltas) == "abc"
        assert not harness.prompt().endswith("</think>")
        await agent.chat.completions.create(model="policy", messages=ASK, reasoning_effort="none")
        assert harness.prompt().endswith("<think></think>")
        with pytest.raises(openai.BadRequestError, match="effort"):
            await agent.chat.completions.create(
                model="policy", messages=ASK, reasoning_effort="high"
            )


async def test_json_formats_reach_the_engine(harness: GatewayHarness) -> None:
    schema: Any = {"type": "object", "properties": {"a": {"type": "integer"}}}
    formats: list[tuple[Any, Any]] = [
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}, schema),
    ]
    async with harness.openai() as agent:
        for wanted, expected in formats:
            await agent.chat.completions.create(
                model="policy", messages=ASK, response_format=wanted
            )
            assert json.loads(harness.engine.specs[-1].json_schema) == expected
        await agent.chat.completions.create(
            model="policy", messages=ASK, response_format={"type": "text"}
        )
    assert harness.engine.specs[-1].json_schema == ""


async def test_unknown_fields_are_accepted_and_those_of_messages_stay(
    harness: GatewayHarness,
) -> None:
    messages: Any = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "nice"}],
        },
        {"role": "assistant", "content": None, "reasoning_content": "hm", "mood": "good"},
        {"role": "user", "content": "hi", "name": "me"},
    ]
    async with harness.openai() as agent:
        await agent.chat.completions.create(
            model="policy", messages=messages, extra_body={"new_field": {"x": 1}}, store=False
        )
    assert "<|im_start|>system\nbe nice<|im_end|>" in harness.prompt()
    assert "<think>hm</think><|im_end|>" in harness.prompt()


UNSUPPORTED: list[Any] = [
    {"logit_bias": {"1": 5}},
    {"presence_penalty": 1},
    {"frequency_penalty": 0.5},
    {"repetition_penalty": 1.1},
    {"top_logprobs": 3, "logprobs": True},
    {"functions": [{"name": "f"}]},
    {"prompt_embeds": "AAAA"},
    {"guided_regex": "a+"},
    {"chat_template": "x"},
    {"chat_template_kwargs": {"other": 1}},
    {"parallel_tool_calls": False, "tools": TOOLS},
    {"tools": [{"type": "web_search"}]},
    {"response_format": {"type": "grammar"}},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
    {"messages": [{"role": "user", "content": [{"type": "input_audio", "text": "x"}]}]},
]


@pytest.mark.parametrize("extra", UNSUPPORTED, ids=str)
def test_what_would_change_the_answer_is_refused(extra: Any) -> None:
    with pytest.raises(BadRequest):
        CHAT.read({"model": "policy", "messages": ASK, **extra})


def test_fields_that_ask_for_nothing_are_not_refused() -> None:
    nothing: dict[str, Any] = {
        "logit_bias": {},
        "presence_penalty": 0.0,
        "functions": None,
        "best_of": None,
    }
    CHAT.read({"model": "policy", "messages": ASK, **nothing, "tool_choice": "auto"})


async def test_errors_have_openais_shape(harness: GatewayHarness) -> None:
    async with harness.openai() as agent:
        with pytest.raises(openai.NotFoundError, match="this session has: policy") as missing:
            await agent.chat.completions.create(model="gpt-9", messages=ASK)
        assert missing.value.code == "model_not_found"
        long: Any = [{"role": "user", "content": "x" * WINDOW}]
        for is_stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="maximum context length") as over:
                await agent.chat.completions.create(model="policy", messages=long, stream=is_stream)
            assert over.value.code == "context_length_exceeded"
        with pytest.raises(openai.InternalServerError, match="on fire"):
            await agent.chat.completions.create(model="policy", messages=ASK, temperature=ON_FIRE)
    assert harness.session.turns() == ()


async def test_an_error_in_mid_stream_is_an_event(harness: GatewayHarness) -> None:
    harness.engine.lines = ["abcdef"]
    async with harness.openai() as agent:
        stream = await agent.chat.completions.create(
            model="policy", messages=ASK, stream=True, temperature=ON_FIRE
        )
        with pytest.raises(openai.APIError, match="on fire"):
            async for _ in stream:
                await asyncio.sleep(0)
    assert harness.session.turns() == ()
