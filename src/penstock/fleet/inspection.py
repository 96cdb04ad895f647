# SPDX-License-Identifier: Apache-2.0
"""Keeps other processes of the same user out of this one.

Tokens and keys are in the memory of a service. Without this, any program of the same user reads
them in /proc/PID/environ, /proc/PID/mem or with a debugger. The superuser still can: where we are
the superuser, code of others runs as another user (`rollout/sandbox`)."""

from __future__ import annotations

import ctypes

_PR_SET_DUMPABLE = 4


def forbid_inspection() -> None:
    """Refuse debuggers and readers of memory, environment and open files, until the next exec.
    Also ends core dumps of this process, which would contain the same."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
