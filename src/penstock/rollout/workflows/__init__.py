# SPDX-License-Identifier: Apache-2.0
"""Workflows: programs that attempt a task by calling a model.

`async def run(task, ctx)` returns
- a `str`: the completion, passed to the run's reward function;
- a number: the reward itself, the same as `ctx.reward(number)`;
- `None`: the completion is the text of the last model answer.
If it raises, the attempt is recorded as `failed(workflow)`, without a reward.
"""

from __future__ import annotations

import inspect
import json
from functools import cache
from typing import Any, cast

from penstock.errors import ConfigError
from penstock.plugins import WORKFLOW_GROUP, load_function, plugin_names, unknown
from penstock.rollout.harbor.workflow import find_agent
from penstock.rollout.workflow import Workflow
from penstock.rollout.workflows import single_turn
from penstock.rollout.workflows.command import command

BUILT_IN: dict[str, Workflow] = {"single_turn": single_turn.run}


@cache
def find_workflow(name: str) -> Workflow:
    """Find a built-in workflow or one of an installed package by name, load `module:function`, or
    wrap a program given as a JSON list of arguments."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if name.startswith("{"):
        return find_agent(name)
    if name.startswith("["):
        return command(_parse_argv(name))
    if ":" not in name and name not in (offered := plugin_names(WORKFLOW_GROUP)):
        also = "module:function | a program as a JSON list of arguments"
        raise ConfigError(unknown("workflow", name, (*BUILT_IN, *offered), also=also))
    function = load_function(name, WORKFLOW_GROUP)
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"workflow {name} is not an async function; write `async def run(task, ctx)`"
        )
    return function


def _parse_argv(text: str) -> list[str]:
    try:
        argv: Any = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"workflow {text!r} is not a valid JSON list: {error}") from None
    if not argv or not all(isinstance(argument, str) for argument in argv):
        raise ConfigError(f"workflow {text!r} must be a list of strings, the program first")
    return cast("list[str]", argv)
