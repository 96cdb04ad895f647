# SPDX-License-Identifier: Apache-2.0
"""Names that say who made a thing, so that a later node removes what a killed one left."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

PREFIX = "penstock-sandbox-"
_numbers = itertools.count()


def new_name() -> str:
    pid = os.getpid()
    return f"{prefix_of(pid)}{_start_time(pid)}-{next(_numbers)}"


def prefix_of(pid: int) -> str:
    """How the names of one process begin. Process ids mean something in one namespace only."""
    return f"{PREFIX}{_namespace()}-{pid}-"


def is_stale(path: Path) -> bool:
    """Whether the process that named it is dead; false for names of another form, and for names
    from another namespace of processes, such as another container's."""
    parts = path.name.removeprefix(PREFIX).split("-")
    if not path.name.startswith(PREFIX) or len(parts) != 4 or not parts[1].isdigit():
        return False
    return parts[0] == _namespace() and _start_time(int(parts[1])) != parts[2]


def _namespace() -> str:
    return str(os.stat("/proc/self/ns/pid").st_ino)


def _start_time(pid: int) -> str:
    """Tells a process from a later one with the same number; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
