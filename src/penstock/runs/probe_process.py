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

_OURS = (str(Path(penstock.__file__).parent), str(Path(importlib.__file__).parent), "<frozen ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
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
class Findings:
    problems: list[str] = field(default_factory=list[str])
    tasks: dict[str, JsonObject] = field(default_factory=dict[str, JsonObject])
    """The first task of each source."""
    digests: dict[str, str] = field(default_factory=dict[str, str])
    """Of the tasks of each source, so that a changed data set is noticed."""
    reward: float | None = None
    """What an empty answer to the first task earns."""


def probe(question: Question) -> Findings:
    findings = Findings()
    for name, where, limit in question.sources:
        _try_source(name, where, limit, question, findings)
    if question.reward and findings.tasks:
        _try_reward(question, next(iter(findings.tasks.values())), findings)
    if question.workflow:
        _try_workflow(question, findings)
    for stage in question.stages:
        _look_at_stage(stage, question, findings)
    return findings


def _try_source(
    name: str, where: str, limit: int | None, question: Question, findings: Findings
) -> None:
    from penstock.dataflow.sources import open_source

    seed = question.seed
    try:
        source = open_source(name, where, limit=limit)
        task = source.task(0, seed=seed, workflow="")
        again = source.task(0, seed=seed, workflow="")
        findings.digests[name] = source.digest(seed)
    except ConfigError as error:
        findings.problems.append(_explained(str(error), error, question))
    except (Exception, SystemExit) as error:
        findings.problems.append(f"source {name!r}: {where} raised\n{_theirs(error)}")
    else:
        if task != again:
            findings.problems.append(
                f"source {name!r}: make_task(0, {seed}) gave two different tasks; draw randomness "
                "from the seed alone, so that a restart repeats it"
            )
        if question.is_single_turn and not isinstance(task.payload.get("prompt"), str):
            maker = "its first line" if where.endswith(".jsonl") else "make_task"
            findings.problems.append(
                f'source {name!r}: {maker} gave no text under "prompt", which workflow single_turn '
                f"asks; keys: {', '.join(map(str, task.payload)) or 'none'}"
            )
        findings.tasks[name] = task.payload


def _try_reward(question: Question, payload: JsonObject, findings: Findings) -> None:
    from penstock.plugins import load_function
    from penstock.rollout.rewards.frames import ScoreRequest
    from penstock.rollout.rewards.worker import score

    reward = question.reward
    try:
        function = load_function(reward)
    except ConfigError as error:
        findings.problems.append(_explained(f"reward: {error}", error, question))
        return
    answer = score(function, ScoreRequest(completions=[""], payloads=[payload]))
    if answer.error:
        findings.problems.append(f"reward {reward}, asked about an empty answer:\n{answer.error}")
    elif isinstance(answer.values[0], str):
        findings.problems.append(f"reward {reward} gave {answer.values[0]}, which is no number")
    else:
        findings.reward = answer.values[0]


def _try_workflow(question: Question, findings: Findings) -> None:
    from penstock.rollout.workflows import find_workflow

    try:
        find_workflow(question.workflow)
    except ConfigError as error:
        findings.problems.append(_explained(f"workflow: {error}", error, question))


def _look_at_stage(entry: JsonObject, question: Question, findings: Findings) -> None:
    from penstock.config.pipeline import PipelineStageConfig
    from penstock.trainer.pipeline.functions import find_function

    try:
        find_function(PipelineStageConfig.model_validate(entry))
    except ConfigError as error:
        findings.problems.append(_explained(f"pipeline: {error}", error, question))


def _explained(text: str, error: ConfigError, question: Question) -> str:
    """Our message, and under it the user's own traceback when their module broke, or where we
    looked when there is none."""
    cause = error.__cause__
    if cause is None:
        return text
    if isinstance(cause, ModuleNotFoundError) and _is_asked(cause.name or "", question):
        folders = ", ".join([*question.python_path, "the installed packages"])
        return f"{text}; looked in {folders}"
    return f"{text}\n{_theirs(cause)}"


def _is_asked(module: str, question: Question) -> bool:
    """The config names this module (or one inside it), rather than the user's own code."""
    functions = (question.reward, question.workflow, *(str(s["fn"]) for s in question.stages))
    named = [where for _, where, _ in question.sources] + [f.partition(":")[0] for f in functions]
    return any(f"{name}.".startswith(f"{module}.") for name in named)


def _theirs(error: BaseException) -> str:
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_OURS)
    ]
    lines = traceback.format_list(frames) + traceback.format_exception_only(error)
    return "".join(lines).rstrip()


def main() -> None:
    from penstock.wire.codec import JSON, decode, encode_json

    answers = os.dup(1)
    os.dup2(2, 1)
    question = decode(sys.stdin.buffer.read(), Question, media_type=JSON)
    sys.path[:0] = question.python_path
    os.write(answers, encode_json(probe(question)))


if __name__ == "__main__":
    main()
