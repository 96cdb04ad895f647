# SPDX-License-Identifier: Apache-2.0
"""The workflow of Harbor sources: an agent inside the task, and the verifier's reward.

A task names it as `{"harbor": ["program", "argument"]}`; without a program, the built-in agent
runs. Owns the payload's form. Refuses tasks of other sources."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgspec

from penstock.errors import ConfigError, WorkflowError
from penstock.rollout.context import Context
from penstock.tasks.harbor import KEY, HarborTask
from penstock.types import Task


def find_agent(text: str) -> Callable[[Task, Context], Awaitable[float]]:
    """The workflow with the agent that this text names."""
    argv = _parse(text)

    async def run(task: Task, ctx: Context) -> float:
        trial = await ctx.run_harbor(_record(task), argv, str(task.payload.get("prompt", "")))
        if trial.reward is not None:
            ctx.reward(trial.reward)
        if trial.failure or trial.reward is None:
            raise WorkflowError(trial.failure)
        return trial.reward

    return run


def _parse(text: str) -> list[str]:
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    argv: Any = cast(dict[str, Any], found).get(KEY) if isinstance(found, dict) else None
    if not isinstance(argv, list) or not all(isinstance(w, str) for w in cast(list[Any], argv)):
        raise ConfigError(
            f'workflow {text!r} is not {{"{KEY}": [...]}} with a list of texts; a source with '
            "harbor: makes it"
        )
    return cast(list[str], argv)


def _record(task: Task) -> HarborTask:
    try:
        return msgspec.convert(task.payload.get(KEY), HarborTask)
    except msgspec.ValidationError as error:
        raise WorkflowError(
            f"task {task.key} of source {task.source!r} is not a Harbor task: {error}; use a "
            "source with harbor:"
        ) from None
