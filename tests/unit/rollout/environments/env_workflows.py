# SPDX-License-Identifier: Apache-2.0
"""Workflows and hooks of the tests of environments."""

from __future__ import annotations

from dataclasses import replace

from penstock.errors import EnvironmentFailed
from penstock.rollout.context import Context
from penstock.rollout.environments.types import Action, Observation
from penstock.types import Task


async def count_down(task: Task, ctx: Context) -> float | None:
    """The model is asked once, and its answer does not matter."""
    seen = await ctx.env.reset()
    await ctx.policy().chat([{"role": "user", "content": task.payload["prompt"]}])
    while not seen.done:
        seen = await ctx.env.step("down")
    return await ctx.env.score()


async def carry_on(task: Task, ctx: Context) -> float:
    """Swallows the failure of its environment and claims a reward."""
    try:
        await count_down(task, ctx)
    except EnvironmentFailed:
        await ctx.policy().chat([{"role": "user", "content": task.payload["prompt"]}])
    return 0.0


async def play_alone(task: Task, ctx: Context) -> float | None:
    """Asks the model only if the environment does not."""
    seen = await ctx.env.reset()
    if not seen.done:
        answer = await ctx.policy().chat([{"role": "user", "content": "abc"}])
        await ctx.env.step(answer.text)
    return await ctx.env.score()


async def step_first(task: Task, ctx: Context) -> None:
    await ctx.env.step("down")


async def say_up(task: Task, ctx: Context) -> str:
    """Hooks turn its action and its observation."""
    await ctx.env.reset()
    await ctx.policy().chat([{"role": "user", "content": task.payload["prompt"]}])
    return (await ctx.env.step("up")).text


def always_down(action: Action, task: Task) -> Action:
    return replace(action, text="down")


def shout(observation: Observation, task: Task) -> Observation:
    return replace(observation, text=observation.text.upper())


def broken(observation: Observation, task: Task) -> Observation:
    raise LookupError("hook of the user")
