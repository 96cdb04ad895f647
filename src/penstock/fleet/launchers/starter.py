# SPDX-License-Identifier: Apache-2.0
"""What starts the services of a run for their launcher, and the starter for this machine.

Owns the process groups of services here. `ray_cluster` and `ssh` start them on other hosts."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from penstock.errors import LaunchError
from penstock.fleet import processes
from penstock.fleet.fork_server import ForkServer
from penstock.fleet.services import CLI, ServiceSpec

EXIT_HOST_LOST = 1000
"""In place of an exit code: the host of a service is gone, or cannot be reached. The service
did not fail. A copy of it may still run there; its epoch fences it."""


class Child(Protocol):
    """A service that was started once."""

    @property
    def pid(self) -> int | None:
        """Its process group; None if it is on another machine, or not placed yet."""
        ...

    def exit_code(self) -> int | None:
        """None while it runs. Once it has exited, nothing of its process group is left."""
        ...

    def terminate(self) -> None:
        """SIGTERM; the service stops its own children."""
        ...

    def kill(self) -> None:
        """SIGKILL to its process group."""
        ...


class Starter(Protocol):
    """What starts services: here, on a Ray cluster, by ssh."""

    def start(self, service: ServiceSpec, log: Path) -> Child:
        """Start it, or have it started as soon as there is a place. LaunchError if that is
        impossible."""
        ...

    def check(self) -> None:
        """Called at short intervals. LaunchError if nothing can be started any more."""
        ...

    def close(self) -> None:
        """The last call: every child has exited."""
        ...


class LocalStarter:
    """Children that die with this process, and whose own children do too."""

    def __init__(
        self, work_dir: Path | None = None, *, fork_server: ForkServer | None = None
    ) -> None:
        self._work_dir = work_dir
        self._fork_server = fork_server
        self._reaper = processes.OrphanReaper()

    def start(self, service: ServiceSpec, log: Path) -> LocalChild:
        env, child = service.build_env(), None
        try:
            if self._fork_server is not None and service.preload:
                child = self._fork_server.start(
                    service.command[len(CLI) :],
                    env=env,
                    cwd=self._work_dir,
                    log=log,
                    preload=service.preload,
                )
            if child is None:
                child = processes.start(service.command, env=env, cwd=self._work_dir, log=log)
        except OSError as error:
            raise LaunchError(f"cannot start {service.name}: {error}") from error
        self._reaper.add(child.pid)
        return LocalChild(child, on_exit=self._reaper.remove)

    def check(self) -> None:
        """This machine is always there."""
        if self._fork_server is not None:
            self._fork_server.free_memory()

    def close(self) -> None:
        self._reaper.close()
        if self._fork_server is not None:
            self._fork_server.close()


class LocalChild:
    def __init__(self, child: processes.Child, *, on_exit: Callable[[int], None]) -> None:
        self._child = child
        self._on_exit = on_exit

    @property
    def pid(self) -> int:
        return self._child.pid

    def exit_code(self) -> int | None:
        code = processes.reap(self._child)
        if code is not None:
            self._on_exit(self._child.pid)
        return code

    def terminate(self) -> None:
        self._child.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        processes.signal_group(self._child.pid, signal.SIGKILL)
