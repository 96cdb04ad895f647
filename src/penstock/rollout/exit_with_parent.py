# SPDX-License-Identifier: Apache-2.0
"""Kills a process when its parent dies, for any reason.

As a script, `python exit_with_parent.py PARENT_PID PROGRAM ARG…` sets this up for itself and then
execs the program. So no code runs between fork and exec in the parent, which has many threads.
Standard library only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with(parent_pid: int) -> None:
    """Request SIGKILL from the kernel on the parent's death; die now if the parent is dead."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    die_with(int(sys.argv[1]))
    argv = sys.argv[2:]
    # Python ignores these signals by default, and an ignored signal stays ignored across exec.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        print(f"cannot start {argv[0]!r}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main()
