# SPDX-License-Identifier: Apache-2.0
"""Ties a process to the one that started it: when the parent dies, however it dies, so does the
child.

Run as a file, `python tether.py PARENT_PID PROGRAM ARG…` ties itself and then becomes the program.
Nothing runs between fork and exec in the parent, which is full of threads. Standard library only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with(parent_pid: int) -> None:
    """Ask the kernel for SIGKILL at the parent's death; ends at once if that was already missed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    die_with(int(sys.argv[1]))
    words = sys.argv[2:]
    # Python ignores these at its start, and an ignored signal stays ignored across exec.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.execvp(words[0], words)
    except OSError as error:
        print(f"cannot start {words[0]!r}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main()
