# SPDX-License-Identifier: Apache-2.0
"""Kills the process groups that a crashed launcher left behind.

Children of a service (reward workers, agents) do not notice when the launcher is killed; this
process does, because its stdin closes. Reads `+PGID` and `-PGID` lines. Runs as a script and uses
only the standard library.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress


def surviving_groups(lines: Iterable[str]) -> set[int]:
    """Process groups that were added but not removed."""
    groups: set[int] = set()
    for line in lines:
        number = line[1:].strip()
        if number.isdigit() and int(number) > 1:
            (groups.add if line[0] == "+" else groups.discard)(int(number))
    return groups


def main() -> None:
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    for group in surviving_groups(sys.stdin):
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
