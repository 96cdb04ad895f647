# SPDX-License-Identifier: Apache-2.0
"""A child process that is cancelled while it starts, or while it is ended, leaves no process and no
descriptor."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable

import pytest
import uvloop

from penstock.rollout.sandbox.bubblewrap import BubblewrapBackend
from penstock.rollout.sandbox.child import start_child
from penstock.rollout.sandbox.limits import NoneBackend
from penstock.rollout.sandbox.types import Backend, SandboxSpec


async def cancel_after(turns: int) -> None:
    """Cancel a start after so many turns of the loop; let what was closed be closed."""
    start = asyncio.create_task(start_child(["sleep", "600"], env={"PATH": os.environ["PATH"]}))
    for _ in range(turns):
        await asyncio.sleep(0)
    start.cancel()
    await asyncio.wait([start])
    if not start.cancelled():
        start.result().send(9)
        await start.result().wait_ended()
        start.result().close()
    for _ in range(3):
        await asyncio.sleep(0)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_start_that_is_cancelled_leaves_nothing_open(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(cancel_after(20))  # the loop has its own descriptors by now
        before = os.listdir("/proc/self/fd")
        for turns in range(1, 12):
            runner.run(cancel_after(turns))
        gc.collect()  # an unclosed file fails here, not in a later test
        assert len(os.listdir("/proc/self/fd")) == len(before)


async def cancel_the_end_after(turns: int, backend: Backend) -> None:
    """Cancel the end of a sandbox with a running program, twice."""
    sandbox = backend.create(SandboxSpec())
    await sandbox.start()
    program = await sandbox.exec(["sleep", "600"])
    end = asyncio.create_task(sandbox.kill())
    for _ in range(2):
        for _ in range(turns):
            await asyncio.sleep(0)
        end.cancel()
    await asyncio.wait([end])
    await program.wait()
    for _ in range(3):
        await asyncio.sleep(0)


@pytest.mark.parametrize("make", [NoneBackend, BubblewrapBackend])
def test_an_end_that_is_cancelled_leaves_nothing_open(make: Callable[[], Backend]) -> None:
    backend = make()
    with asyncio.Runner() as runner:
        runner.run(cancel_the_end_after(100, backend))
        before = os.listdir("/proc/self/fd")
        for turns in range(1, 6):
            runner.run(cancel_the_end_after(turns, backend))
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == len(before)
