# SPDX-License-Identifier: Apache-2.0
"""Runs the user's code once in a separate process, step by step, each with a time limit.

Owns the process and its end: killed by itself at the deadline, with its stack, and by us soon after
if it could not. Imports no code of the user."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import IO

from penstock.config import CommandWorkflow, RunConfig
from penstock.config.models import ENGINES_PACKAGE
from penstock.config.sources import WORKFLOWS, workflow_name
from penstock.plugins import builtin_names
from penstock.runs.check_problem import CheckProblem, located
from penstock.runs.probe_process import IMPORT_DEADLINE_S
from penstock.runs.probe_report import (
    INTERNAL_PATHS,
    ProbeMessage,
    ProbeRequest,
    ProbeResult,
    short_path,
)
from penstock.runs.target import RunTarget
from penstock.wire.codec import JSON, decode, encode_json

DEADLINE_S = 30.0
"""Time limit of each step: importing a module of the user and calling it once."""
CHECK_ENV = "PENSTOCK_CHECK"
"""Set while the user's code is checked, so that it can leave out effects that must not happen."""
KILL_AFTER_S = 10.0
"""How long after its deadline a process is killed that could not end itself."""


def run_probe(
    target: RunTarget,
    *,
    deadline_s: float | None = None,
    with_loss: bool = True,
    on_step: Callable[[str], None] | None = None,
) -> ProbeResult:
    """Run rules, sources, workflow, reward and stages once and collect the problems.

    deadline_s: most seconds for each step; DEADLINE_S if None. with_loss: go on to a loss on a tiny
    batch, which imports torch. on_step: called with the name of each step as it begins."""
    deadline_s = DEADLINE_S if deadline_s is None else deadline_s
    with tempfile.TemporaryFile() as stacks:
        request = ProbeRequest(
            config=target.config.model_dump(mode="json"),
            python_path=[*target.python_path],
            deadline_s=deadline_s,
            stack_fd=stacks.fileno(),
            with_loss=with_loss,
        )
        last, exit_code = _run(request, on_step or (lambda step: None))
        result = last.result
        if last.step:
            stacks.seek(0)
            stack = stacks.read().decode(errors="replace")
            result.problems.append(_ended_early(last, exit_code, stack, deadline_s))
    return replace(result, problems=[located(problem, target) for problem in result.problems])


def _run(request: ProbeRequest, on_step: Callable[[str], None]) -> tuple[ProbeMessage, int]:
    """The last message of the process, and its exit code."""
    last = ProbeMessage(step="start", result=ProbeResult())
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.runs.probe_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(request.stack_fd,),
        env={**os.environ, CHECK_ENV: "1"},
    )
    with process:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(encode_json(request))
            process.stdin.close()
            for last in _messages(process.stdout, request.deadline_s):
                if last.step:
                    on_step(last.step)
        except BrokenPipeError:
            pass  # it ended before it read the request
        finally:
            if last.step:
                _end(process)
    return last, process.returncode


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill it, unless it is about to end by itself with an exit code that tells more."""
    try:
        process.wait(timeout=1.0)
    except subprocess.TimeoutExpired:
        process.kill()


def _messages(pipe: IO[bytes], deadline_s: float) -> Iterator[ProbeMessage]:
    """The messages of a process until its end, or until a step is over its deadline."""
    buffer = b""
    give_up_at = time.monotonic() + IMPORT_DEADLINE_S
    while True:
        left_s = give_up_at - time.monotonic()
        ready, _, _ = select.select([pipe], [], [], max(0.0, left_s))
        chunk = os.read(pipe.fileno(), 1 << 16) if ready else b""
        if not chunk:
            return
        *complete, buffer = (buffer + chunk).split(b"\n")
        for line in complete:
            message = decode(line, ProbeMessage, media_type=JSON)
            limit_s = deadline_s if message.key else IMPORT_DEADLINE_S
            give_up_at = time.monotonic() + limit_s + KILL_AFTER_S
            yield message


def _ended_early(last: ProbeMessage, exit_code: int, stack: str, deadline_s: float) -> CheckProblem:
    frames = _user_frames(stack)
    if stack or exit_code == -9:
        at = f"; it hangs at {frames[0]}" if frames else ""
        return CheckProblem(
            key=last.key,
            text=f"{last.step} took longer than {deadline_s:g} s{at}; make it faster, since every "
            "service calls it too, or give it more time (check --deadline, run --check-deadline)",
            code=frames[0] if frames else "",
            detail="\n".join(f"  {frame}" for frame in frames[:8]),
        )
    return CheckProblem(
        key=last.key,
        text=f"{last.step} ended its process (exit code {exit_code}); remove calls such as "
        "sys.exit() and os._exit(), and check compiled extensions",
    )


def _user_frames(stack: str) -> list[str]:
    """FILE:LINE in FUNCTION of the user's frames in a dump of faulthandler, innermost first."""
    found = re.findall(r'File "(.+)", line ([0-9]+) in (.+)', stack)
    return [
        f"{short_path(path)}:{line} in {function}"
        for path, line, function in found
        if not path.startswith((*INTERNAL_PATHS, os.path.dirname(os.__file__)))
        and "/site-packages/" not in path
    ]


def has_user_code(config: RunConfig) -> bool:
    """Whether the config names any code outside penstock."""
    workflows = [config.workflow_of(source) for source in config.sources]
    if any(isinstance(workflow, CommandWorkflow) for workflow in workflows):
        return True
    rules = [*config.dataflow.rules]
    for model in config.models.values():
        rules += model.dataflow.rules if model.dataflow else ()
    engines = builtin_names(ENGINES_PACKAGE)
    named = [
        *(source.task or "data" for source in config.sources if source.session is None),
        *(config.reward_of(source) for source in config.sources),
        *(name for name in map(workflow_name, workflows) if name not in WORKFLOWS),
        *(stage.fn for stage in (config.pipeline.stages if config.pipeline else ())),
        *(rule.name for rule in rules if not rule.is_builtin),
        *(model.engine for model in config.models.values() if model.engine not in engines),
    ]
    return any(name and not name.startswith("penstock.") for name in named)


def has_user_stages(config: RunConfig) -> bool:
    """Whether the training graph runs functions outside penstock."""
    stages = config.pipeline.stages if config.pipeline else ()
    return any(stage.fn and not stage.fn.startswith("penstock.") for stage in stages)
