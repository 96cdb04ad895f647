# SPDX-License-Identifier: Apache-2.0
"""Held lease requests: who may find work is called, in the order of waiting, and nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from penstock.dataflow.service.nodes.polls import Poll, PollQueue
from penstock.types import NodeId


class Line:
    """Polls that wait, each with the task that waits for it."""

    def __init__(self) -> None:
        self.polls = PollQueue()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def join(self, name: str, max_slots: int = 8, at_most_s: float = 60.0) -> Poll:
        """A poll of the node of that name, which has just looked in vain."""
        poll = Poll(NodeId(name.partition("/")[0]), max_slots)
        self.polls.mark_checked(poll)
        self._tasks[name] = asyncio.create_task(self.polls.wait(poll, at_most_s))
        await asyncio.sleep(0)
        return poll

    async def called(self) -> list[str]:
        """Who was called since the last time."""
        await asyncio.sleep(0)
        found = [name for name, task in self._tasks.items() if task.done()]
        for name in found:
            await self._tasks.pop(name)
        return found

    async def end(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


@asynccontextmanager
async def line() -> AsyncGenerator[Line]:
    found = Line()
    yield found
    await found.end()
    assert not len(found.polls), "nobody stays in line who waits no more"


async def test_as_many_are_called_as_may_take_what_there_is() -> None:
    async with line() as waiting:
        for name in "abcde":
            await waiting.join(name)
        waiting.polls.mark_new_work()
        waiting.polls.offer(20)
        assert await waiting.called() == ["a", "b", "c"], "the longest waiting first"
        waiting.polls.offer(20)
        assert await waiting.called() == [], "these 20 slots were promised to the three"


async def test_what_one_leaves_goes_to_the_next() -> None:
    async with line() as waiting:
        first = await waiting.join("a")
        await waiting.join("b")
        waiting.polls.mark_new_work()
        waiting.polls.offer(8)
        assert await waiting.called() == ["a"]
        waiting.polls.mark_checked(first)  # and may take nothing
        waiting.polls.offer(8)
        assert await waiting.called() == ["b"]


async def test_nobody_looks_twice_at_the_same_news() -> None:
    async with line() as waiting:
        await waiting.join("a")
        await waiting.join("b")
        waiting.polls.offer(8)
        assert await waiting.called() == [], "both have seen what there is"
        waiting.polls.mark_new_work()
        await waiting.join("c")
        waiting.polls.offer(100)
        assert await waiting.called() == ["a", "b"]


async def test_a_node_is_called_alone_and_all_together() -> None:
    async with line() as waiting:
        for name in ("a/1", "a/2", "b", "c"):
            await waiting.join(name)
        waiting.polls.call(NodeId("a"))
        waiting.polls.call(NodeId("nobody"))
        assert await waiting.called() == ["a/1", "a/2"]
        waiting.polls.wake_all()
        assert await waiting.called() == ["b", "c"]


async def test_a_poll_ends_with_its_time() -> None:
    async with line() as waiting:
        await waiting.join("a", at_most_s=0.01)
        await waiting.join("b")
        await asyncio.sleep(0.05)
        assert await waiting.called() == ["a"]
