# SPDX-License-Identifier: Apache-2.0
"""Keeps a program and all that it started together: they end with it, and with whoever asked.

Run as a file, `python guardian.py PROGRAM ARG…`, as the leader of a process group. Its standard
input is a pipe from the node: when that closes, however the node ended, the whole group is killed.
SIGTERM is passed on. Standard library only.
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
        program.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    threading.Thread(target=_kill_when_orphaned, daemon=True).start()
    print(f"guardian: {sys.argv[1]} ended with {program.wait()}", file=sys.stderr, flush=True)
    _kill_group()


def _kill_when_orphaned() -> None:
    os.read(0, 1)
    _kill_group()


def _kill_group() -> None:
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
