# SPDX-License-Identifier: Apache-2.0
"""How a node gives way to the other processes of its machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.rollout.priority import LOW

AUTOGROUP = Path("/proc/self/autogroup")
PROGRAM = """
import os, threading
from pathlib import Path
from penstock.rollout.priority import give_way
ended = threading.Event()
thread = threading.Thread(target=ended.wait)
thread.start()
give_way()
print(os.nice(0), os.getpriority(os.PRIO_PROCESS, thread.native_id))
autogroup = Path("/proc/self/autogroup")
print(autogroup.read_text() if autogroup.exists() else "")
ended.set()
"""


def _run(*, has_own_session: bool) -> list[str]:
    """The two lines of the program: the priorities of its threads, and that of its session."""
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        command, start_new_session=has_own_session, capture_output=True, text=True, check=True
    )
    return [line.strip() for line in done.stdout.split("\n")][:2]


@pytest.mark.skipif(os.nice(0) > LOW, reason="the tests run at a lower priority themselves")
def test_all_threads_and_the_session_of_a_service_give_way() -> None:
    threads, session = _run(has_own_session=True)
    assert threads == f"{LOW} {LOW}"
    assert session.endswith(f"nice {LOW}") or not session


@pytest.mark.skipif(
    not (AUTOGROUP.exists() and AUTOGROUP.read_text()),
    reason="the session of the tests has no priority of its own",
)
@pytest.mark.skipif(os.nice(0) > LOW, reason="the tests run at a lower priority themselves")
def test_the_session_of_a_terminal_keeps_its_priority() -> None:
    before = AUTOGROUP.read_text().strip()
    assert _run(has_own_session=False)[-1] == before
