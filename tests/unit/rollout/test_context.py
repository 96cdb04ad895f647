# SPDX-License-Identifier: Apache-2.0
"""What a workflow calls: chat with tools, and answers that continue a conversation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.gateway.gateway_harness import GatewayHarness, running_gateway

from penstock.errors import BadRequest
from penstock.rollout.context import Context
from penstock.rollout.endpoint import Endpoint
from penstock.types import JsonObject

TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}},
}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


def context(gateway: GatewayHarness) -> Context:
    return Context(gateway.session, Endpoint(gateway.gateway), seed=1)


async def test_a_tool_loop_continues_from_the_sampled_tokens(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as gateway:
        gateway.engine.lines = [f"<think>hm</think>so {CALL}", "3"]
        policy = context(gateway).policy()
        messages: list[JsonObject] = [{"role": "user", "content": "1 + 2"}]
        asked = await policy.chat(messages, tools=[TOOL])
        [call] = asked.tool_calls
        assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1, "b": 2})
        assert asked.message == {
            "role": "assistant",
            "content": asked.text,
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": "add", "arguments": call.arguments},
                }
            ],
        }
        messages += [asked.message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
        told = await policy.chat(messages, tools=[TOOL])
        assert told.message == {"role": "assistant", "content": "3"}
        assert "Tools:" in gateway.prompt(0) and '"name": "add"' in gateway.prompt(0)
        first, second = gateway.session.turns()
        assert (first.parent, second.parent) == (-1, 0), "no token was rendered again"


async def test_a_call_without_text_has_an_empty_text(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as gateway:
        gateway.engine.lines = [CALL]
        answer = await context(gateway).policy().chat([{"role": "user", "content": "x"}])
        assert answer.tool_calls == () and answer.text == CALL, "no tools were offered"
        answer = (
            await context(gateway).policy().chat([{"role": "user", "content": "x"}], tools=[TOOL])
        )
        assert answer.message["content"] == "" and len(answer.message["tool_calls"]) == 1


async def test_every_sampling_keyword_reaches_the_engine(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "max_tokens": 7,
        "seed": 11,
        "stop": ["x", "y"],
    }
    async with running_gateway(tmp_path) as gateway:
        policy = context(gateway).policy()
        await policy.chat([{"role": "user", "content": "x"}], **given, json_schema="{}")
        await policy.complete("x", **given)
        for spec in gateway.engine.specs:
            assert {name: getattr(spec, name) for name in given} == given | {"stop": ("x", "y")}
        assert [spec.json_schema for spec in gateway.engine.specs] == ["{}", ""]


async def test_a_mistyped_keyword_is_an_error_and_not_ignored(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as gateway:
        policy: Any = context(gateway).policy()
        with pytest.raises(TypeError, match="top_q"):
            await policy.chat([{"role": "user", "content": "x"}], top_q=0.5)
        with pytest.raises(BadRequest, match=r"wrong type.*temperature"):
            await policy.chat([{"role": "user", "content": "x"}], temperature="hot")
