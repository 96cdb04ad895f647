# SPDX-License-Identifier: Apache-2.0
"""The last one to leave: kills the process groups of a launcher that died without doing so itself.

A service's own children (reward workers, agents) do not notice when the launcher is killed; this
process does, because its stdin closes. Reads `+PGID` and `-PGID` lines. Runs as a script with the
standard library alone.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable


def surviving_groups(lines: Iterable[str]) -> set[int]:
    """The groups still alive when the lines end."""
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
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    main()
