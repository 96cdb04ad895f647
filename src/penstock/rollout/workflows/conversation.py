# SPDX-License-Identifier: Apache-2.0
"""What the built-in workflows share: the first messages of a task, and who plays a role.

Owns the reading of `prompt` in a task. Calls no model."""

from __future__ import annotations

from typing import Any, cast

from penstock.errors import WorkflowError
from penstock.rollout.context import BoundPolicy, Context
from penstock.types import JsonObject, Task


def first_messages(task: Task, workflow: str) -> list[JsonObject]:
    """The task's `prompt`: text as the only user message, or a list of messages."""
    prompt = task.payload.get("prompt")
    if isinstance(prompt, str):
        return [user(prompt)]
    messages = cast(list[Any], prompt) if isinstance(prompt, list) else []
    if not messages or not all(isinstance(message, dict) for message in messages):
        raise WorkflowError(
            f"task {task.key} of source {task.source!r} has neither text nor a list of messages "
            f"under 'prompt', which workflow {workflow} needs; add it to the tasks or choose "
            "another workflow"
        )
    return [_without_nulls(message) for message in messages]


def question_text(messages: list[JsonObject]) -> str:
    """The messages of a task as one text, for another role."""
    return "\n\n".join(str(message.get("content") or "") for message in messages)


def user(text: str) -> JsonObject:
    return {"role": "user", "content": text}


def plays(ctx: Context, role: str) -> BoundPolicy:
    """The policy of a role; the run's first one, labelled with the role, where the run file does
    not name the role."""
    return ctx.policy(role) if role in ctx.roles else ctx.policy(role=role)


def _without_nulls(message: JsonObject) -> JsonObject:
    """Arrow gives every message the keys of all others, as null; a template may read them."""
    return {key: value for key, value in message.items() if value is not None or key == "content"}
