# SPDX-License-Identifier: Apache-2.0
"""Routes messages: to a peer in this process by a call, to another process by its link.

Calls are queued and run one at a time, so no state machine is re-entered while it runs.
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
        """The coordinator's ends: links to partitions in other processes."""
        self.coordinator_link: Link[ToCoordinator, ToPartition] | None = None
        """A partition's end: the coordinator is in another process."""
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
            assert coordinator_link is not None, "no coordinator in this process and no link to one"
            coordinator_link.send(message)

    def ended(self, index: int, report: GroupEnded) -> None:
        """A group ended; it reaches the coordinator after the columns it may still miss."""
        completion = self.runtimes[index].completion
        self._calls.append(lambda now: completion.report(report, now))

    def call(self, command: Callable[[float], None]) -> None:
        """Queue this call."""
        self._calls.append(command)

    def run(self, now: float) -> bool:
        """Run the queued calls, and the calls they cause; True if there were any."""
        had = bool(self._calls)
        while self._calls:
            self._calls.popleft()(now)
        return had
