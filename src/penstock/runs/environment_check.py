# SPDX-License-Identifier: Apache-2.0
"""Whether the environments of a run can start here, for `penstock check` and before a start.

Owns the wording of what is missing. Starts no bridge; the probe of the workflow does."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from penstock.config import RunConfig
from penstock.config.environments import EnvironmentConfig
from penstock.rollout.environments.environments import environment_python
from penstock.runs.check_problem import CheckProblem


def environment_problems(config: RunConfig) -> Iterator[CheckProblem]:
    """Programs and virtual environments that are missing."""
    for index, source in enumerate(config.sources):
        missing = None if source.env is None else missing_environment(source.env)
        if missing is not None:
            key, text = missing
            yield CheckProblem(key=f"sources[{index}].env.{key}", text=text)


def missing_environment(env: EnvironmentConfig) -> tuple[str, str] | None:
    """The key below `env`, and what it needs that is not here; None if all is."""
    if env.command is not None:
        if shutil.which(env.command[0]) is not None:
            return None
        text = f"program {env.command[0]!r} not found; install it or use its full path"
        return "command", text
    own = Path(env.python).expanduser() if env.python else None
    python = own or environment_python(env.library)
    if os.access(python, os.X_OK):
        return None
    fix = f"name the interpreter of an environment that has {env.library}"
    if own is None:
        fix = f"run `make setup-envs`, or {fix} under env.python"
    what = f"needs {env.library}, and {python} does not exist"
    return "python" if own else env.library, f"{what}; {fix}"
