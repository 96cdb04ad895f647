# SPDX-License-Identifier: Apache-2.0
"""A partition's calls to the coordinator: messages out, orders in. Owns when they are made; the
link owns what they carry."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from penstock.dataflow.core.links import Link
from penstock.dataflow.core.messages import ToCoordinator, ToPartition
from penstock.dataflow.core.partition_runtime import PartitionRuntime
from penstock.dataflow.service.operators.messages import PartitionMetrics
from penstock.dataflow.service.partitions.messages import (
    LinkPull,
    LinkPullAnswer,
    LinkPush,
    LinkPushAnswer,
    PartitionBoot,
)
from penstock.dataflow.service.process import Process

PULL_S = 20.0
CATCH_UP_S = 5.0
HEARTBEAT_S = 2.0
"""Interval of pushes to the coordinator when there is nothing new."""
END_S = 1.0
"""Between pulls when the run is over, since these are answered immediately."""


class LinkApi(Protocol):
    """The coordinator's ends of both directions."""

    async def push(self, index: int, body: LinkPush) -> LinkPushAnswer: ...
    async def pull(self, index: int, body: LinkPull) -> LinkPullAnswer: ...


class LinkCalls:
    def __init__(
        self,
        process: Process,
        link: Link[ToCoordinator, ToPartition],
        host: PartitionRuntime,
        coordinator: LinkApi,
        *,
        boot: PartitionBoot,
        figures: Callable[[], PartitionMetrics],
    ) -> None:
        self._process = process
        self._link = link
        self._host = host
        self._coordinator = coordinator
        self._boot = boot
        self._figures = figures
        self._has_outgoing = asyncio.Event()
        self.is_finished = False

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self._push(), name="push")
            loops.create_task(self._pull(), name="pull")

    @property
    def _index(self) -> int:
        return self._host.partition.index

    async def _push(self) -> None:
        """consumes: reports of this partition · produces: messages to the coordinator
        waits for: unsent messages · woken by: the command that adds one"""
        beat_at = 0.0
        while True:
            self._has_outgoing.clear()
            messages = self._link.unacknowledged(0)
            if not messages and self._process.clock() < beat_at:
                await self._process.wait_for(self._has_outgoing, beat_at)
                continue
            await self._process.ledger.flush()  # only durable state may reach the coordinator
            push = LinkPush(boot=self._boot, messages=messages, figures=self._figures())
            answer = await self._coordinator.push(self._index, push)
            beat_at = self._process.clock() + HEARTBEAT_S
            self._link.acknowledged(answer.received)  # written with the next commit
            await asyncio.sleep(answer.pause_s)

    def on_wake(self) -> None:
        """Wake the push that a command affects."""
        if self._link.has_unacknowledged:
            self._has_outgoing.set()

    async def _pull(self) -> None:
        """consumes: the coordinator's orders · produces: groups to run, versions, fates
        waits for: new orders · woken by: the coordinator's response"""
        while True:
            answer = await self._pull_once(PULL_S)
            is_over = answer.finished and not answer.messages
            await asyncio.sleep(END_S if is_over else answer.pause_s)

    async def _pull_once(self, wait_s: float) -> LinkPullAnswer:
        request = LinkPull(boot=self._boot, received=self._link.num_received, wait_s=wait_s)
        answer = await self._coordinator.pull(self._index, request)
        now = self._process.clock()
        for message in self._link.receive(answer.messages):
            self._host.apply(message, now)
        self.is_finished = answer.finished
        await self._process.make_durable()
        return answer

    async def catch_up(self) -> bool:
        """Receive everything the coordinator has sent so far; False when it is unreachable."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CATCH_UP_S):
                while (await self._pull_once(0.0)).messages:
                    pass
                return True
        return False
