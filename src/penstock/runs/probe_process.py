# SPDX-License-Identifier: Apache-2.0
"""Runs the user's task, reward and workflow once, in a process that `penstock check` can kill.

Started as `python -m penstock.runs.probe_process`: a Question as JSON on stdin, Findings as JSON
on stdout.
What the user's code prints goes to stderr. Uses the same loading and calling as dataflow and nodes,
so what passes here passes there.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import penstock
from penstock.errors import ConfigError
from penstock.types import JsonObject

_INTERNAL_PATHS = (
    str(Path(penstock.__file__).parent),
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
    """The shipped workflow that asks for text under `prompt`."""
    stages: list[JsonObject]
    """Stages of the pipeline with functions of their own; these are looked at, not called."""
    seed: int
    python_path: list[str]


@dataclass(slots=True, kw_only=True)
class ProbeResult:
    problems: list[str] = field(default_factory=list[str])
    tasks: dict[str, JsonObject] = field(default_factory=dict[str, JsonObject])
    """The first task of each source."""
    digests: dict[str, str] = field(default_factory=dict[str, str])
    """Of the tasks of each source, so that a changed data set is noticed."""
    reward: float | None = None
    """What an empty answer to the first task earns."""


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
                f"source {name!r}: make_task(0, {seed}) gave two different tasks; draw randomness "
                "from the seed alone, so that a restart repeats it"
            )
        if request.is_single_turn and not isinstance(task.payload.get("prompt"), str):
            maker = "its first line" if where.endswith(".jsonl") else "make_task"
            result.problems.append(
                f'source {name!r}: {maker} gave no text under "prompt", which workflow single_turn '
                f"asks; keys: {', '.join(map(str, task.payload)) or 'none'}"
            )
        result.tasks[name] = task.payload


def _try_reward(request: ProbeRequest, payload: JsonObject, result: ProbeResult) -> None:
    from penstock.plugins import load_function
    from penstock.rollout.rewards.frames import ScoreRequest
    from penstock.rollout.rewards.worker import score

    reward = request.reward
    try:
        function = load_function(reward)
    except ConfigError as error:
        result.problems.append(_with_cause(f"reward: {error}", error, request))
        return
    answer = score(function, ScoreRequest(completions=[""], payloads=[payload]))
    if answer.error:
        result.problems.append(f"reward {reward}, asked about an empty answer:\n{answer.error}")
    elif isinstance(answer.values[0], str):
        result.problems.append(f"reward {reward} gave {answer.values[0]}, which is no number")
    else:
        result.reward = answer.values[0]


def _try_workflow(request: ProbeRequest, result: ProbeResult) -> None:
    from penstock.rollout.workflows import find_workflow

    try:
        find_workflow(request.workflow)
    except ConfigError as error:
        result.problems.append(_with_cause(f"workflow: {error}", error, request))


def _try_stage(entry: JsonObject, request: ProbeRequest, result: ProbeResult) -> None:
    from penstock.config.pipeline import PipelineStageConfig
    from penstock.trainer.pipeline.functions import find_function

    try:
        find_function(PipelineStageConfig.model_validate(entry))
    except ConfigError as error:
        result.problems.append(_with_cause(f"pipeline: {error}", error, request))


def _with_cause(text: str, error: ConfigError, request: ProbeRequest) -> str:
    """Our message, and under it the user's own traceback when their module broke, or where we
    looked when there is none."""
    cause = error.__cause__
    if cause is None:
        return text
    if isinstance(cause, ModuleNotFoundError) and _is_named_in_config(cause.name or "", request):
        folders = ", ".join([*request.python_path, "the installed packages"])
        return f"{text}; looked in {folders}"
    return f"{text}\n{_user_traceback(cause)}"


def _is_named_in_config(module: str, request: ProbeRequest) -> bool:
    """The config names this module (or one inside it), rather than the user's own code."""
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
