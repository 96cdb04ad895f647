# SPDX-License-Identifier: Apache-2.0
"""Starts and retires single nodes: through the launcher, or with commands of the user.

Owns the child processes of those commands. Decides nothing; waits for nothing but at the end."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from penstock.errors import LaunchError
from penstock.fleet.launchers.local import LocalLauncher
from penstock.fleet.services import ServiceSpec

COMMAND_TIMEOUT_S = 120.0
"""Schedulers answer at once; a command that hangs is killed."""
CLOSE_TIMEOUT_S = 30.0
KILLED_S = 60.0
"""A killed process is gone at once, unless its disk hangs."""
POLL_S = 0.05


class Hands(Protocol):
    def start(self, number: int) -> str:
        """Begin to start a node, and return its name. LaunchError if it cannot be started."""
        ...

    def retire(self, name: str) -> None:
        """Begin to end a node; it returns its work first. Again has no effect."""
        ...

    def failed(self) -> Mapping[str, str]:
        """Nodes whose start failed since the last call, and why."""
        ...

    def close(self) -> None: ...


class LauncherHands:
    """Nodes on this machine, as children of the launcher."""

    def __init__(self, launcher: LocalLauncher, make_node: Callable[[int], ServiceSpec]) -> None:
        """`make_node`: the node of this index; raises LaunchError if there is no device for it."""
        self._launcher = launcher
        self._make_node = make_node

    def start(self, number: int) -> str:
        """The number does not matter: nodes are named like replicas, and the first free name, with
        its devices, is used again."""
        num_taken = len(self._launcher.nodes()) + len(self._launcher.drained)
        node = next(node for index in range(num_taken + 1) if (node := self._free(index)))
        self._launcher.add(node)
        return node.name

    def _free(self, index: int) -> ServiceSpec | None:
        node = self._make_node(index)
        taken = self._launcher.nodes().keys() | self._launcher.drained
        return None if node.name in taken else node

    def retire(self, name: str) -> None:
        self._launcher.retire(name)

    def failed(self) -> Mapping[str, str]:
        """The launcher restarts what fails, and ends the run if that does not help."""
        return {}

    def close(self) -> None:
        """The launcher stops its children."""


@dataclass(slots=True)
class _Running:
    """One command that runs."""

    name: str
    is_start: bool
    child: subprocess.Popen[bytes]
    give_up_at: float


@dataclass(slots=True, kw_only=True)
class CommandHands:
    """Nodes of one type, by the user's commands: Slurm, kubectl, a cloud's own tool."""

    node_type: str
    start_command: Sequence[str]
    stop_command: Sequence[str]
    placeholders: Callable[[str], Mapping[str, str]]
    """Values for the node of this name; makes its token."""
    env: Mapping[str, str]
    work_dir: Path
    log: Path
    """Output of the commands."""
    _running: list[_Running] = field(default_factory=list[_Running])
    _failed: dict[str, str] = field(default_factory=dict[str, str])
    _stopped: set[str] = field(default_factory=set[str])

    def start(self, number: int) -> str:
        name = f"{self.node_type[:48]}-{number}"
        self._run(name, self.start_command, is_start=True)
        return name

    def retire(self, name: str) -> None:
        if name not in self._stopped:
            self._run(name, self.stop_command, is_start=False)
            self._stopped.add(name)

    def failed(self) -> Mapping[str, str]:
        self._reap(time.monotonic())
        found, self._failed = self._failed, {}
        return found

    def close(self) -> None:
        give_up_at = time.monotonic() + CLOSE_TIMEOUT_S
        while self._running and time.monotonic() < give_up_at:
            self._reap(time.monotonic())
            time.sleep(POLL_S)
        self._reap(float("inf"))

    def _run(self, name: str, template: Sequence[str], *, is_start: bool) -> None:
        values = self.placeholders(name)
        command = [word.format_map(values) for word in template]
        try:
            with self.log.open("ab") as out:
                child = subprocess.Popen(
                    command,
                    env=self.env,
                    cwd=self.work_dir,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                )
        except OSError as error:
            raise LaunchError(
                f"cannot run {command[0]}, the {'start' if is_start else 'stop'} command of node "
                f"type {self.node_type}: {error}; correct autoscale.node_types in the run file"
            ) from error
        give_up_at = time.monotonic() + COMMAND_TIMEOUT_S
        self._running.append(_Running(name, is_start, child, give_up_at))

    def _reap(self, now: float) -> None:
        for one in [*self._running]:
            code = one.child.poll()
            if code is None and now > one.give_up_at:
                one.child.kill()
                code = one.child.wait(timeout=KILLED_S)
            if code is None:
                continue
            self._running.remove(one)
            if code and one.is_start:
                self._failed[one.name] = f"its start command exited with {code}; see {self.log}"
            elif code:
                self._stopped.discard(one.name)  # so that it is tried again
