# SPDX-License-Identifier: Apache-2.0
"""How a process gives way to the others of its machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.fleet.processes import LOW_PRIORITY

PROGRAM = """
import os
from pathlib import Path
from penstock.fleet.processes import yield_cpu
yield_cpu()
autogroup = Path("/proc/self/autogroup")
print(os.nice(0), autogroup.read_text().split()[-1] if autogroup.exists() else "none")
"""


LOWEST = 19
EXPECTED = min(os.nice(0) + LOW_PRIORITY, LOWEST)


def _run(*, has_own_session: bool) -> list[str]:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        command, start_new_session=has_own_session, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_a_service_gives_way_as_a_process_and_as_a_session() -> None:
    lower, of_session = _run(has_own_session=True)
    assert int(lower) == EXPECTED
    assert of_session in (str(LOW_PRIORITY), "none")


def test_the_session_of_a_terminal_keeps_its_priority() -> None:
    autogroup = Path("/proc/self/autogroup")
    if not autogroup.exists():
        pytest.skip("this kernel has no groups of sessions")
    before = autogroup.read_text().split()[-1]
    assert _run(has_own_session=False) == [str(EXPECTED), before]
