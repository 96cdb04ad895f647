# SPDX-License-Identifier: Apache-2.0
"""A data partition in a separate process: nodes and trainers call it directly, and a link connects
it to the coordinator. No HTTP server here.

It keeps working while the coordinator is unreachable: leases, deliveries and rows need no other
process. Its messages are numbered and wait until the coordinator is back.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

import structlog

from penstock.dataflow.core.partition_runtime import RowReaders
from penstock.dataflow.ledger.assemble import PartitionCore
from penstock.dataflow.service.coordinator import start_loops
from penstock.dataflow.service.messages import Ack
from penstock.dataflow.service.nodes.handlers import NodeHandlers
from penstock.dataflow.service.operators.messages import PartitionMetrics
from penstock.dataflow.service.partitions.messages import (
    LinkPull,
    LinkPullAnswer,
    LinkPush,
    LinkPushAnswer,
    PartitionBoot,
    PartitionJoin,
)
from penstock.dataflow.service.process import Process
from penstock.dataflow.service.rows.handlers import RowService

log = structlog.get_logger(__name__)

PULL_S = 20.0
CATCH_UP_S = 5.0
HEARTBEAT_S = 2.0
"""Interval of pushes to the coordinator when there is nothing new."""
PUSH_INTERVAL_S = 0.05
"""Minimum time between two calls in one direction: messages in between share the next call, so a
busy partition costs the coordinator few more calls than an idle one."""


class CoordinatorApi(Protocol):
    """The coordinator's API for partitions."""

    async def join(self, index: int, body: PartitionJoin) -> Ack: ...
    async def push(self, index: int, body: LinkPush) -> LinkPushAnswer: ...
    async def pull(self, index: int, body: LinkPull) -> LinkPullAnswer: ...
    async def close(self) -> None: ...


class PartitionService:
    def __init__(
        self,
        make_process: Callable[..., Process],
        make_rows: Callable[[Process], RowService],
        make_core: Callable[[RowReaders], PartitionCore],
        coordinator: CoordinatorApi,
        *,
        stages: tuple[str, ...],
        url: str,
        epoch: int,
    ) -> None:
        process = make_process(on_command=self._on_command, on_wake=self._on_wake)
        rows = make_rows(process)
        core = make_core(rows.row_window)
        host = core.host
        self.process = process
        self.host = host
        self.partition = host.partition
        self.is_finished = False
        self.nodes = NodeHandlers(process, host, rows, lambda: self.is_finished, self._catch_up)
        self._coordinator = coordinator
        self._url = url
        self._boot = PartitionBoot(epoch=epoch, boot_id=secrets.token_hex(8))
        self._link = core.link
        self.rows = rows
        self._stages = stages
        self._router = core.router
        self._has_outgoing = asyncio.Event()

    async def run(self) -> None:
        """Run until cancelled; a failed loop ends the process with an error."""
        try:
            async with asyncio.TaskGroup() as loops:
                start_loops(loops, self.process, self.partition, self.rows, self.tick)
                joining = PartitionJoin(boot=self._boot, url=self._url)
                await self._coordinator.join(self.partition.index, joining)
                loops.create_task(self._push(), name="push")
                loops.create_task(self._pull(), name="pull")
        finally:
            await self._coordinator.close()

    def _on_command(self, now: float) -> None:
        self.host.apply_completed_columns(now)
        self._router.run(now)

    async def tick(self) -> None:
        self.partition.tick(self.process.clock())
        await self.process.make_durable()
        self.nodes.tick()
        await self.rows.tick()

    async def _push(self) -> None:
        """consumes: reports of this partition · produces: messages to the coordinator
        waits for: unsent messages · woken by: the command that adds one"""
        index, beat_at = self.partition.index, 0.0
        while True:
            self._has_outgoing.clear()
            messages = self._link.unacknowledged(0)
            if not messages and self.process.clock() < beat_at:
                await self.process.wait_for(self._has_outgoing, beat_at)
                continue
            await self.process.ledger.flush()  # only durable state may reach the coordinator
            push = LinkPush(boot=self._boot, messages=messages, figures=self.figures())
            answer = await self._coordinator.push(index, push)
            beat_at = self.process.clock() + HEARTBEAT_S
            self._link.acknowledged(answer.received)  # written with the next commit
            await asyncio.sleep(PUSH_INTERVAL_S)

    def _on_wake(self) -> None:
        self.nodes.on_wake()
        if self._link.has_unacknowledged:
            self._has_outgoing.set()

    async def _pull(self) -> None:
        """consumes: the coordinator's orders · produces: groups to run, versions, fates
        waits for: new orders · woken by: the coordinator's response"""
        while True:
            answer = await self._pull_once(PULL_S)
            is_over = answer.finished and not answer.messages  # then it answers immediately
            await asyncio.sleep(1.0 if is_over else PUSH_INTERVAL_S)

    async def _pull_once(self, wait_s: float) -> LinkPullAnswer:
        request = LinkPull(boot=self._boot, received=self._link.num_received, wait_s=wait_s)
        answer = await self._coordinator.pull(self.partition.index, request)
        now = self.process.clock()
        for message in self._link.receive(answer.messages):
            self.host.apply(message, now)
        self.is_finished = answer.finished
        await self.process.make_durable()
        return answer

    async def _catch_up(self) -> bool:
        """Receive everything the coordinator has sent so far; False when it is unreachable."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CATCH_UP_S):
                while (await self._pull_once(0.0)).messages:
                    pass
                return True
        return False

    def figures(self) -> PartitionMetrics:
        now, has_worker = self.process.clock(), self.rows.readers.has_worker
        missing = tuple(stage for stage in self._stages if not has_worker(stage, now))
        return replace(self.nodes.figures(), missing_stages=missing)

    def close(self) -> None:
        self.process.ledger.close()
