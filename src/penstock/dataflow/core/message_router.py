# SPDX-License-Identifier: Apache-2.0
"""Routes messages: to a peer in this process by a call, to another process by its link.

Calls are queued and run one at a time, so no state machine is re-entered while it runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from penstock.dataflow.core.links import Link
from penstock.dataflow.core.messages import ToCoordinator, ToPartition
from penstock.dataflow.core.partition_runtime import PartitionRuntime


class MessageRouter:
    def __init__(self) -> None:
        self.runtimes: dict[int, PartitionRuntime] = {}
        """Partitions in the coordinator's process."""
        self.links: dict[int, Link[ToPartition, ToCoordinator]] = {}
        """The coordinator's ends of its links to partitions in other processes."""
        self._calls: deque[Callable[[float], None]] = deque()

    def to_partition(self, index: int, message: ToPartition) -> None:
        host = self.runtimes.get(index)
        if host is not None:
            self.call(partial(host.apply, message))
        else:
            self.links[index].send(message)

    def call(self, command: Callable[[float], None]) -> None:
        """Queue this call."""
        self._calls.append(command)

    def run(self, now: float) -> bool:
        """Run the queued calls, and the calls they cause; True if there were any."""
        had = bool(self._calls)
        while self._calls:
            self._calls.popleft()(now)
        return had
