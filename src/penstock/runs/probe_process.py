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

from penstock.errors import ConfigError
from penstock.types import JsonObject

T = TypeVar("T")

_INTERNAL_PATHS = (
    str(Path(__file__).parents[1]),
    str(Path(importlib.__file__).parent),
    "<frozen ",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    sources: list[tuple[str, str, int | None]]
    """(name, module or file, limit)."""
    reward: str
    workflow: str
    """Empty for a command, which is not run."""
    is_single_turn: bool
    """The built-in workflow that needs text under `prompt`."""
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
    reward: float | None = None
    """Score of an empty completion of the first task."""


def probe(request: ProbeRequest) -> ProbeResult:
    result = ProbeResult()
    for name, where, limit in request.sources:
        _try_source(name, where, limit, request, result)
    if request.reward and result.tasks:
        _try_reward(request, next(iter(result.tasks.values())), result)
    if request.workflow:
        _try_workflow(request, result)
    for stage in request.stages:
        _try_stage(stage, request, result)
    return result


def _try_source(
    name: str, where: str, limit: int | None, request: ProbeRequest, result: ProbeResult
) -> None:
    from penstock.dataflow.sources import open_source

    seed = request.seed
    try:
        source = open_source(name, where, limit=limit)
        task = source.task(0, seed=seed, workflow="")
        repeated = source.task(0, seed=seed, workflow="")
        result.digests[name] = source.digest(seed)
    except ConfigError as error:
        result.problems.append(_with_cause(str(error), error, request))
    except (Exception, SystemExit) as error:
        result.problems.append(f"source {name!r}: {where} raised\n{_user_traceback(error)}")
    else:
        if task != repeated:
            result.problems.append(
                f"source {name!r}: two calls of make_task(0, {seed}) returned different tasks; "
                "derive all randomness from the seed, so that a restart repeats the tasks"
            )
        if request.is_single_turn and not isinstance(task.payload.get("prompt"), str):
            maker = "its first line" if where.endswith(".jsonl") else "make_task"
            result.problems.append(
                f'source {name!r}: {maker} has no text under "prompt", which workflow single_turn '
                f"needs; keys: {', '.join(map(str, task.payload)) or 'none'}"
            )
        result.tasks[name] = task.payload


def _try_reward(request: ProbeRequest, payload: JsonObject, result: ProbeResult) -> None:
    from penstock.plugins import REWARD_GROUP, load_function
    from penstock.rollout.rewards.frames import ScoreRequest
    from penstock.rollout.rewards.worker import score

    reward = request.reward
    function = _load("reward", partial(load_function, reward, REWARD_GROUP), request, result)
    if function is None:
        return
    answer = score(function, ScoreRequest(completions=[""], payloads=[payload]))
    if answer.error:
        result.problems.append(f"reward {reward} failed on an empty completion:\n{answer.error}")
    elif isinstance(answer.values[0], str):
        result.problems.append(f"reward {reward} returned {answer.values[0]}; expected a number")
    else:
        result.reward = answer.values[0]


def _try_workflow(request: ProbeRequest, result: ProbeResult) -> None:
    from penstock.rollout.workflows import find_workflow

    _load("workflow", partial(find_workflow, request.workflow), request, result)


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
    functions = (request.reward, request.workflow, *(str(s["fn"]) for s in request.stages))
    named = [where for _, where, _ in request.sources] + [f.partition(":")[0] for f in functions]
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
