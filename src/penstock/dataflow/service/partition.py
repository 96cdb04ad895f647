# SPDX-License-Identifier: Apache-2.0
"""A data partition as a process of its own: nodes and trainers come to it directly, home is
reached by a link. No HTTP server here.

While home is away it goes on: leases, deliveries and rows need nobody else. What it has to say
waits, numbered, until home is back.
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from typing import Protocol

import structlog

from penstock.dataflow.core.messages import Numbered
from penstock.dataflow.core.partition_host import PartitionHost
from penstock.dataflow.core.switchboard import Switchboard
from penstock.dataflow.ledger.compaction import Compactor
from penstock.dataflow.service.coordinator import run_ticks, sweep_blobs, verify_once
from penstock.dataflow.service.messages import Done
from penstock.dataflow.service.nodes.handlers import NodeSide
from penstock.dataflow.service.operators.messages import PartitionFigures
from penstock.dataflow.service.partitions.messages import (
    LinkPull,
    LinkPulled,
    LinkPush,
    LinkPushed,
    PartitionJoin,
    PartitionLife,
)
from penstock.dataflow.service.process import Process
from penstock.dataflow.service.rows.handlers import RowService

log = structlog.get_logger(__name__)

PULL_S = 20.0
CATCH_UP_S = 5.0
BEAT_S = 2.0
"""Home hears from a partition so often, also when there is nothing to say."""
GATHER_S = 0.05
"""Between two letters of one direction: what comes meanwhile goes with the next one, and a busy
partition costs home no more calls than a quiet one."""


class HomeCalls(Protocol):
    """All that a partition asks of home."""

    async def join(self, index: int, body: PartitionJoin) -> Done: ...
    async def push(self, index: int, body: LinkPush) -> LinkPushed: ...
    async def pull(self, index: int, body: LinkPull) -> LinkPulled: ...
    async def close(self) -> None: ...


class PartitionService:
    def __init__(
        self,
        process: Process,
        board: Switchboard,
        host: PartitionHost,
        rows: RowService,
        home: HomeCalls,
        *,
        stages: tuple[str, ...],
        url: str,
        epoch: int,
    ) -> None:
        self.process = process
        self.host = host
        self.partition = host.partition
        self.is_finished = False
        self.nodes = NodeSide(process, host, rows, lambda: self.is_finished, self._catch_up)
        self._home = home
        self._url = url
        self._life = PartitionLife(epoch=epoch, session=secrets.token_hex(8))
        assert board.uplink is not None, "a partition of its own has a link to home"
        self._link = board.uplink
        self.rows = rows
        self._stages = stages
        self._board = board
        host.shelf = rows.shelf
        process.drive = self._drive
        self._to_say = asyncio.Event()
        process.on_wake.append(self._woken)

    async def run(self) -> None:
        """Until cancelled; a loop that dies ends the process aloud."""
        try:
            async with asyncio.TaskGroup() as loops:
                ticks = run_ticks(self.process, self.tick, self.forgive)
                loops.create_task(ticks, name="ticks")
                loops.create_task(Compactor(self.process.ledger).run(), name="compaction")
                loops.create_task(sweep_blobs(self.rows), name="blobs")
                loops.create_task(verify_once(self.process.ledger), name="verification")
                await self._join()
                loops.create_task(self._push(), name="push")
                loops.create_task(self._pull(), name="pull")
        finally:
            await self._home.close()

    async def _join(self) -> None:
        body = PartitionJoin(life=self._life, url=self._url)
        await self._home.join(self.partition.index, body)

    def _drive(self, now: float) -> None:
        self.host.land(now)
        self._board.run(now)

    async def tick(self) -> None:
        self.partition.tick(self.process.clock())
        await self.process.settle()
        self.nodes.tick()
        await self.rows.tick()

    def forgive(self, gap_s: float) -> None:
        self.partition.forgive(gap_s)
        self.rows.readers.forgive(gap_s)

    async def _push(self) -> None:
        """consumes: reports of this partition · produces: home's knowledge of them
        waits for: something home lacks · woken by: the command that says it"""
        index, beat_at = self.partition.index, 0.0
        while True:
            self._to_say.clear()
            messages = self._link.unacknowledged(0)
            if not messages and self.process.clock() < beat_at:
                await self.process.wait_for(self._to_say, beat_at)
                continue
            await self.process.ledger.flush()  # home must never know what we could forget
            answer = await self._home.push(index, self._letter(messages))
            beat_at = self.process.clock() + BEAT_S
            self._link.acknowledged(answer.received)  # written with whatever comes next
            await asyncio.sleep(GATHER_S)

    def _woken(self) -> None:
        if self._link.has_news:
            self._to_say.set()

    def _letter(self, messages: tuple[Numbered, ...]) -> LinkPush:
        return LinkPush(life=self._life, messages=messages, figures=self.figures())

    async def _pull(self) -> None:
        """consumes: home's orders · produces: groups to run, versions, fates
        waits for: home to have something new · woken by: its answer"""
        while True:
            answer = await self._pull_once(PULL_S)
            over = answer.finished and not answer.messages
            await asyncio.sleep(1.0 if over else GATHER_S)  # a finished run answers at once

    async def _pull_once(self, wait_s: float) -> LinkPulled:
        request = LinkPull(life=self._life, received=self._link.num_received, wait_s=wait_s)
        answer = await self._home.pull(self.partition.index, request)
        now = self.process.clock()
        for message in self._link.receive(answer.messages):
            self.host.apply(message, now)
        self.is_finished = answer.finished
        await self.process.settle()
        return answer

    async def _catch_up(self) -> bool:
        """Hear all that home has said so far; False when home is away."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CATCH_UP_S):
                while (await self._pull_once(0.0)).messages:
                    pass
                return True
        return False

    def figures(self) -> PartitionFigures:
        nodes = self.nodes
        return PartitionFigures(
            num_waiting=self.partition.num_waiting,
            num_open=len(self.partition.groups),
            num_nodes=len(self.partition.nodes),
            trajectories=nodes.trajectories,
            sampled_tokens=nodes.sampled_tokens,
            failed_tokens=nodes.failed_tokens,
            salvaged_tokens=nodes.turns.salvaged_tokens,
            tokens_per_s=nodes.tokens_per_s(self.process.clock()),
            lacks=tuple(
                stage
                for stage in self._stages
                if not self.rows.readers.has_worker(stage, self.process.clock())
            ),
        )

    def close(self) -> None:
        self.process.ledger.close()
