# SPDX-License-Identifier: Apache-2.0
"""The time of an attempt's own sandboxes: all that it opened, and of no other attempt."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Any
from unittest.mock import AsyncMock

import pytest

from penstock.rollout.isolation import Opened
from penstock.rollout.sandbox_time import SandboxTime, counting_sandboxes, time_of_attempt


def test_sandboxes_of_an_attempt_are_summed_those_that_are_open_included() -> None:
    now = 0.0
    time = SandboxTime(lambda: now)
    first, second = time.start(), time.start()
    now = 2.0
    time.end(first)
    now = 3.5
    assert time.total_ms == 5500
    time.end(second)
    now = 9.0
    assert time.total_ms == 5500


async def test_each_attempt_has_its_own_time() -> None:
    async def attempt(seconds: float) -> tuple[int, float]:
        since = monotonic()
        with counting_sandboxes() as time:
            async with asyncio.TaskGroup() as children, Opened(AsyncMock()):
                children.create_task(asyncio.sleep(seconds))
                async with Opened(AsyncMock(), is_shared=True):
                    await asyncio.sleep(seconds)
        return time.total_ms, 1000 * (monotonic() - since)

    for total_ms, passed_ms in await asyncio.gather(attempt(0.05), attempt(0.3)):
        assert 50 <= total_ms <= passed_ms + 1  # one of the other or the shared one would be more
    assert time_of_attempt() is None


@pytest.mark.parametrize("fails", ["start", "kill"])
async def test_a_sandbox_that_fails_counts_no_longer(fails: str) -> None:
    box: Any = AsyncMock()
    getattr(box, fails).side_effect = OSError("no")
    with counting_sandboxes() as time:
        with pytest.raises(OSError, match="no"):
            async with Opened(box):
                pass
        ended = time.total_ms
        await asyncio.sleep(0.02)
        assert time.total_ms == ended
