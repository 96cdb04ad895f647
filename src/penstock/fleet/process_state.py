# SPDX-License-Identifier: Apache-2.0
"""What the kernel says about processes: whose they are, suspended or not, and which signals they
handle. Changes nothing, except that a process that handles it may be asked for its stacks."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")


def pid_space() -> str:
    """Two processes with the same answer see the same table of processes."""
    boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat(PROC / 'self/ns/pid').st_ino}"


def is_suspended(pid: int) -> bool:
    """Stopped by a signal such as SIGSTOP, or by a debugger."""
    return _stat(pid)[:1] in (["T"], ["t"])


def handles(pid: int, number: signal.Signals) -> bool:
    """It has a handler for this signal; without one, the signal may kill it."""
    return bool(int(_status(pid, "SigCgt") or "0", 16) >> (number - 1) & 1)


def owner_of(pid: int) -> int | None:
    """Its real user; None if there is no such process."""
    users = _status(pid, "Uid").split()
    return int(users[0]) if users else None


def ask_for_stacks(group: int, number: signal.Signals) -> int:
    """Send the signal to each process of the group that handles it; returns how many there are."""
    asked = 0
    for pid in _members(group):
        if handles(pid, number) and not is_suspended(pid):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
                asked += 1
    return asked


def _members(group: int) -> Iterator[int]:
    for entry in PROC.iterdir():
        if entry.name.isdigit() and _stat(int(entry.name))[2:3] == [str(group)]:
            yield int(entry.name)


def _status(pid: int, name: str) -> str:
    """The line of this name; empty if there is no such process."""
    with suppress(OSError):
        for line in (PROC / str(pid) / "status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return line.partition(":")[2].strip()
    return ""


def _stat(pid: int) -> list[str]:
    """State, parent, group and more; empty if there is no such process."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()  # the name before it may contain anything
