# SPDX-License-Identifier: Apache-2.0
"""Anthropic Messages as the unmodified `anthropic` package sees it."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from tests.unit.gateway.gateway_harness import ON_FIRE, WINDOW, GatewayHarness

from penstock.errors import BadRequest
from penstock.gateway.dialects.messages import MESSAGES

ASK: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [{"name": "add", "description": "adds", "input_schema": {"type": "object"}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a":1,  "b": "x"}}</tool_call>'
COMMON: Any = {"model": "policy", "max_tokens": 256}


async def test_a_plain_message(harness: GatewayHarness) -> None:
    system: Any = [{"type": "text", "text": "be"}, {"type": "text", "text": "nice"}]
    async with harness.anthropic() as agent:
        answer = await agent.messages.create(
            messages=ASK, system=system, extra_body={"top_k": 7, "temperature": 0.5}, **COMMON
        )
        models = [model.id async for model in agent.models.list()]
    assert models == ["policy"]
    assert [block.type for block in answer.content] == ["text"]
    assert (answer.stop_reason, answer.usage.output_tokens) == ("end_turn", 4)
    assert answer.usage.input_tokens == len(harness.engine.prompts[-1])
    assert harness.prompt().startswith("<|im_start|>system\nbe\nnice<|im_end|>")
    spec = harness.engine.specs[-1]
    assert (spec.top_k, spec.temperature, spec.max_tokens) == (7, 0.5, 256)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_conversation_with_thinking_and_tools(
    harness: GatewayHarness, is_stream: bool
) -> None:
    harness.engine.lines = [f"<think>hm</think>I add.{CALL}", "done"]
    messages: list[Any] = [*ASK]
    async with harness.anthropic(path=f"/sessions/{harness.session.id}") as agent:
        if is_stream:
            async with agent.messages.stream(messages=messages, tools=TOOLS, **COMMON) as stream:
                answer: Any = await stream.get_final_message()
        else:
            answer = await agent.messages.create(messages=messages, tools=TOOLS, **COMMON)
        thinking, text, call = answer.content
        assert (thinking.thinking, text.text) == ("hm", "I add.")
        assert (call.name, call.input, answer.stop_reason) == (
            "add",
            {"a": 1, "b": "x"},
            "tool_use",
        )
        assert answer.usage.input_tokens == len(harness.engine.prompts[0])
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "3"}
        more = {"type": "text", "text": "go on"}
        messages.append({"role": "assistant", "content": answer.content})
        messages.append({"role": "user", "content": [result, more]})
        last: Any = await agent.messages.create(messages=messages, tools=TOOLS, **COMMON)
    assert last.content[0].text == "done"
    ending = "<|im_start|>tool\n3<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n"
    assert harness.prompt().endswith(ending + "<|im_start|>assistant\n")
    assert [turn.parent for turn in harness.session.turns()] == [-1, 0]


@pytest.mark.parametrize("is_live", [True, False])
async def test_events_are_in_the_documented_order(harness: GatewayHarness, is_live: bool) -> None:
    harness.engine.is_live = is_live
    harness.engine.lines = [f"<think>h</think>x{CALL}"]
    async with harness.anthropic() as agent:
        stream = await agent.messages.create(messages=ASK, tools=TOOLS, stream=True, **COMMON)
        events: list[Any] = [event async for event in stream]
    assert [event.type for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        *("content_block_start", "content_block_delta", "content_block_stop") * 2,
        "message_delta",
        "message_stop",
    ]
    deltas = [event.delta.type for event in events if event.type == "content_block_delta"]
    assert deltas == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta"]
    assert [event.index for event in events[1:-2]] == [0] * 4 + [1] * 3 + [2] * 3


async def test_why_an_answer_ended(harness: GatewayHarness) -> None:
    async with harness.anthropic() as agent:
        stopped = await agent.messages.create(messages=ASK, stop_sequences=["z", "bc"], **COMMON)
        cut = await agent.messages.create(messages=ASK, model="policy", max_tokens=2)
        stream = await agent.messages.create(
            messages=ASK, stop_sequences=["c"], stream=True, **COMMON
        )
        events: list[Any] = [event async for event in stream]
    block: Any = stopped.content[0]
    assert (stopped.stop_reason, stopped.stop_sequence, block.text) == ("stop_sequence", "bc", "a")
    assert cut.stop_reason == "max_tokens"
    assert events[-2].delta.stop_sequence == "c"


async def test_thinking_and_formats(harness: GatewayHarness) -> None:
    schema: Any = {"type": "object", "properties": {}}
    async with harness.anthropic() as agent:
        await agent.messages.create(messages=ASK, thinking={"type": "disabled"}, **COMMON)
        assert harness.prompt().endswith("<think></think>")
        await agent.messages.create(
            messages=ASK, thinking={"type": "enabled", "budget_tokens": 1024}, **COMMON
        )
        assert not harness.prompt().endswith("<think></think>")
        await agent.messages.create(
            messages=ASK,
            output_config={"format": {"type": "json_schema", "schema": schema}},
            **COMMON,
        )
    assert harness.engine.specs[-1].json_schema == '{"type":"object","properties":{}}'


async def test_errors_have_anthropics_shape(harness: GatewayHarness) -> None:
    long: Any = [{"role": "user", "content": "x" * WINDOW}]
    async with harness.anthropic() as agent:
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 4"):
            await agent.messages.create(messages=long, **COMMON)
        with pytest.raises(anthropic.NotFoundError) as missing:
            await agent.messages.create(model="claude", max_tokens=9, messages=ASK)
        assert missing.value.type == "not_found_error"
        with pytest.raises(anthropic.APIStatusError, match="on fire") as failed:
            await agent.messages.create(messages=ASK, extra_body={"temperature": ON_FIRE}, **COMMON)
        assert failed.value.type == "overloaded_error"
        harness.engine.lines = ["abcdef"]
        stream = await agent.messages.create(
            messages=ASK, stream=True, extra_body={"temperature": ON_FIRE}, **COMMON
        )
        with pytest.raises(anthropic.APIStatusError, match="on fire"):
            async for _ in stream:
                pass
        with pytest.raises(anthropic.NotFoundError):
            await agent.messages.count_tokens(model="policy", messages=ASK)
    async with harness.anthropic(api_key="sk-other") as stranger:
        with pytest.raises(anthropic.AuthenticationError):
            await stranger.messages.create(messages=ASK, **COMMON)
    async with harness.anthropic(auth_token=harness.session.api_key) as bearer:
        await bearer.messages.create(messages=ASK, **COMMON)


UNSUPPORTED: list[Any] = [
    {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
    {"tools": TOOLS, "tool_choice": {"type": "any"}},
    {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "add"}},
    {"tools": TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    {"mcp_servers": [{"url": "x"}]},
    {"context_management": {"edits": [{"type": "x"}]}},
    {"output_config": {"effort": "low"}},
    {"thinking": {"type": "between_tools"}},
    {"thinking": {"type": ["enabled"]}},
    {"messages": [*ASK, {"role": "assistant", "content": "I"}]},
    {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
    {"messages": [{"role": "robot", "content": "x"}]},
    {"messages": [{"role": "user", "content": [1]}]},
    {"messages": [{"role": "user"}]},
    {"max_tokens": None},
]


@pytest.mark.parametrize("extra", UNSUPPORTED, ids=str)
def test_unsupported_fields_are_rejected(extra: Any) -> None:
    with pytest.raises(BadRequest):
        MESSAGES.read({"messages": ASK, **COMMON, **extra})
