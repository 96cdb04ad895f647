# SPDX-License-Identifier: Apache-2.0
"""The priority of a node on its machine. Owns the system calls; decides nothing."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

LOW = 10
"""Niceness of a node that may wait: beside a busy process it gets a tenth of a core."""
_TASKS = Path("/proc/self/task")
_AUTOGROUP = Path("/proc/self/autogroup")
"""The priority of a session, on kernels that divide the time among sessions first."""


def give_way() -> None:
    """Let other processes of this machine go first. Lowers all threads of this process; its session
    only if it leads one, so that a terminal which started it keeps its priority."""
    for thread in _TASKS.iterdir():
        with suppress(ProcessLookupError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, int(thread.name), LOW)
    if os.getsid(0) == os.getpid():
        with suppress(OSError):  # a kernel without groups of sessions
            _AUTOGROUP.write_text(str(LOW))
