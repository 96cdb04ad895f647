# SPDX-License-Identifier: Apache-2.0
"""A process that is killed while agents work in its sandboxes leaves none behind.

That each task is scored once then, `tests/e2e/test_harbor.py` shows in a whole run."""

from __future__ import annotations

import uuid

import psutil
from tests.unit.rollout.harbor_trials import attempt_script, task
from tests.unit.rollout.polling import eventually, kill, start_python

from penstock.rollout.sandbox.bubblewrap import BubblewrapBackend
from penstock.rollout.sandbox.cgroups import find_parents
from penstock.rollout.sandbox.owners import prefix_of

NUM_KILLS, NUM_AGENTS = 2, 3
VICTIM = """
import asyncio
from tests.unit.rollout.harbor_trials import attempt_script, task

async def main():
    script = ": {marker}; echo hello > hello.txt; sleep 900"
    await asyncio.gather(*(attempt_script(task("hello-file"), script) for _ in range({number})))

asyncio.run(main())
"""


def marked(marker: str) -> list[int]:
    """Shells of agents, inside sandboxes."""
    found: list[int] = []
    for process in psutil.process_iter():
        try:
            if any(word.startswith(f": {marker};") for word in process.cmdline()):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


async def test_killed_processes_leave_no_sandbox_and_the_next_one_scores() -> None:
    for _ in range(NUM_KILLS):
        marker = uuid.uuid4().hex
        victim = start_python(VICTIM.format(marker=marker, number=NUM_AGENTS))
        try:
            await eventually(lambda one=marker: len(marked(one)) >= NUM_AGENTS, timeout_s=300.0)
        finally:
            kill(victim)
        await eventually(lambda one=marker: not marked(one), timeout_s=300.0)
        BubblewrapBackend()  # the next node, which removes what a dead one cannot
        folders = find_parents().folders.values()
        assert not [one for at in folders for one in at.glob(f"{prefix_of(victim.pid)}*")]
    assert (await attempt_script(task("hello-file"), "echo hello > hello.txt")).reward == 1.0
