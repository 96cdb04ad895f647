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
from dataclasses import replace
from typing import Protocol

from penstock.dataflow.core.partition_runtime import RowReaders
from penstock.dataflow.ledger.assemble import PartitionCore
from penstock.dataflow.service.coordinator import start_loops
from penstock.dataflow.service.messages import Ack
from penstock.dataflow.service.nodes.handlers import NodeHandlers
from penstock.dataflow.service.operators.messages import PartitionMetrics
from penstock.dataflow.service.partitions.link_calls import LinkApi, LinkCalls
from penstock.dataflow.service.partitions.messages import PartitionBoot, PartitionJoin
from penstock.dataflow.service.process import Process
from penstock.dataflow.service.rows.handlers import RowService


class CoordinatorApi(LinkApi, Protocol):
    """The coordinator's API for partitions."""

    async def join(self, index: int, body: PartitionJoin) -> Ack: ...
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
        self._coordinator = coordinator
        self._url = url
        self._boot = PartitionBoot(epoch=epoch, boot_id=secrets.token_hex(8))
        self._calls = LinkCalls(
            process, core.link, host, coordinator, boot=self._boot, figures=self.figures
        )
        self.nodes = NodeHandlers(
            process, host, rows, lambda: self._calls.is_finished, self._calls.catch_up
        )
        self.rows = rows
        self._stages = stages
        self._router = core.router

    async def run(self) -> None:
        """Run until cancelled; a failed loop ends the process with an error."""
        try:
            async with asyncio.TaskGroup() as loops:
                start_loops(loops, self.process, self.partition, self.rows, self.tick)
                joining = PartitionJoin(boot=self._boot, url=self._url)
                await self._coordinator.join(self.partition.index, joining)
                loops.create_task(self._calls.run(), name="link")
        finally:
            await self._coordinator.close()

    def _on_command(self, now: float) -> None:
        self._router.run(now)
        self.host.apply_completed_columns(now)
        self._router.run(now)

    async def tick(self) -> None:
        self.partition.tick(self.process.clock())
        await self.process.make_durable()
        self.nodes.tick()
        await self.rows.tick()

    def _on_wake(self) -> None:
        self.nodes.on_wake()
        self._calls.on_wake()

    def figures(self) -> PartitionMetrics:
        now, has_worker = self.process.clock(), self.rows.readers.has_worker
        missing = tuple(stage for stage in self._stages if not has_worker(stage, now))
        return replace(self.nodes.figures(), missing_stages=missing)

    def close(self) -> None:
        self.process.ledger.close()
