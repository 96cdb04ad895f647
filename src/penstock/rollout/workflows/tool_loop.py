# SPDX-License-Identifier: Apache-2.0
"""A model that calls tools until it answers: the task's `prompt`, and `ctx.tools`.

A tool that fails is a result for the model. After `max_turns` calls the last answer counts,
whatever it asks for."""

from __future__ import annotations

from pydantic import PositiveInt

from penstock.options import Options
from penstock.rollout.context import Context
from penstock.rollout.workflows.conversation import first_messages
from penstock.types import JsonObject, Task


class ToolLoopOptions(Options):
    """Options of `tool_loop`."""

    max_turns: PositiveInt = 8
    """Most model calls."""


async def run(task: Task, ctx: Context, options: ToolLoopOptions) -> str:
    messages = first_messages(task, "tool_loop")
    tools = ctx.tools.specs
    answer = await ctx.policy().chat(messages, tools=tools)
    for _ in range(options.max_turns - 1):
        if not answer.tool_calls:
            break
        messages.append(answer.message)
        for call in answer.tool_calls:
            result = await ctx.tools.call(call)
            messages.append(_result(call.id, result.text))
        answer = await ctx.policy().chat(messages, tools=tools)
    return answer.text


def _result(call_id: str, text: str) -> JsonObject:
    return {"role": "tool", "tool_call_id": call_id, "content": text}
