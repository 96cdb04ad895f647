# SPDX-License-Identifier: Apache-2.0
"""Runs one service at the other end of an ssh connection, and ends it with the connection.

The first line of stdin says what to run; the lines `TERM` and `KILL` are signals; its end, when the
connection or the launcher is gone, kills the service. So neither environment nor tokens are in a
command line. The output of the service is this process's own."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from types import FrameType

from penstock.fleet import processes

POLL_S = 0.05
LINE_BYTES = 1 << 20


def _ignore(number: int, frame: FrameType | None) -> None:
    """The end of the connection ends this process."""


def main() -> int:
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, _ignore)  # not SIG_IGN, which the service would inherit
    order = json.loads(_first_line())
    reaper = processes.OrphanReaper()
    child = subprocess.Popen(
        order["command"],
        env={**os.environ, **order["env"], processes.PARENT_PID_ENV: str(os.getpid())},
        cwd=order["work_dir"] if os.path.isdir(order["work_dir"]) else None,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    reaper.add(child.pid)
    while (code := processes.reap(child)) is None:
        _obey(child)
    reaper.remove(child.pid)
    reaper.close()
    return code if code >= 0 else 128 - code


def _first_line() -> bytes:
    """Unbuffered, so that `select` sees what follows it.

    waits for: the launcher, which writes it at once · ended by: the end of the connection"""
    line = b""
    while not line.endswith(b"\n") and len(line) < LINE_BYTES:
        one = os.read(0, 1)
        if not one:
            sys.exit(1)
        line += one
    return line


def _obey(child: subprocess.Popen[bytes]) -> None:
    """Wait POLL_S for a signal to pass on."""
    if not select.select([0], [], [], POLL_S)[0]:
        return
    words = os.read(0, 4096).split()
    if b"KILL" in words or not words:
        processes.signal_group(child.pid, signal.SIGKILL)
    elif b"TERM" in words:
        child.terminate()


if __name__ == "__main__":
    sys.exit(main())
