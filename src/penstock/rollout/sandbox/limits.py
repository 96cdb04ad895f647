# SPDX-License-Identifier: Apache-2.0
"""The weak back ends: `limits` for the owner's own code where no walls can be had, and `none`.

`limits` gives resource limits, a session and a clean environment; as root, also a separate user.
It hides neither files nor network. Without root and control groups, a program that makes a new
session can outlive its sandbox. `none` gives a folder, the wall clock and the limit of output.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from penstock.rollout.sandbox.cgroups import Parents, find_parents
from penstock.rollout.sandbox.child import start_child
from penstock.rollout.sandbox.folders import FolderSandbox, remove_stale_folders
from penstock.rollout.sandbox.namespaces import draw_uid
from penstock.rollout.sandbox.program import Program
from penstock.rollout.sandbox.types import Level, SandboxSpec
from penstock.rollout.sandbox.walls import (
    HOST_PATH,
    INNER_ENV,
    command_line,
    join_command,
    limit_commands,
)

_OWN_PROCESSES = 2


@dataclass(slots=True)
class LimitsBackend:
    has_own_user: bool = True
    """As root: programs run as a separate user, and so cannot read the node's private files."""
    parents: Parents = field(default_factory=find_parents)
    name: str = "limits"
    level: Level = Level.LIMITS

    def __post_init__(self) -> None:
        self.parents.reap()
        remove_stale_folders()

    def create(self, spec: SandboxSpec) -> LimitsSandbox:
        owner = draw_uid() if self.has_own_user else -1
        return LimitsSandbox(spec=spec, owner=owner, parents=self.parents)


@dataclass(slots=True)
class NoneBackend:
    """Only by explicit choice."""

    name: str = "none"
    level: Level = Level.NONE

    def create(self, spec: SandboxSpec) -> LimitsSandbox:
        return LimitsSandbox(spec=spec, parents=None)


@dataclass(slots=True, kw_only=True)
class LimitsSandbox(FolderSandbox):
    parents: Parents | None
    """None: no limits of memory, processes and CPU time."""
    _running: set[int] = field(default_factory=set[int])

    async def start(self) -> None:
        await FolderSandbox.start(self)
        if self.parents is not None:
            self._group = self.parents.create(self.spec.limits, _OWN_PROCESSES)

    async def exec(self, argv: Sequence[str], *, env: Mapping[str, str] = {}) -> Program:
        places = {
            "HOME": str(self.path / "work"),
            "PENSTOCK_SECRETS": str(self.path / "secrets"),
            "PENSTOCK_SOCKETS": str(self.path / "sockets"),
        }
        line = command_line(argv, {**INNER_ENV, **places, **self.spec.env, **env})
        command = [*join_command(self._group.joins), *self._become_user(), *self._launcher()]
        cwd = str(self.path / "work")
        child = await start_child(command, env={"PATH": HOST_PATH}, cwd=cwd)
        child.stdin.write(line)
        self._running.add(child.pid)
        program = Program(
            _child=child,
            _limits=self.spec.limits,
            _group=self._group,
            _kill=lambda: self._kill_all(child.pid),
            _wait_gone=_already_gone,
        )
        self._programs.append(program)
        return program

    def _become_user(self) -> list[str]:
        user = [f"--reuid={self.owner}", f"--regid={self.owner}", "--clear-groups"]
        user = [*user, "--inh-caps=-all", "--bounding-set=-all"] if self.owner >= 0 else []
        return ["setpriv", *user, "--no-new-privs", "--pdeathsig=KILL", "--"]

    def _launcher(self) -> list[str]:
        script = 'IFS= read -r line && eval "$line"'
        if self.parents is not None:
            has_memory = self.parents.has_memory
            limits = limit_commands(self.spec.limits, has_memory_group=has_memory)
            script = f"{limits} && {script}"
        return ["/bin/sh", "-c", script]

    def _kill_all(self, pid: int) -> None:
        """The session of the program; with the last program also the control group and, as root,
        all processes of the user."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        self._running.discard(pid)
        if self._running:
            return
        self._group.kill()
        if self.owner >= 0:
            user = [f"--reuid={self.owner}", f"--regid={self.owner}", "--clear-groups"]
            kill = ["sh", "-c", "kill -KILL -1"]
            subprocess.run(["setpriv", *user, *kill], check=False, capture_output=True)


async def _already_gone() -> None:
    """A control group can be removed only after its last process."""
