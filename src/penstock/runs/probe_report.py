# SPDX-License-Identifier: Apache-2.0
"""What the probe process receives and answers, and how it reports a failure of the user's code.

The probe sends one message when a step begins and one at its end, so that whatever ends the process
in a step, the parent knows which step it was and what was found before."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.runs.check_problem import CheckProblem
from penstock.types import JsonObject

INTERNAL_PATHS = (
    str(Path(__file__).parents[1]),
    str(Path(importlib.__file__).parent.parent / "asyncio"),
    str(Path(importlib.__file__).parent),
    "<frozen ",
)
"""Files whose frames say nothing to a user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    config: JsonObject
    """The run's config, as `RunConfig.model_dump(mode="json")`."""
    python_path: list[str]
    """Folders of the user's modules."""
    deadline_s: float
    """Most seconds for each step."""
    stack_fd: int
    """Where the stack of a step that passes its deadline is written."""
    with_loss: bool
    """Go on to a loss, which imports torch."""


@dataclass(slots=True, kw_only=True)
class ProbeResult:
    problems: list[CheckProblem] = field(default_factory=list[CheckProblem])
    notes: list[str] = field(default_factory=list[str])
    """What was not checked, or is unusual, and does not prevent a run."""
    tasks: dict[str, JsonObject] = field(default_factory=dict[str, JsonObject])
    """The first task of each source."""
    digests: dict[str, str] = field(default_factory=dict[str, str])
    """Digest of the tasks of each source, to detect a changed dataset."""
    rewards: dict[str, float] = field(default_factory=dict[str, float])
    """By reward function, the score of an empty completion of the first task."""
    losses: dict[str, float] = field(default_factory=dict[str, float])
    """The loss of each policy on a tiny batch."""
    cpu_s: float = 0.0
    """CPU seconds of the process, without `import_cpu_s`."""
    import_cpu_s: float = 0.0
    """CPU seconds to import torch and transformers; 0 if they were not needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeMessage:
    step: str
    """The step that begins; empty at the end."""
    key: str = ""
    """The config key that the step checks."""
    result: ProbeResult
    """Everything found before."""


class Reporter:
    """Collects what the steps find."""

    def __init__(self, python_path: Sequence[str], begin: Callable[[str, str], None]) -> None:
        """begin: called with the name and the config key of each step."""
        self.result = ProbeResult()
        self.begin = begin
        self._python_path = python_path

    def add(self, key: str, text: str, *, code: str = "", detail: str = "") -> None:
        """One problem; a module that several keys name fails once."""
        if detail and any(known.detail == detail for known in self.result.problems):
            return
        self.result.problems.append(CheckProblem(key=key, text=text, code=code, detail=detail))

    def add_error(
        self, key: str, text: str, error: BaseException, *, named: str = "", code: str = ""
    ) -> None:
        """An exception of the user's code. `named`: the module that the config names."""
        if (
            isinstance(error, ModuleNotFoundError)
            and error.name
            and f"{named}.".startswith(f"{error.name}.")
        ):
            folders = ", ".join([*self._python_path, "the installed packages"])
            return self.add(key, f"{text}; searched {folders}")
        self.add(key, text, code=code_of_error(error) or code, detail=user_traceback(error))

    def add_config_error(self, key: str, error: ConfigError, *, named: str = "") -> None:
        """Our message, with the user's traceback if their module failed, or with the folders we
        searched if it does not exist."""
        cause: BaseException | None = error.__cause__
        while isinstance(cause, ConfigError):
            cause = cause.__cause__
        if cause is None:
            self.add(key, str(error), code=code_of(named))
        else:
            self.add_error(key, str(error), cause, named=named.partition(":")[0])


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    return [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(INTERNAL_PATHS)
    ]


def user_traceback(error: BaseException) -> str:
    """Without frames of ours."""
    lines = traceback.format_list(user_frames(error)) + traceback.format_exception_only(error)
    return "".join(lines).rstrip()


def code_of_error(error: BaseException) -> str:
    """FILE:LINE of the user's frame that raised."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{short_path(error.filename)}:{error.lineno}"
    frames = user_frames(error)
    return f"{short_path(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""


def code_of_frames(detail: str) -> str:
    """FILE:LINE of the last frame of a traceback in text form; empty if there is none."""
    frames = re.findall(r'File "(.+)", line ([0-9]+)', detail)
    return f"{short_path(frames[-1][0])}:{frames[-1][1]}" if frames else ""


def code_of(name: str) -> str:
    """FILE:LINE where the object called `module:name` is defined; empty if that is unknown."""
    from penstock.plugins import load_object

    if ":" not in name:
        return ""
    try:
        return code_of_object(load_object(name))
    except ConfigError:
        return ""


def code_of_object(found: Any) -> str:
    found = inspect.unwrap(found)
    try:
        return f"{short_path(inspect.getfile(found))}:{inspect.getsourcelines(found)[1]}"
    except (TypeError, OSError):
        return ""


def short_path(path: str) -> str:
    """Relative to the working directory where it is inside it."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative
