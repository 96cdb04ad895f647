# SPDX-License-Identifier: Apache-2.0
"""Runs the workflow once on a scripted answer, through the gateway and attempts of a node.

Owns the scripted model and the verdict on the attempt: what the user must mend, and what may happen
with a real model too and is only worth a note."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from penstock.dataflow.service.nodes.messages import RunInfo
from penstock.errors import EngineError
from penstock.gateway.gateway import Gateway
from penstock.gateway.generation import Completion, GenerationRequest
from penstock.gateway.renderer import Renderer
from penstock.rollout.engines.scripted import ScriptedEngine
from penstock.rollout.isolation import Isolation, IsolationSettings
from penstock.rollout.workflows import find_workflow
from penstock.runs.local_rollouts import local_rollouts
from penstock.runs.probe_report import (
    INTERNAL_PATHS,
    Reporter,
    code_of_frames,
    code_of_object,
    short_path,
)
from penstock.types import (
    FailureKind,
    Outcome,
    OutcomeKind,
    PolicyName,
    SamplingSpec,
    Task,
    Trajectory,
    Version,
)

ANSWER = "abc"
"""The scripted answer: letters that every tokenizer has."""
MAX_CALLS = 64
"""Model calls after which the scripted model ends an attempt; some workflows call until an answer
suits them."""
ANSWER_ERRORS = (ValueError, LookupError, AssertionError)
"""Raised after an answer, these may come from parsing it; a real model may answer better."""
_ENDLESS = "the scripted model gives no more answers"


@dataclass(slots=True)
class ScriptedModel:
    """Gives every policy the same short answer, in the tokens of that policy."""

    num_calls: int = 0
    _engines: dict[PolicyName, ScriptedEngine] = field(
        default_factory=dict[PolicyName, ScriptedEngine]
    )

    async def add(self, policy: PolicyName, renderer: Renderer, folder: Path) -> None:
        ids = [*renderer.encode(ANSWER), *sorted(renderer.stop_ids)[:1]]

        def script(prompt_ids: object, sampling: SamplingSpec) -> list[int]:
            return ids

        self._engines[policy] = ScriptedEngine(script)
        await self._engines[policy].load(folder, Version(policy=policy, incarnation=1, number=0))

    async def __call__(self, request: GenerationRequest) -> Completion:
        self.num_calls += 1
        if self.num_calls > MAX_CALLS:
            raise EngineError(f"{_ENDLESS} after {MAX_CALLS} calls")
        return await self._engines[request.policy](request)


@dataclass(slots=True)
class _CompletionCatcher:
    """Stands in for the reward, which is called in a later step."""

    completion: str | None = None

    async def score(self, completion: str, task: Task) -> float:
        self.completion = completion
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedRollout:
    trajectory: Trajectory
    completion: str | None
    """What the reward would get; None if the workflow gave the reward itself."""
    hangs_at: str
    """FILE:LINE that the workflow waited at shortly before its deadline; empty if it did not."""


def run_scripted(
    run_info: RunInfo,
    task: Task,
    folders: Mapping[PolicyName, Path],
    *,
    has_reward: bool,
    deadline_s: float,
    isolation: IsolationSettings,
) -> ScriptedRollout:
    """One attempt at the task. Raises WeightsError or EngineError for an unusable model folder."""
    attempt = _run_scripted(run_info, task, folders, has_reward, deadline_s, isolation)
    return asyncio.run(attempt)


async def _run_scripted(
    run_info: RunInfo,
    task: Task,
    folders: Mapping[PolicyName, Path],
    has_reward: bool,
    deadline_s: float,
    isolation: IsolationSettings,
) -> ScriptedRollout:
    model, catcher = ScriptedModel(), _CompletionCatcher()
    gateway = Gateway(model)
    for policy, folder in folders.items():
        renderer = Renderer.load(folder)
        gateway.set_renderer(policy, renderer)
        await model.add(policy, renderer, folder)
    limited = replace(run_info, start_to_close_s=deadline_s)
    scorer = catcher if has_reward else None
    hangs_at: list[str] = []
    async with local_rollouts(limited, gateway, scorer, Isolation(isolation)) as rollout:
        attempt = asyncio.ensure_future(rollout(task, 0))
        loop = asyncio.get_running_loop()
        watch = loop.call_later(
            0.8 * deadline_s, lambda: hangs_at.append(_awaited_at(attempt.get_coro()))
        )
        try:
            trajectory = await attempt
        finally:
            watch.cancel()
    return ScriptedRollout(
        trajectory=trajectory, completion=catcher.completion, hangs_at="".join(hangs_at[:1])
    )


def _awaited_at(coroutine: Any) -> str:
    """FILE:LINE of the user's innermost frame that is suspended."""
    frames = [
        f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno}"
        for frame in _suspended_frames(coroutine)
        if not frame.f_code.co_filename.startswith(INTERNAL_PATHS)
    ]
    return frames[-1] if frames else ""


