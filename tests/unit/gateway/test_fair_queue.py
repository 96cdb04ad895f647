# SPDX-License-Identifier: Apache-2.0
"""Places are shared between keys: turns, limits per key, cancelled calls."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from penstock.gateway.fair_queue import FairQueue


class Calls:
    """Calls that hold a place until they are told to end."""

    def __init__(self, num_places: int) -> None:
        self.queue = FairQueue(num_places)
        self.started: list[str] = []
        self._ends: dict[str, list[asyncio.Event]] = {}
        self.tasks: list[asyncio.Task[None]] = []

    async def _call(self, key: str) -> None:
        async with self.queue.place(key):
            end = asyncio.Event()
            self.started.append(key)
            self._ends.setdefault(key, []).append(end)
            await end.wait()

    async def start(self, key: str, num: int = 1) -> list[asyncio.Task[None]]:
        tasks = [asyncio.create_task(self._call(key)) for _ in range(num)]
        self.tasks += tasks
        await self.settle()
        return tasks

    async def end_one(self, key: str) -> None:
        self._ends[key].pop(0).set()
        await self.settle()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def test_a_flood_leaves_half_of_the_places_and_another_starts_at_once() -> None:
    calls = Calls(8)
    await calls.start("flood", 100)
    assert calls.started == ["flood"] * 4
    await calls.start("other", 2)
    assert calls.started == ["flood"] * 4 + ["other"] * 2
    await calls.close()


async def test_keys_take_turns_when_all_places_are_taken() -> None:
    calls = Calls(2)
    await calls.start("a")
    await calls.start("b")
    await calls.start("a", 3)
    await calls.start("c", 2)
    await calls.start("d", 1)
    assert calls.started == ["a", "b"]
    for ended in ("a", "b", "a", "c", "d", "a"):
        await calls.end_one(ended)
    assert calls.started == ["a", "b", "a", "c", "d", "a", "c", "a"]
    await calls.close()


async def test_a_cancelled_call_frees_its_place_or_its_turn() -> None:
    calls = Calls(1)
    [running] = await calls.start("a")
    [waiting] = await calls.start("b")
    await calls.start("c")
    waiting.cancel()
    running.cancel()
    await calls.settle()
    assert calls.started == ["a", "c"]
    [given, _] = await calls.start("d", 2)
    calls._ends["c"][0].set()  # pyright: ignore[reportPrivateUsage]
    await asyncio.sleep(0)
    given.cancel()  # perhaps it has just got its place
    await calls.settle()
    assert calls.started[-1] == "d" and calls.queue.num_waiting == 0
    await calls.close()


async def test_no_place_is_lost_under_random_cancellations() -> None:
    random_ = random.Random(5)
    queue, running, most = FairQueue(5), Counter[str](), 0

    async def call(key: str) -> None:
        nonlocal most
        async with queue.place(key):
            running[key] += 1
            most = max(most, running.total())
            try:
                for _ in range(random_.randrange(4)):
                    await asyncio.sleep(0)
            finally:
                running[key] -= 1

    tasks = [asyncio.create_task(call(random_.choice("abcd"))) for _ in range(500)]
    for task in random_.sample(tasks, 200):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert most == 5 and queue.num_waiting == 0
    holders = [asyncio.create_task(call(key)) for key in "abcde"]
    await asyncio.gather(*holders)
    assert running.total() == 0
