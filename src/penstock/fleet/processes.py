# SPDX-License-Identifier: Apache-2.0
"""Process groups on Linux: start, reap, signal, and die with the parent.

Owns the system calls. The launcher decides what to start, restart or stop.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from penstock.fleet import orphan_reaper

PARENT_PID_ENV = "PENSTOCK_PARENT_PID"
"""Set by a launcher for its children: the process whose death ends them."""
_PR_SET_PDEATHSIG = 1
REAPER_EXIT_S = 10.0
"""The orphan reaper exits at the end of its pipe."""


class Child(Protocol):
    """A child process; a `Popen` is one."""

    pid: int

    @property
    def returncode(self) -> int | None: ...
    def wait(self) -> int: ...
    def send_signal(self, sig: int, /) -> None: ...


@dataclass(slots=True)
class ForkedChild:
    """A child that this process adopted; see `fork_server`."""

    pid: int
    returncode: int | None = None

    def wait(self) -> int:
        if self.returncode is None:
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, sig: int, /) -> None:
        if self.returncode is None:  # until then its id cannot be reused
            os.kill(self.pid, sig)


def exit_with_parent() -> None:
    """Make the kernel kill this process when its launcher dies, even by SIGKILL.

    Every service calls it first. Does nothing in a service that was started by hand."""
    parent = os.environ.get(PARENT_PID_ENV, "")
    if not parent.isdigit():
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # the parent died before prctl
        os._exit(1)


def start(
    command: Sequence[str], *, env: Mapping[str, str], cwd: Path | None, log: Path
) -> subprocess.Popen[bytes]:
    """Start a child in a new session and process group; its output is appended to a log file."""
    with log.open("ab") as out:
        return subprocess.Popen(
            command,
            env={**env, PARENT_PID_ENV: str(os.getpid())},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )


def reap(child: Child) -> int | None:
    """The exit code if the child has exited, else None. Kills the rest of its process group.

    The group is killed before the child is waited for: until then its id cannot be reused."""
    if child.returncode is None:
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        if os.waitid(os.P_PID, child.pid, flags) is None:
            return None
        signal_group(child.pid, signal.SIGKILL)
    return child.wait()


def signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


class OrphanReaper:
    """The launcher's end of the pipe to `orphan_reaper.py`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", orphan_reaper.__file__],
            stdin=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )

    def add(self, group: int) -> None:
        self._send(f"+{group}\n")

    def remove(self, group: int) -> None:
        self._send(f"-{group}\n")

    def close(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=REAPER_EXIT_S)
        except subprocess.TimeoutExpired:  # suspended; it has nothing left to end
            self._process.kill()
            self._process.wait(timeout=REAPER_EXIT_S)

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the reaper was killed; PDEATHSIG still ends children
            self._process.stdin.write(line)
            self._process.stdin.flush()


def cpu_s() -> float:
    """CPU seconds of this process and of its reaped children."""
    both = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)
