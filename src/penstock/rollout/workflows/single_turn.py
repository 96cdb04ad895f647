# SPDX-License-Identifier: Apache-2.0
"""One model call: the task's `prompt`, text as the only user message or a list of messages."""

from __future__ import annotations

from typing import Any, cast

from penstock.errors import WorkflowError
from penstock.rollout.context import Context
from penstock.types import JsonObject, Task


async def run(task: Task, ctx: Context) -> str:
    answer = await ctx.policy().chat(_messages(task))
    return answer.text


def _messages(task: Task) -> list[JsonObject]:
    prompt = task.payload.get("prompt")
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    messages = cast(list[Any], prompt) if isinstance(prompt, list) else []
    if not messages or not all(isinstance(message, dict) for message in messages):
        raise WorkflowError(
            f"task {task.key} of source {task.source!r} has neither text nor a list of messages "
            "under 'prompt', which workflow single_turn needs; add it to the tasks or choose "
            "another workflow"
        )
    return [_without_nulls(message) for message in messages]


def _without_nulls(message: JsonObject) -> JsonObject:
    """Arrow gives every message the keys of all others, as null; a template may read them."""
    return {key: value for key, value in message.items() if value is not None or key == "content"}
