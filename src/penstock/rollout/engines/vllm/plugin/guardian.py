# SPDX-License-Identifier: Apache-2.0
"""Runs a program and kills its process group when the program or the node ends.

As a script, `python guardian.py PROGRAM ARG…`, it is the leader of the process group. Its standard
input is a pipe from the node: when the pipe closes, however the node ended, it kills the group. It
forwards SIGTERM to the program; if the program is bwrap, to what bwrap runs, because bwrap would
die of it and leave no time. Standard library only.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from types import FrameType


def main() -> None:
    try:
        program = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    except OSError as error:
        print(f"cannot start {sys.argv[1]!r}: {error.strerror}", file=sys.stderr)
        sys.exit(127)

    def pass_on(number: int, frame: FrameType | None) -> None:
        os.kill(_inside(program.pid) or program.pid, number)

    signal.signal(signal.SIGTERM, pass_on)
    threading.Thread(target=_kill_when_orphaned, daemon=True).start()
    print(f"guardian: {sys.argv[1]} exited with {program.wait()}", file=sys.stderr, flush=True)
    _kill_group()


def _inside(pid: int) -> int | None:
    """The program that bwrap runs; None if the program is not bwrap."""
    if sys.argv[1] != "bwrap":
        return None
    try:
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
            return int(file.read().split()[0])
    except (OSError, IndexError):
        return None


def _kill_when_orphaned() -> None:
    os.read(0, 1)
    _kill_group()


def _kill_group() -> None:
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
