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
from typing import Protocol

import structlog

from penstock.dataflow.core.message_router import MessageRouter
from penstock.dataflow.core.messages import NumberedMessage
from penstock.dataflow.core.partition_runtime import PartitionRuntime, RowReaders
from penstock.dataflow.ledger.compaction import Compactor
from penstock.dataflow.service.coordinator import run_ticks, sweep_blobs, verify_once
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
from penstock.dataflow.service.process import OnCommand, Process
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
        make_process: Callable[[OnCommand], Process],
        make_rows: Callable[[Process], RowService],
        make_core: Callable[[RowReaders], tuple[MessageRouter, PartitionRuntime]],
        coordinator: CoordinatorApi,
        *,
        stages: tuple[str, ...],
        url: str,
        epoch: int,
    ) -> None:
        process = make_process(self._on_command)
        rows = make_rows(process)
        router, host = make_core(rows.row_window)
        self.process = process
        self.host = host
        self.partition = host.partition
        self.is_finished = False
        self.nodes = NodeHandlers(process, host, rows, lambda: self.is_finished, self._catch_up)
        self._coordinator = coordinator
        self._url = url
        self._boot = PartitionBoot(epoch=epoch, boot_id=secrets.token_hex(8))
        assert router.coordinator_link is not None, (
            "a partition in a separate process has a link to the coordinator"
        )
        self._link = router.coordinator_link
        self.rows = rows
        self._stages = stages
        self._router = router
        self._has_outgoing = asyncio.Event()
        process.on_wake.append(self._on_wake)

    async def run(self) -> None:
        """Run until cancelled; a failed loop ends the process with an error."""
        try:
            async with asyncio.TaskGroup() as loops:
                ticks = run_ticks(self.process, self.tick, self.extend_deadlines)
                loops.create_task(ticks, name="ticks")
                loops.create_task(Compactor(self.process.ledger).run(), name="compaction")
                loops.create_task(sweep_blobs(self.rows), name="blobs")
                loops.create_task(verify_once(self.process.ledger), name="verification")
                await self._join()
                loops.create_task(self._push(), name="push")
                loops.create_task(self._pull(), name="pull")
        finally:
            await self._coordinator.close()

    async def _join(self) -> None:
        body = PartitionJoin(boot=self._boot, url=self._url)
        await self._coordinator.join(self.partition.index, body)

    def _on_command(self, now: float) -> None:
        self.host.apply_completed_columns(now)
        self._router.run(now)

    async def tick(self) -> None:
        self.partition.tick(self.process.clock())
        await self.process.settle()
        self.nodes.tick()
        await self.rows.tick()

    def extend_deadlines(self, gap_s: float) -> None:
        self.partition.extend_deadlines(gap_s)
        self.rows.readers.extend_deadlines(gap_s)

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
            answer = await self._coordinator.push(index, self._push_request(messages))
            beat_at = self.process.clock() + HEARTBEAT_S
            self._link.acknowledged(answer.received)  # written with the next commit
            await asyncio.sleep(PUSH_INTERVAL_S)

    def _on_wake(self) -> None:
        if self._link.has_unacknowledged:
            self._has_outgoing.set()

    def _push_request(self, messages: tuple[NumberedMessage, ...]) -> LinkPush:
        return LinkPush(boot=self._boot, messages=messages, figures=self.figures())

    async def _pull(self) -> None:
        """consumes: the coordinator's orders · produces: groups to run, versions, fates
        waits for: new orders · woken by: the coordinator's response"""
        while True:
            answer = await self._pull_once(PULL_S)
            over = answer.finished and not answer.messages
            await asyncio.sleep(
                1.0 if over else PUSH_INTERVAL_S
            )  # a finished run answers immediately

    async def _pull_once(self, wait_s: float) -> LinkPullAnswer:
        request = LinkPull(boot=self._boot, received=self._link.num_received, wait_s=wait_s)
        answer = await self._coordinator.pull(self.partition.index, request)
        now = self.process.clock()
        for message in self._link.receive(answer.messages):
            self.host.apply(message, now)
        self.is_finished = answer.finished
        await self.process.settle()
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
        nodes = self.nodes
        return PartitionMetrics(
            num_waiting=self.partition.num_waiting,
            num_open=len(self.partition.groups),
            num_nodes=len(self.partition.nodes),
            trajectories=nodes.trajectories,
            sampled_tokens=nodes.sampled_tokens,
            failed_tokens=nodes.failed_tokens,
            salvaged_tokens=nodes.turns.salvaged_tokens,
            tokens_per_s=nodes.tokens_per_s(self.process.clock()),
            missing_stages=tuple(
                stage
                for stage in self._stages
                if not self.rows.readers.has_worker(stage, self.process.clock())
            ),
        )

    def close(self) -> None:
        self.process.ledger.close()
