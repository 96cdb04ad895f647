# SPDX-License-Identifier: Apache-2.0
"""Stacks of this process on request: a signal writes the stacks of all threads, and of all
asyncio tasks, to stderr.

Threads are written at once, even if the interpreter is stuck in a library; tasks as soon as the
main thread runs Python again. Shows files, lines and names of functions, no values.
"""

from __future__ import annotations

import asyncio
import faulthandler
import signal
import sys
from types import FrameType

STACKS_SIGNAL = signal.SIGUSR2
MAX_TASKS = 40
MAX_FRAMES = 12


def write_stacks_on_signal() -> None:
    """Call it in the main thread."""
    signal.signal(STACKS_SIGNAL, _write_tasks)
    faulthandler.register(STACKS_SIGNAL, file=sys.stderr, all_threads=True, chain=True)


def _write_tasks(number: int, frame: FrameType | None) -> None:
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:  # no event loop runs here
        return
    for task in sorted(tasks, key=lambda task: task.get_name())[:MAX_TASKS]:
        print(f"asyncio task {task.get_name()}:", file=sys.stderr)
        for at in task.get_stack(limit=MAX_FRAMES):
            name, line, function = at.f_code.co_filename, at.f_lineno, at.f_code.co_name
            print(f'  File "{name}", line {line} in {function}', file=sys.stderr)
    sys.stderr.flush()
