# SPDX-License-Identifier: Apache-2.0
"""`@penstock.reward`: a function that scores one completion, as the batch form that a run calls.

Owns which parameters such a function may have, and the message for one that a task lacks. Starts no
process. Imports little: every reward worker with such a function imports it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

from penstock.errors import RewardError

F = TypeVar("F", bound=Callable[..., float] | Callable[..., Awaitable[float]])

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def reward(function: F) -> F:
    """Make a function that scores one completion the reward of a run.

        @penstock.reward
        def exact(completion: str, answer: str) -> float:
            return float(completion.strip() == answer)

    The run file names it: `reward: my_task:exact`. `completion` is the text to score. Any other
    parameter is a column of the task, by its name; `task` is all of them as a dict. A parameter
    with a default is optional. An async function scores the completions of a batch concurrently.
    Called with one completion, as in your tests, it is the function that you wrote.

    Without this decorator, a reward takes lists, as in TRL: `def reward(completions, **columns)`.
    """
    name = getattr(function, "__name__", type(function).__name__)
    is_required = _column_parameters(function, name)

    def score(*args: Any, **kwargs: Any) -> Any:
        if "completions" not in kwargs:
            return function(*args, **kwargs)
        completions: Sequence[str] = kwargs.pop("completions")
        if "prompt" in kwargs:
            kwargs.pop("prompts", None)  # a second name of the same column
        tasks = [{key: kwargs[key][at] for key in kwargs} for at in range(len(completions))]
        scores = [
            function(completion=completion, **_arguments(task, is_required, name))
            for completion, task in zip(completions, tasks, strict=True)
        ]
        return _gather(scores) if any(map(inspect.isawaitable, scores)) else scores

    functools.update_wrapper(score, function)
    del vars(score)["__wrapped__"]  # callers see the signature of the batch form, with all columns
    return cast(F, score)


async def _gather(scores: Iterable[Any]) -> list[Any]:
    import asyncio  # here: most functions are not async

    return list(await asyncio.gather(*scores))


def _arguments(task: dict[str, Any], is_required: Mapping[str, bool], name: str) -> dict[str, Any]:
    given = {"task": task, **task}
    for parameter in is_required:
        if is_required[parameter] and parameter not in given:
            raise RewardError(
                f"reward {name} takes {parameter!r}, and the task has no such column, only "
                f"{', '.join(task) or 'none'}; rename the parameter, add the column to the tasks, "
                "or give the parameter a default"
            )
    return {parameter: given[parameter] for parameter in is_required if parameter in given}


def _column_parameters(function: Callable[..., object], name: str) -> dict[str, bool]:
    """Parameters besides `completion`, and whether each is required."""
    parameters = inspect.signature(function).parameters
    if "completion" not in parameters:
        raise TypeError(
            f"reward {name} has no parameter `completion`; write `def {name}(completion: str, …) "
            "-> float`, or remove @penstock.reward from a function of lists (`completions`)"
        )
    for parameter in parameters.values():
        if parameter.kind not in _NAMED:
            bare = parameter.replace(annotation=parameter.empty)
            raise TypeError(
                f"reward {name} takes {bare}, and columns are passed by name; take `task` instead, "
                "to get all of them as a dict"
            )
    names = [parameter for parameter in parameters if parameter != "completion"]
    return {one: parameters[one].default is inspect.Parameter.empty for one in names}