def _suspended_frames(coroutine: Any) -> Iterator[FrameType]:
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None)
        if frame is not None:
            yield frame
        coroutine = getattr(coroutine, "cr_await", None)


def judge_rollout(
    rollout: ScriptedRollout, name: str, key: str, reporter: Reporter, deadline_s: float
) -> bool:
    """Report what is wrong with an attempt; True if it can be scored and trained."""
    outcome = rollout.trajectory.outcome
    is_timeout = outcome.reason in (FailureKind.DEADLINE, "deadline")
    if is_timeout:
        waits = f"; it waits at {rollout.hangs_at}" if rollout.hangs_at else ""
        reporter.add(
            key,
            f"workflow {name} did not end within {deadline_s:g} s on a scripted answer{waits}; "
            "make it end, or give it more time (check --deadline, run --check-deadline)",
            code=rollout.hangs_at or _code_of_workflow(name),
        )
        return False
    if outcome.kind is not OutcomeKind.FAILED:
        return True
    if outcome.reason == FailureKind.ENGINE and _ENDLESS in outcome.detail:
        reporter.result.notes.append(
            f"{key}: workflow {name} still called the model after {MAX_CALLS} scripted answers "
            f"({ANSWER!r}); the check stopped it there, and did not check reward and loss"
        )
    elif _may_be_the_answer(rollout.trajectory, name):
        reporter.result.notes.append(
            f"{key}: workflow {name} raised on the scripted answer {ANSWER!r}; such attempts are "
            f"recorded as failed, without a reward\n{outcome.detail}"
        )
    elif outcome.reason == FailureKind.REWARD:
        reporter.add("reward", outcome.detail)
    elif outcome.reason == FailureKind.SANDBOX:
        reporter.add("sandbox", outcome.detail)
    elif outcome.reason == FailureKind.ENVIRONMENT:
        reporter.add("sources", outcome.detail)
    else:
        _add_failure(outcome, name, key, reporter)
    return False


def _add_failure(outcome: Outcome, name: str, key: str, reporter: Reporter) -> None:
    detail = outcome.detail
    raised_at = code_of_frames(detail)
    first = next(iter(_exception_lines(detail)), detail)
    text = f"workflow {name} failed on its first task: {first}"
    if "takes" in first and "positional argument" in first and not raised_at:
        fix = "write `async def run(task, ctx)`"
    elif "without a model answer" in first:
        fix = "call the model with `await ctx.policy().chat(messages)`"
    elif ";" in first:
        fix = ""
    else:
        fix = "mend it, since every attempt would fail"
    reporter.add(
        key,
        f"{text}; {fix}" if fix else text,
        code=raised_at or _code_of_workflow(name),
        detail=detail if "\n" in detail else "",
    )


def _code_of_workflow(name: str) -> str:
    return code_of_object(find_workflow(name)) if ":" in name and name[:1] != "[" else ""


def _exception_lines(detail: str) -> Iterator[str]:
    """The lines after the frames of a traceback."""
    for line in detail.splitlines():
        if not line.startswith((" ", "File ")):
            yield line


def _may_be_the_answer(trajectory: Trajectory, name: str) -> bool:
    """Whether the workflow received an answer and raised what parsing it may raise. Of a program
    only its exit code is known."""
    if not any(turn.reached_agent for turn in trajectory.turns):
        return False
    line = next(_exception_lines(trajectory.outcome.detail), "")
    if name.startswith("[") or "` exited with code " in line:
        return True
    module, _, name = line.partition(":")[0].strip().rpartition(".")
    kind = getattr(sys.modules.get(module or "builtins"), name, None)
    return isinstance(kind, type) and issubclass(kind, ANSWER_ERRORS)
