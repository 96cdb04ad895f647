# SPDX-License-Identifier: Apache-2.0
"""Where a message goes: to a neighbour in this process by a call, to another process by its link.

Calls are queued and run one after another, so no machine is entered while it is at work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from penstock.dataflow.core.coordinator import Coordinator
from penstock.dataflow.core.links import Link
from penstock.dataflow.core.messages import GroupEnded, ToCoordinator, ToPartition
from penstock.dataflow.core.partition_runtime import PartitionRuntime


class MessageRouter:
    def __init__(self) -> None:
        self.coordinator: Coordinator | None = None
        self.runtimes: dict[int, PartitionRuntime] = {}
        self.links: dict[int, Link[ToPartition, ToCoordinator]] = {}
        """Home's ends: partitions in other processes."""
        self.coordinator_link: Link[ToCoordinator, ToPartition] | None = None
        """A partition's end: home is in another process."""
        self._calls: deque[Callable[[float], None]] = deque()

    def to_partition(self, index: int, message: ToPartition) -> None:
        host = self.runtimes.get(index)
        if host is not None:
            self._calls.append(lambda now: host.apply(message, now))
        else:
            self.links[index].send(message)

    def to_coordinator(self, message: ToCoordinator) -> None:
        coordinator, coordinator_link = self.coordinator, self.coordinator_link
        if coordinator is not None:
            self._calls.append(lambda now: coordinator.apply(message, now))
        else:
            assert coordinator_link is not None, "a partition has home beside it or a link to it"
            coordinator_link.send(message)

    def ended(self, index: int, report: GroupEnded) -> None:
        """A group ended; it goes to home by way of the columns it may still miss."""
        completion = self.runtimes[index].completion
        self._calls.append(lambda now: completion.report(report, now))

    def call(self, command: Callable[[float], None]) -> None:
        """Do this in its turn."""
        self._calls.append(command)

    def run(self, now: float) -> bool:
        """Make the calls that wait, and those they cause; were there any?"""
        had = bool(self._calls)
        while self._calls:
            self._calls.popleft()(now)
        return had
