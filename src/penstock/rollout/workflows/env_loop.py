# SPDX-License-Identifier: Apache-2.0
"""A model that acts in an environment until the episode is done: `ctx.env` of the task's source.

The reward is the score of the environment; else the sum of its rewards for steps; else the run's
reward function scores the last answer. After `max_turns` steps the episode is scored as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pydantic import PositiveInt

from penstock.gateway.model_calls import ToolCall
from penstock.options import Options
from penstock.rollout.context import Context
from penstock.rollout.workflows.conversation import user
from penstock.types import JsonObject, Task


class EnvLoopOptions(Options):
    """Options of `env_loop`."""

    max_turns: PositiveInt = 32
    """Most steps in the environment."""


class _Shown(Protocol):
    """The part of an observation that the model sees."""

    @property
    def text(self) -> str: ...
    @property
    def messages(self) -> Sequence[JsonObject]: ...


async def run(task: Task, ctx: Context, options: EnvLoopOptions) -> float | None:
    seen = await ctx.env.reset()
    messages, tools = _messages(seen), list(seen.tools)
    rewards = [] if seen.reward is None else [seen.reward]
    for _ in range(options.max_turns):
        if seen.done:
            break
        answer = await ctx.policy().chat(messages, tools=tools)
        seen = await ctx.env.step(answer.text, answer.tool_calls)
        messages += [answer.message, *_messages(seen, answer.tool_calls)]
        rewards += [] if seen.reward is None else [seen.reward]
    score = await ctx.env.score()
    if score is None and rewards:
        return sum(rewards)
    return score


def _messages(seen: _Shown, calls: Sequence[ToolCall] = ()) -> list[JsonObject]:
    """What the environment shows. Where it answers tool calls with text alone, the text is the
    result of the last one."""
    if seen.messages:
        return list(seen.messages)
    if not calls:
        return [user(seen.text)]
    texts = [*[""] * (len(calls) - 1), seen.text]
    return [
        {"role": "tool", "tool_call_id": call.id, "content": text}
        for call, text in zip(calls, texts, strict=True)
    ]
