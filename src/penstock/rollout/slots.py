# SPDX-License-Identifier: Apache-2.0
"""Leases slots and runs an attempt in each.

A lease request covers all free slots: a few large requests instead of many small ones.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from penstock.dataflow.core.leasing import Grant
from penstock.dataflow.service.nodes.messages import LeaseAnswer, LeaseRequest
from penstock.rollout.attempt import AttemptRunner
from penstock.rollout.delivery_queue import DeliveryQueue
from penstock.rollout.membership import Membership, NodeOrders
from penstock.types import RowId, Task

COALESCE_S = 0.05
"""How long a free slot may wait for others to share one lease request."""
PAUSE_S = 0.05
"""Pause after a response without grants. It came early because the orders changed."""


class LeaseApi(Protocol):
    async def lease(self, body: LeaseRequest) -> LeaseAnswer: ...


@dataclass(slots=True)
class SlotRunner:
    _api: LeaseApi
    _membership: Membership
    _orders: NodeOrders
    _attempt_runner: AttemptRunner
    _delivery_queue: DeliveryQueue
    capacity: int
    _running: dict[RowId, asyncio.Task[None]] = field(
        default_factory=dict[RowId, asyncio.Task[None]]
    )
    _freed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._orders.on_stop = self._stop

    def num_held(self) -> int:
        return len(self._running) + len(self._delivery_queue)

    async def lease(self, tasks: asyncio.TaskGroup) -> None:
        """consumes: free slots · produces: one asyncio task per grant
        waits for: a live version; a free slot (briefly, a quarter of all slots); work
        woken by: `Membership.announce()`, an attempt that ends"""
        await self._membership.ready.wait()
        while True:
            await self._wait_for_room()
            request = self._membership.lease_request(self.capacity - len(self._running))
            answer = await self._membership.with_rejoin(partial(self._api.lease, request))
            self._orders.apply(answer.orders)
            for grant in answer.grants:
                slot_task = tasks.create_task(self._run_slot(grant, answer.tasks[grant.task]))
                self._running[grant.row_id] = slot_task
            if not answer.grants:
                await asyncio.sleep(PAUSE_S)

    async def finish(self, grace_s: float) -> None:
        """Wait `grace_s` for running attempts; cancel the others and release their slots."""
        held = dict(self._running)
        if held:
            await asyncio.wait(held.values(), timeout=grace_s)
        late = {row_id: task for row_id, task in held.items() if not task.done()}
        for row_id, task in late.items():
            task.cancel()
            self._delivery_queue.release(row_id)
        await asyncio.gather(*late.values(), return_exceptions=True)
        self._running.clear()

    async def _wait_for_room(self) -> None:
        await self._delivery_queue.wait_until_at_most(self.capacity)
        await self._until_free(1)
        with suppress(TimeoutError):
            async with asyncio.timeout(COALESCE_S):
                await self._until_free(self.capacity // 4)

    async def _until_free(self, num_slots: int) -> None:
        while self.capacity - len(self._running) < num_slots:
            self._freed.clear()
            await self._freed.wait()

    def _stop(self, row_id: RowId) -> None:
        """Cancel an attempt whose lease has ended; further tokens would be wasted."""
        running = self._running.get(row_id)
        if running is not None:
            running.cancel()

    async def _run_slot(self, grant: Grant, task: Task) -> None:
        try:
            self._delivery_queue.put(await self._attempt_runner.run(grant, task))
        finally:
            self._running.pop(grant.row_id, None)
            self._freed.set()
