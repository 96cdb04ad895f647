# SPDX-License-Identifier: Apache-2.0
"""What a node shows of its waits: the innermost of each item, the longest first."""

from __future__ import annotations

import asyncio

import pytest

from penstock.rollout.activities import MAX_SHOWN, Activities, busy_with


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _shown(activities: Activities) -> list[tuple[str, str, float]]:
    return [(one.what, one.item, one.since_s) for one in activities.longest()]


def test_the_innermost_wait_of_an_item_hides_the_others_until_it_ends() -> None:
    clock = Clock()
    activities = Activities(clock)
    with activities.busy("workflow play", "row 1"):
        clock.now = 5.0
        with activities.busy("environment, step", "row 1"):
            clock.now = 8.0
            assert _shown(activities) == [("environment, step", "row 1", 3.0)]
        assert _shown(activities) == [("workflow play", "row 1", 8.0)]
    assert _shown(activities) == []
    assert activities.num_done == 2


def test_the_longest_come_first_and_no_more_than_fit_a_heartbeat() -> None:
    clock = Clock()
    activities = Activities(clock)
    blocks = [activities.busy("reward", f"row {number}") for number in range(MAX_SHOWN + 1)]
    for block in blocks:
        block.__enter__()
        clock.now += 1.0
    assert [item for _, item, _ in _shown(activities)] == [f"row {n}" for n in range(MAX_SHOWN)]


def test_what_fails_is_over_but_no_progress() -> None:
    activities = Activities()
    with pytest.raises(ValueError), activities.busy("load", "version 1"):
        raise ValueError
    assert _shown(activities) == [] and activities.num_done == 0


async def test_each_attempt_shows_what_its_own_tasks_wait_for() -> None:
    activities, ended = Activities(Clock()), asyncio.Event()

    async def attempt(item: str) -> None:
        with activities.attempting(item), busy_with(f"engine for {item}"):
            await asyncio.wait_for(ended.wait(), 60.0)

    async with asyncio.TaskGroup() as attempts:
        for item in ("row 1", "row 2"):
            attempts.create_task(attempt(item))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert _shown(activities) == [
            ("engine for row 1", "row 1", 0.0),
            ("engine for row 2", "row 2", 0.0),
        ]
        ended.set()
    with busy_with("nothing, outside an attempt"):
        assert _shown(activities) == []
