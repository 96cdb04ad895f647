# SPDX-License-Identifier: Apache-2.0
"""One model call: the task's `prompt`, text as the only user message or a list of messages."""

from __future__ import annotations

from penstock.options import Options
from penstock.rollout.context import Context
from penstock.rollout.workflows.conversation import first_messages
from penstock.types import JsonObject, Task


class SingleTurnOptions(Options):
    """None."""


def question(task: Task) -> list[JsonObject]:
    """The messages of the only call."""
    return first_messages(task, "single_turn")


async def run(task: Task, ctx: Context, options: SingleTurnOptions) -> str:
    answer = await ctx.policy().chat(question(task))
    return answer.text
