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
    return f"{PREFIX}{pid}-{_start_time(pid)}-{next(_numbers)}"


def is_stale(path: Path) -> bool:
    """Whether the process that named it is dead; false for names of another form."""
    parts = path.name.removeprefix(PREFIX).split("-")
    if not path.name.startswith(PREFIX) or len(parts) != 3 or not parts[0].isdigit():
        return False
    return _start_time(int(parts[0])) != parts[1]


def _start_time(pid: int) -> str:
    """Tells a process from a later one with the same number; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
