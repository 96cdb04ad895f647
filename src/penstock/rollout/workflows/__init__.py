# SPDX-License-Identifier: Apache-2.0
"""Workflows: programs that attempt a task by calling a model.

`async def run(task, ctx)` returns
- a `str`: the completion, passed to the run's reward function;
- a number: the reward itself, the same as `ctx.reward(number)`;
- `None`: the completion is the text of the last model answer.
If it raises, the attempt is recorded as `failed(workflow)`, without a reward.

A run file may give a workflow options. A built-in one declares them; a function of the user gets
them as keyword arguments.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from functools import cache, partial
from typing import Any, cast

from pydantic import ValidationError

from penstock.errors import ConfigError
from penstock.options import Options
from penstock.plugins import WORKFLOW_GROUP, load_function, plugin_names, unknown
from penstock.rollout.harbor.workflow import find_agent
from penstock.rollout.workflow import Workflow
from penstock.rollout.workflows import env_loop, planner, single_turn, solver_verifier, tool_loop
from penstock.rollout.workflows.command import command
from penstock.types import JsonObject, Task

BUILT_IN: dict[str, tuple[Callable[..., Any], type[Options]]] = {
    "single_turn": (single_turn.run, single_turn.SingleTurnOptions),
    "tool_loop": (tool_loop.run, tool_loop.ToolLoopOptions),
    "env_loop": (env_loop.run, env_loop.EnvLoopOptions),
    "solver_verifier": (solver_verifier.run, solver_verifier.SolverVerifierOptions),
    "planner": (planner.run, planner.PlannerOptions),
}

QUESTIONS: dict[str, Callable[[Task], list[JsonObject]]] = {"single_turn": single_turn.question}
"""Of workflows that make one call and return the text of its answer: the messages of that call.
Attempts of one group can make it together."""


def builtin_options(name: str) -> type[Options]:
    """The options that a built-in workflow takes."""
    return BUILT_IN[name][1]


@cache
def find_workflow(name: str) -> Workflow:
    """Find a built-in workflow or one of an installed package by name, load `module:function`, take
    one of these with its options as a JSON object, or wrap a program given as a JSON list of
    arguments."""
    if name.startswith('{"harbor"'):
        return find_agent(name)
    if name.startswith("["):
        return command(_parse_argv(name))
    options = dict[str, Any]()
    if name.startswith("{"):
        name, options = _parse_options(name)
    if name in BUILT_IN:
        function, kind = BUILT_IN[name]
        try:
            return partial(function, options=kind.model_validate(options))
        except ValidationError as error:
            raise ConfigError(f"options of workflow {name}: {error}") from None
    if ":" not in name and name not in (offered := plugin_names(WORKFLOW_GROUP)):
        also = "module:function | a program as a JSON list of arguments"
        raise ConfigError(unknown("workflow", name, (*BUILT_IN, *offered), also=also))
    function = load_function(name, WORKFLOW_GROUP)
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"workflow {name} is not an async function; write `async def run(task, ctx)`"
        )
    return _with_options(name, function, options) if options else function


def _with_options(name: str, function: Callable[..., Any], options: dict[str, Any]) -> Workflow:
    try:
        inspect.signature(function).bind(None, None, **options)
    except TypeError as error:
        raise ConfigError(
            f"workflow {name} does not take the options of the run file: {error}; add keyword "
            "arguments to it, or remove the options"
        ) from None
    return partial(function, **options)


def _parse_options(text: str) -> tuple[str, dict[str, Any]]:
    try:
        options = cast("dict[str, Any]", json.loads(text))
        return str(options.pop("name")), options
    except (ValueError, KeyError, RecursionError):
        raise ConfigError(
            f"workflow {text!r} is not a JSON object with a name; write it as the run file has it"
        ) from None


def _parse_argv(text: str) -> list[str]:
    try:
        argv: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"workflow {text!r} is not a valid JSON list: {error}") from None
    if not argv or not all(isinstance(argument, str) for argument in argv):
        raise ConfigError(f"workflow {text!r} must be a list of strings, the program first")
    return cast("list[str]", argv)
