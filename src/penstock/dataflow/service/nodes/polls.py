# SPDX-License-Identifier: Apache-2.0
"""Lease requests that are held open, ordered by when they last found no work.

Thousands may wait while hundreds of commands arrive each second, so a command wakes only the polls
it may have work for. Knows nothing of leases: its owner decides which polls to wake."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from dataclasses import dataclass

from penstock.types import NodeId


@dataclass(slots=True, eq=False)
class Poll:
    node_id: NodeId
    max_slots: int
    seen: int = -1
    """Counter of new work when it last checked."""
    num_reserved: int = 0
    """Slots it was woken for and has not checked yet."""
    called: asyncio.Future[None] | None = None


class PollQueue:
    def __init__(self) -> None:
        self._queue: OrderedDict[Poll, None] = OrderedDict()
        self._of_node: defaultdict[NodeId, set[Poll]] = defaultdict(set)
        self._work_version = 0
        self._num_reserved = 0

    def __len__(self) -> int:
        return len(self._queue)

    def mark_new_work(self) -> None:
        """Announce new work: polls that checked before may check again."""
        self._work_version += 1

    def mark_checked(self, poll: Poll) -> None:
        """The poll checks now, or gives up."""
        poll.seen = self._work_version
        self._num_reserved -= poll.num_reserved
        poll.num_reserved = 0

    def offer(self, num_slots: int) -> None:
        """`num_slots` are available: wake enough polls to take them, longest waiting first, and
        none that checked since the last new work."""
        while self._queue and self._num_reserved < num_slots:
            poll = next(iter(self._queue))
            if poll.seen == self._work_version:
                return
            poll.num_reserved = poll.max_slots
            self._num_reserved += poll.num_reserved
            self._call(poll)

    def call(self, node_id: NodeId) -> None:
        """Wake all polls of this node."""
        for poll in [*self._of_node.get(node_id, ())]:
            self._call(poll)

    def wake_all(self) -> None:
        for poll in [*self._queue]:
            self._call(poll)

    async def wait(self, poll: Poll, at_most_s: float) -> None:
        """consumes: nothing · produces: nothing · waits for: a wake-up, or its timeout
        woken by: `offer`, `call`, `wake_all`"""
        loop = asyncio.get_running_loop()
        poll.called = loop.create_future()
        self._queue[poll] = None
        self._of_node[poll.node_id].add(poll)
        timer = loop.call_later(at_most_s, self._call, poll)
        try:
            await poll.called
        finally:
            timer.cancel()
            self._remove(poll)

    def _call(self, poll: Poll) -> None:
        self._remove(poll)
        if poll.called is not None and not poll.called.done():
            poll.called.set_result(None)

    def _remove(self, poll: Poll) -> None:
        if poll not in self._queue:
            return
        del self._queue[poll]
        others = self._of_node[poll.node_id]
        others.remove(poll)
        if not others:
            del self._of_node[poll.node_id]
