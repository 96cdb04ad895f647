# SPDX-License-Identifier: Apache-2.0
"""Workflows: programs that attempt a task by calling a model.

`async def run(task, ctx)` returns
- a `str`: the completion, handed to the run's reward function;
- a number: the reward itself, the same as `ctx.reward(number)`;
- `None`: the completion is the text of the last model answer.
It raises to say that the attempt broke: the record is `failed(workflow)`, without a reward.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable
from typing import Any, cast

from penstock.errors import ConfigError
from penstock.plugins import load_function
from penstock.rollout.context import Context
from penstock.rollout.workflows import single_turn
from penstock.rollout.workflows.command import command
from penstock.types import Task

Workflow = Callable[[Task, Context], Awaitable[str | float | None]]
BUILT_IN: dict[str, Workflow] = {"single_turn": single_turn.run}


def find_workflow(name: str) -> Workflow:
    """By name, `module:function`, or a JSON list of words for an external program."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if name.startswith("["):
        return command(_parse_argv(name))
    if ":" not in name:
        raise ConfigError(
            f"no workflow {name!r}: there is {', '.join(BUILT_IN)}; your own is module:function, "
            "a program is a JSON list of words"
        )
    function = load_function(name)
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(f"workflow {name} is no async function; write `async def run(task, ctx)`")
    return function


def _parse_argv(text: str) -> list[str]:
    try:
        argv: Any = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"workflow {text!r} is no valid JSON list of words: {error}") from None
    if not argv or not all(isinstance(word, str) for word in argv):
        raise ConfigError(f"workflow {text!r} must be a list of words, the program first")
    return cast("list[str]", argv)
