# SPDX-License-Identifier: Apache-2.0
"""Lease requests that are held open, in the order in which they last looked for work in vain.

Thousands may wait while hundreds of commands come each second, so a command wakes only those for
whom there may be something. Knows nothing of leases: its owner says when to call whom."""

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
    """The news at which it last looked."""
    promised: int = 0
    """Slots it was called for and did not look at yet."""
    called: asyncio.Future[None] | None = None


class Polls:
    def __init__(self) -> None:
        self._line: OrderedDict[Poll, None] = OrderedDict()
        self._of_node: defaultdict[NodeId, set[Poll]] = defaultdict(set)
        self._news = 0
        self._promised = 0

    def __len__(self) -> int:
        return len(self._line)

    def tell(self) -> None:
        """There is something new: polls that looked before may look again."""
        self._news += 1

    def looks(self, poll: Poll) -> None:
        """It looks now, or gives up."""
        poll.seen = self._news
        self._promised -= poll.promised
        poll.promised = 0

    def offer(self, num_slots: int) -> None:
        """So many are to be had: call as many polls as may take them, the longest waiting first,
        and none that looked since the last news."""
        while self._line and self._promised < num_slots:
            poll = next(iter(self._line))
            if poll.seen == self._news:
                return
            poll.promised = poll.max_slots
            self._promised += poll.promised
            self._call(poll)

    def call(self, node_id: NodeId) -> None:
        """All polls of this node."""
        for poll in [*self._of_node.get(node_id, ())]:
            self._call(poll)

    def call_all(self) -> None:
        for poll in [*self._line]:
            self._call(poll)

    async def wait(self, poll: Poll, at_most_s: float) -> None:
        """consumes: nothing · produces: nothing · waits for: a call, or the end of its time
        woken by: `offer`, `call`, `call_all`"""
        loop = asyncio.get_running_loop()
        poll.called = loop.create_future()
        self._line[poll] = None
        self._of_node[poll.node_id].add(poll)
        timer = loop.call_later(at_most_s, self._call, poll)
        try:
            await poll.called
        finally:
            timer.cancel()
            self._step_out(poll)

    def _call(self, poll: Poll) -> None:
        self._step_out(poll)
        if poll.called is not None and not poll.called.done():
            poll.called.set_result(None)

    def _step_out(self, poll: Poll) -> None:
        if poll not in self._line:
            return
        del self._line[poll]
        others = self._of_node[poll.node_id]
        others.remove(poll)
        if not others:
            del self._of_node[poll.node_id]
