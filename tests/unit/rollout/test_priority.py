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
print(autogroup.read_text().split()[-1] if autogroup.exists() else "none")
ended.set()
"""


def _run(*, has_own_session: bool) -> list[str]:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        command, start_new_session=has_own_session, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


@pytest.mark.skipif(os.nice(0) > LOW, reason="the tests run at a lower priority themselves")
def test_all_threads_and_the_session_of_a_service_give_way() -> None:
    *threads, of_session = _run(has_own_session=True)
    assert threads == [str(LOW)] * 2
    assert of_session in (str(LOW), "none")


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this kernel has no groups of sessions")
@pytest.mark.skipif(os.nice(0) > LOW, reason="the tests run at a lower priority themselves")
def test_the_session_of_a_terminal_keeps_its_priority() -> None:
    before = AUTOGROUP.read_text().split()[-1]
    assert _run(has_own_session=False)[-1] == before
