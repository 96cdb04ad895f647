# SPDX-License-Identifier: Apache-2.0
"""Runs the user's task, reward and workflow once, in a process that `penstock check` can kill.

Started as `python -m penstock.runs.probe_process`: a ProbeRequest as JSON on stdin, a ProbeResult
as JSON on stdout. Output of the user's code goes to stderr. Loads and calls the code exactly as
dataflow and nodes do, so code that passes here works there.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import penstock
from penstock.dataflow.sources import DataSpec, open_source
from penstock.errors import ConfigError
from penstock.types import JsonObject

T = TypeVar("T")

_INTERNAL_PATHS = (
    str(Path(penstock.__file__).parent),
    str(Path(importlib.__file__).parent),
    "<frozen ",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSource:
    name: str
    where: str | DataSpec
    """A module or a data set."""
    limit: int | None
    reward: str
    is_single_turn: bool
    """Its workflow is the built-in one that needs a `prompt`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    sources: list[ProbeSource]
    workflows: list[str]
    """Functions; a command is not run."""
    stages: list[JsonObject]
    """Pipeline stages with custom functions; loaded but not called."""
    seed: int
    python_path: list[str]


@dataclass(slots=True, kw_only=True)
class ProbeResult:
    problems: list[str] = field(default_factory=list[str])
    tasks: dict[str, JsonObject] = field(default_factory=dict[str, JsonObject])
    """The first task of each source."""
    digests: dict[str, str] = field(default_factory=dict[str, str])
    """Digest of the tasks of each source, to detect a changed dataset."""
    rewards: dict[str, float] = field(default_factory=dict[str, float])
    """Score of an empty completion of the first task, by reward function."""


def probe(request: ProbeRequest) -> ProbeResult:
    result = ProbeResult()
    for source in request.sources:
        _try_source(source, request, result)
    tried = {s.reward: s.name for s in reversed(request.sources) if s.name in result.tasks}
    for reward, name in tried.items():
        if reward:
            _try_reward(reward, result.tasks[name], request, result)
    for workflow in request.workflows:
        _try_workflow(workflow, request, result)
    for stage in request.stages:
        _try_stage(stage, request, result)
    return result


def _try_source(entry: ProbeSource, request: ProbeRequest, result: ProbeResult) -> None:
    seed, name = request.seed, entry.name
    try:
        source = open_source(name, entry.where, limit=entry.limit)
        task = source.task(0, seed=seed, workflow="")
        repeated = source.task(0, seed=seed, workflow="")
        result.digests[name] = source.digest(seed)
    except ConfigError as error:
        if isinstance(entry.where, str):  # `data_check` reports what is wrong with rows
            result.problems.append(_with_cause(str(error), error, request))
    except (Exception, SystemExit) as error:
        result.problems.append(f"source {name!r}: {entry.where} raised\n{_user_traceback(error)}")
    else:
        if task != repeated:
            result.problems.append(
                f"source {name!r}: two calls of make_task(0, {seed}) returned different tasks; "
                "derive all randomness from the seed, so that a restart repeats the tasks"
            )
        is_prompt = isinstance(task.payload.get("prompt"), str | list)
        if entry.is_single_turn and isinstance(entry.where, str) and not is_prompt:
            result.problems.append(
                f'source {name!r}: make_task has neither text nor messages under "prompt", which '
                f"workflow single_turn needs; keys: {', '.join(map(str, task.payload)) or 'none'}"
            )
        result.tasks[name] = task.payload


def _try_reward(
    reward: str, payload: JsonObject, request: ProbeRequest, result: ProbeResult
) -> None:
    from penstock.plugins import load_function
    from penstock.rollout.rewards.frames import ScoreRequest
    from penstock.rollout.rewards.worker import score

    function = _load("reward", partial(load_function, reward), request, result)
    if function is None:
        return
    answer = score(function, ScoreRequest(completions=[""], payloads=[payload]))
    if answer.error:
        result.problems.append(f"reward {reward} failed on an empty completion:\n{answer.error}")
    elif isinstance(value := answer.values[0], str):
        result.problems.append(f"reward {reward} returned {value}; expected a number")
    else:
        result.rewards[reward] = value


def _try_workflow(workflow: str, request: ProbeRequest, result: ProbeResult) -> None:
    from penstock.rollout.workflows import find_workflow

    _load("workflow", partial(find_workflow, workflow), request, result)


def _try_stage(entry: JsonObject, request: ProbeRequest, result: ProbeResult) -> None:
    from penstock.config.pipeline import PipelineStageConfig
    from penstock.trainer.pipeline.functions import find_function

    stage = PipelineStageConfig.model_validate(entry)
    _load("pipeline", partial(find_function, stage), request, result)


def _load(what: str, load: Callable[[], T], request: ProbeRequest, result: ProbeResult) -> T | None:
    """What it loads; None, with the problem noted, if that cannot be loaded."""
    try:
        return load()
    except ConfigError as error:
        result.problems.append(_with_cause(f"{what}: {error}", error, request))
        return None


def _with_cause(text: str, error: ConfigError, request: ProbeRequest) -> str:
    """Our message, followed by the user's traceback if their module failed, or by the folders we
    searched if it does not exist."""
    cause = error.__cause__
    if cause is None:
        return text
    if isinstance(cause, ModuleNotFoundError) and _is_named_in_config(cause.name or "", request):
        folders = ", ".join([*request.python_path, "the installed packages"])
        return f"{text}; searched {folders}"
    return f"{text}\n{_user_traceback(cause)}"


def _is_named_in_config(module: str, request: ProbeRequest) -> bool:
    """True if the config names this module or one inside it; False if only user code imports it."""
    named = [source.where for source in request.sources if isinstance(source.where, str)]
    named += [source.reward for source in request.sources] + request.workflows
    named += [str(stage["fn"]) for stage in request.stages]
    named = [name.partition(":")[0] for name in named]
    return any(f"{name}.".startswith(f"{module}.") for name in named)


def _user_traceback(error: BaseException) -> str:
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_INTERNAL_PATHS)
    ]
    lines = traceback.format_list(frames) + traceback.format_exception_only(error)
    return "".join(lines).rstrip()


def main() -> None:
    from penstock.wire.codec import JSON, decode, encode_json

    answers = os.dup(1)
    os.dup2(2, 1)
    request = decode(sys.stdin.buffer.read(), ProbeRequest, media_type=JSON)
    sys.path[:0] = request.python_path
    os.write(answers, encode_json(probe(request)))


if __name__ == "__main__":
    main()
