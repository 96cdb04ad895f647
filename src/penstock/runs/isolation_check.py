# SPDX-License-Identifier: Apache-2.0
"""Which isolation this machine gives to a run, for `penstock check` and before a start.

Owns the wording. A run whose commands could not start is a problem; a reward that falls back to
limits is a note."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from penstock.config import CommandWorkflow, RunConfig
from penstock.errors import SandboxError
from penstock.rollout.isolation import Isolation, IsolationSettings, Use
from penstock.rollout.sandbox.types import Backend, Level
from penstock.runs.check_problem import CheckProblem
from penstock.runs.sandbox_settings import isolation_settings
from penstock.scorers.code import REWARD as CODE_REWARD

_WALLS = {
    Level.NONE: "none: they are ordinary processes of this user",
    Level.LIMITS: "limits: bounded resources and a clean environment, but the files and network of "
    "this machine",
    Level.NAMESPACES: "namespaces: own files, processes, user and network",
    Level.GVISOR: "gvisor: own files, processes, user, network and kernel",
}

_PER_FILE = (
    "disk_mb holds for each file, not for all together, because containers of a node that is not "
    "root have no separate file system; use bubblewrap, or start the node as root"
)


def isolation_problems(config: RunConfig, folder: Path) -> Iterator[CheckProblem]:
    """Why code of this run could not start here."""
    settings = isolation_settings(config, folder)
    has_places = settings.backend in ("auto", "bubblewrap")
    if any(source.harbor is not None for source in config.sources) and not has_places:
        text = f"Harbor tasks need folders that the sandbox {settings.backend} does not have; use "
        yield CheckProblem(key="sandbox.backend", text=f"{text}auto")
    for use in _uses(config):
        found = _backend(settings.backend, settings.image, settings.demand, use)
        if isinstance(found, str):
            yield CheckProblem(key="sandbox", text=f"for {_WHAT[use]}: {found}")
            return


def isolation_notes(config: RunConfig, folder: Path) -> Iterator[str]:
    """What keeps code of this run apart from this machine."""
    settings = isolation_settings(config, folder)
    for use in _uses(config):
        found = _backend(settings.backend, settings.image, settings.demand, use)
        if not isinstance(found, str):
            yield f"isolation of {_WHAT[use]}: {found.name}, level {_WALLS[found.level]}"
            if found.name == "container" and os.geteuid() != 0:
                yield f"isolation of {_WHAT[use]}: {_PER_FILE}"


_WHAT = {
    Use.REWARD: "rewards",
    Use.WORKFLOW: "workflow commands",
    Use.TOOLS: "tools and graders",
    Use.SERVERS: "tool servers",
    Use.ENVIRONMENT: "environments",
}


def _uses(config: RunConfig) -> tuple[Use, ...]:
    """What this run certainly does; whether a workflow function uses tools, only it knows."""
    workflows = [config.workflow_of(source) for source in config.sources]
    has_command = any(isinstance(workflow, CommandWorkflow) for workflow in workflows)
    has_command |= any(source.harbor is not None for source in config.sources)
    rewards = {config.reward_of(source) for source in config.sources} - {None}
    has_environment = any(source.env for source in config.sources)
    servers = config.tools.values()
    uses = {
        Use.WORKFLOW: has_command,
        Use.REWARD: bool(rewards - {CODE_REWARD}),
        Use.TOOLS: CODE_REWARD in rewards
        or any(server.builtin in ("python", "files") for server in servers),
        Use.SERVERS: any(server.command for server in servers),
        Use.ENVIRONMENT: has_environment,
    }
    return tuple(use for use, is_used in uses.items() if is_used)


@cache
def _backend(name: str, image: str, demand: Level | None, use: Use) -> Backend | str:
    """The back end, or why there is none."""
    settings = IsolationSettings(backend=name, image=image, demand=demand)
    try:
        return asyncio.run(Isolation(settings).backend(use))
    except SandboxError as error:
        return str(error)
