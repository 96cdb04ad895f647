# SPDX-License-Identifier: Apache-2.0
"""Process groups and parenthood on Linux: start, look, end, and die with the parent.

Owns the system calls. Decides nothing: what to start, restart or stop is the launcher's business.
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
from pathlib import Path

from penstock.fleet import orphan_reaper

PARENT_PID_ENV = "PENSTOCK_PARENT_PID"
"""Set by a launcher for its children: the process they must not outlive."""
_PR_SET_PDEATHSIG = 1


def exit_with_parent() -> None:
    """Called first by every service: the kernel kills it when its launcher is gone, even by
    SIGKILL.

    Does nothing for a service started by hand."""
    parent = os.environ.get(PARENT_PID_ENV, "")
    if not parent.isdigit():
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # it died before the line above
        os._exit(1)


def start(
    command: Sequence[str], *, env: Mapping[str, str], cwd: Path | None, log: Path
) -> subprocess.Popen[bytes]:
    """A child in a session and process group of its own, writing to the end of a log file."""
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


def reap(child: subprocess.Popen[bytes]) -> int | None:
    """Exit code if the child has ended; then all that it left in its group is dead too.

    The group is killed before the child is waited for: until then its number cannot be reused."""
    if child.returncode is None:
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        if os.waitid(os.P_PID, child.pid, flags) is None:
            return None
        signal_group(child.pid, signal.SIGKILL)
    return child.wait()


def signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


class OrphanReaper:
    """Launcher's side of `guard.py`."""

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
        self._process.wait()

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except BrokenPipeError:
            return  # somebody killed the guard; children still die with us by PDEATHSIG


def cpu_s() -> float:
    """CPU seconds of this process and of all children it has waited for."""
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        total += usage.ru_utime + usage.ru_stime
    return total
