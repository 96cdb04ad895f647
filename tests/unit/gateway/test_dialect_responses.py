# SPDX-License-Identifier: Apache-2.0
"""OpenAI Responses as the unmodified `openai` package sees it."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from tests.unit.gateway.gateway_harness import ON_FIRE, WINDOW, GatewayHarness

from penstock.errors import BadRequest
from penstock.gateway.dialects.responses import RESPONSES

TOOLS: Any = [{"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}]
CALL = '<tool_call>{"name": "add", "arguments": {"a":1}}</tool_call>'


async def test_a_plain_response(harness: GatewayHarness) -> None:
    async with harness.openai() as agent:
        answer = await agent.responses.create(
            model="policy", input="hi", instructions="be nice", max_output_tokens=9, store=False
        )
    assert (answer.status, answer.output_text) == ("completed", "abc")
    assert answer.usage is not None and answer.usage.output_tokens == 4
    assert harness.prompt().startswith(
        "<|im_start|>system\nbe nice<|im_end|>\n<|im_start|>user\nhi"
    )
    assert harness.engine.specs[-1].max_tokens == 9


async def test_a_cut_response_is_incomplete(harness: GatewayHarness) -> None:
    async with harness.openai() as agent:
        answer = await agent.responses.create(model="policy", input="hi", max_output_tokens=2)
    assert answer.status == "incomplete" and answer.output_text == "ab"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_conversation_with_reasoning_and_tools(
    harness: GatewayHarness, is_stream: bool
) -> None:
    harness.engine.lines = [f"<think>hm</think>I add.{CALL}", "done"]
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
    async with harness.openai() as agent:
        if is_stream:
            async with agent.responses.stream(model="policy", input=items, tools=TOOLS) as stream:
                answer: Any = await stream.get_final_response()
        else:
            answer = await agent.responses.create(model="policy", input=items, tools=TOOLS)
        reasoning, message, call = answer.output
        assert reasoning.content[0].text == "hm"
        assert message.content[0].text == "I add."
        assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1})
        kept = ("type", "id", "call_id", "name", "arguments", "role", "content", "summary")
        items += [
            {name: value for name, value in item.items() if name in kept}
            for item in answer.model_dump(mode="json")["output"]
        ]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "3"})
        last = await agent.responses.create(model="policy", input=items, tools=TOOLS)
    assert last.output_text == "done"
    assert harness.prompt().endswith("<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n")
    assert [turn.parent for turn in harness.session.turns()] == [-1, 0]


@pytest.mark.parametrize("is_live", [True, False])
async def test_events_come_in_the_documented_order(harness: GatewayHarness, is_live: bool) -> None:
    harness.engine.is_live = is_live
    harness.engine.lines = [f"<think>h</think>x{CALL}"]
    async with harness.openai() as agent:
        stream = await agent.responses.create(model="policy", input="hi", tools=TOOLS, stream=True)
        events: list[Any] = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    indexes = [event.output_index for event in events[2:-1]]
    assert indexes == [0] * 6 + [1] * 6 + [2] * 4
    done = [event.item.id for event in events if event.type.endswith("item.done")]
    assert done == [item.id for item in events[-1].response.output]


async def test_formats_and_thinking(harness: GatewayHarness) -> None:
    schema: Any = {"type": "object", "properties": {}}
    format: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    async with harness.openai() as agent:
        await agent.responses.create(model="policy", input="hi", text=format)
        assert json.loads(harness.engine.specs[-1].json_schema) == schema
        await agent.responses.create(model="policy", input="hi", reasoning={"effort": "none"})
        assert harness.prompt().endswith("<think></think>")


async def test_errors(harness: GatewayHarness) -> None:
    async with harness.openai() as agent:
        with pytest.raises(openai.BadRequestError, match="full conversation"):
            await agent.responses.create(model="policy", input="hi", previous_response_id="r")
        with pytest.raises(openai.BadRequestError) as over:
            await agent.responses.create(model="policy", input="x" * WINDOW)
        assert over.value.code == "context_length_exceeded"
        harness.engine.lines = ["abcdef"]
        stream = await agent.responses.create(
            model="policy", input="hi", stream=True, temperature=ON_FIRE
        )
        events: list[Any] = [event async for event in stream]
    assert events[-1].type == "response.failed"
    assert "on fire" in events[-1].response.error.message


UNSUPPORTED: list[Any] = [
    {"background": True},
    {"conversation": "c"},
    {"truncation": "auto"},
    {"include": ["message.output_text.logprobs"]},
    {"tools": [{"type": "web_search"}]},
    {"tool_choice": "required", "tools": TOOLS},
    {"text": {"verbosity": "low"}},
    {"reasoning": {"effort": "high"}},
    {"reasoning": {"effort": ["none"]}},
    {"input": [{"type": "item_reference", "id": "x"}]},
    {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
    {"top_logprobs": 2},
]


@pytest.mark.parametrize("extra", UNSUPPORTED, ids=str)
def test_what_would_change_the_answer_is_refused(extra: Any) -> None:
    with pytest.raises(BadRequest):
        RESPONSES.read({"model": "policy", "input": "hi", **extra})


def test_items_of_one_answer_become_one_message() -> None:
    items = [
        {"role": "developer", "content": "d"},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "s"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
        {"type": "message", "role": "assistant", "content": "one"},
        {"type": "message", "role": "assistant", "content": "two"},
    ]
    (call,) = RESPONSES.read({"model": "policy", "input": items}).calls
    messages: Any = getattr(call, "messages", ())
    assert [message["role"] for message in messages] == [
        "system",
        "assistant",
        "tool",
        "assistant",
        "assistant",
    ]
    assert messages[1]["reasoning_content"] == "s"
    assert [one["function"]["name"] for one in messages[1]["tool_calls"]] == ["f", "g"]
