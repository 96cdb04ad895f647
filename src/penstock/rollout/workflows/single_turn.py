# SPDX-License-Identifier: Apache-2.0
"""One model call: the task's `prompt` as the only user message."""

from __future__ import annotations

from penstock.errors import WorkflowError
from penstock.rollout.context import Context
from penstock.types import Task


async def run(task: Task, ctx: Context) -> str:
    prompt = task.payload.get("prompt")
    if not isinstance(prompt, str):
        raise WorkflowError(
            f"task {task.key} of source {task.source!r} has no text under 'prompt', which workflow "
            "single_turn needs; add it to the tasks or choose another workflow"
        )
    answer = await ctx.policy().chat([{"role": "user", "content": prompt}])
    return answer.text
