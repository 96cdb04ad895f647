# SPDX-License-Identifier: Apache-2.0
"""Runs one service as a child of a Ray worker: what an actor of the Ray launcher does.

Owns the process group of the service, which dies with the worker, and the worker with its raylet:
Ray's own workers outlive a raylet that is killed. Holds no state of the run."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.fleet import processes
from penstock.fleet.process_state import pid_space

POLL_S = 0.05


class ServiceKeeper:
    """All methods are coroutines, so Ray calls them in one thread, which lives as long as the
    worker. The kernel's parent-death signal is tied to that thread. Ray promises no order."""

    def __init__(self) -> None:
        self._raylet = os.getppid()
        self._reaper = processes.OrphanReaper()
        self._child: asyncio.Future[subprocess.Popen[bytes]] | None = None

    async def start(
        self, command: Sequence[str], env: Mapping[str, str], work_dir: str, log: str
    ) -> tuple[str, int]:
        """Start the service; returns its process, and the table of processes that it is in."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        child = processes.start(
            (sys.executable, *command),
            env={**own, **env},
            cwd=Path(work_dir) if os.path.isdir(work_dir) else None,  # noqa: ASYNC240 - local
            log=Path(log),
        )
        self._reaper.add(child.pid)
        self._started().set_result(child)
        return pid_space(), child.pid

    async def wait(self) -> int:
        """The exit code of the service.

        waits for: its end · ended by: the service, or `send`"""
        child = await self._started()
        while (code := processes.reap(child)) is None:
            if os.getppid() != self._raylet:
                processes.signal_group(child.pid, signal.SIGKILL)
                os._exit(1)
            await asyncio.sleep(POLL_S)
        self._reaper.remove(child.pid)
        return code

    async def send(self, number: int) -> None:
        """SIGKILL goes to all of the process group, other signals to the service."""
        child = await self._started()
        if child.returncode is None and number == signal.SIGKILL:
            processes.signal_group(child.pid, signal.SIGKILL)
        elif child.returncode is None:
            child.send_signal(number)

    def _started(self) -> asyncio.Future[subprocess.Popen[bytes]]:
        if self._child is None:
            self._child = asyncio.get_running_loop().create_future()
        return self._child
