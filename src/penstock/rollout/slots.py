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
from penstock.rollout.delivery_queue import DeliveryQueue
from penstock.rollout.membership import Membership, NodeOrders
from penstock.rollout.pinned_engines import Attempts
from penstock.types import OutcomeKind, RowId, Task, Trajectory

COALESCE_S = 0.05
"""How long a free slot may wait for others to share one lease request."""
PAUSE_S = 0.05
"""Pause after a response without grants. It came early because the orders changed."""
MIN_FAILED = 32
"""After this many failed attempts in a row, the node leases fewer slots, and less often."""
MIN_DELAY_S = 0.1
MAX_DELAY_S = 5.0
MIN_SLOTS = 16


@dataclass(slots=True)
class FailureBackoff:
    """How much less a node works while all its attempts fail. The first success ends it."""

    num_failed: int = 0
    """Failed attempts in a row."""
    num_rounds: int = 0
    """Lease requests since it began."""

    def record(self, *, failed: bool) -> None:
        self.num_failed = self.num_failed + 1 if failed else 0
        self.num_rounds = self.num_rounds if failed else 0

    def next_request(self, num_slots: int) -> tuple[float, int]:
        """Seconds to wait before the next lease request, and the most slots to ask for."""
        if self.num_failed < MIN_FAILED:
            return 0.0, num_slots
        halvings, self.num_rounds = min(self.num_rounds, 16), self.num_rounds + 1
        delay_s = min(MAX_DELAY_S, MIN_DELAY_S * 2**halvings)
        return delay_s, min(num_slots, max(MIN_SLOTS, num_slots >> halvings))


@dataclass(slots=True, eq=False)
class _Run:
    """The slots that one asyncio task attempts."""

    grants: dict[RowId, Grant]
    wanted: dict[RowId, Grant] = field(init=False)
    """Those whose leases have not ended, and that have no result."""
    task: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.wanted = dict(self.grants)


class LeaseApi(Protocol):
    async def lease(self, body: LeaseRequest) -> LeaseAnswer: ...


@dataclass(slots=True)
class SlotRunner:
    _api: LeaseApi
    _membership: Membership
    _orders: NodeOrders
    _attempt_runner: Attempts
    _delivery_queue: DeliveryQueue
    capacity: int
    _running: dict[RowId, _Run] = field(default_factory=dict[RowId, "_Run"])
    _freed: asyncio.Event = field(default_factory=asyncio.Event)
    _backoff: FailureBackoff = field(default_factory=FailureBackoff)

    def __post_init__(self) -> None:
        self._orders.on_stop = self._stop

    def num_held(self) -> int:
        return len(self._running) + len(self._delivery_queue)

    async def lease(self, tasks: asyncio.TaskGroup) -> None:
        """consumes: free slots · produces: an asyncio task per group or grant
        waits for: a live version; a free slot (briefly, half of all slots: a pass through the
        model costs much the same for few answers as for many); work; the back-off while every
        attempt fails
        woken by: `Membership.announce()`, an attempt that ends"""
        await self._membership.ready.wait()
        while True:
            await self._wait_for_room()
            delay_s, num_slots = self._backoff.next_request(self.capacity - len(self._running))
            await asyncio.sleep(delay_s)
            request = self._membership.lease_request(num_slots)
            answer = await self._membership.with_rejoin(partial(self._api.lease, request))
            self._orders.apply(answer.orders)
            for grants in self._parts(answer):
                run = _Run({grant.row_id: grant for grant in grants})
                run.task = tasks.create_task(self._attempt(run, answer.tasks[grants[0].task]))
                self._running |= dict.fromkeys(run.wanted, run)
            if not answer.grants:
                await asyncio.sleep(PAUSE_S)

    async def finish(self, grace_s: float) -> None:
        """Wait `grace_s` for running attempts; cancel the others and release their slots."""
        if self._running:
            await asyncio.wait(self._tasks(), timeout=grace_s)
        late = self._tasks()
        for row_id, run in self._running.items():
            self._delivery_queue.release(row_id, run.grants[row_id].secret)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        self._running.clear()

    def _tasks(self) -> set[asyncio.Task[None]]:
        return {run.task for run in self._running.values() if run.task is not None}

    def _parts(self, answer: LeaseAnswer) -> list[list[Grant]]:
        """The grants, by what one task attempts: several slots of a group, or one."""
        together: dict[int, list[Grant]] = {}
        alone: list[list[Grant]] = []
        for grant in answer.grants:
            if self._attempt_runner.runs_together(grant, answer.tasks[grant.task]):
                together.setdefault(grant.task, []).append(grant)
            else:
                alone.append([grant])
        return [*together.values(), *alone]

    async def _wait_for_room(self) -> None:
        await self._delivery_queue.wait_until_at_most(self.capacity)
        await self._until_free(1)
        with suppress(TimeoutError):
            async with asyncio.timeout(COALESCE_S):
                await self._until_free(self.capacity // 2)

    async def _until_free(self, num_slots: int) -> None:
        while self.capacity - len(self._running) < num_slots:
            self._freed.clear()
            await self._freed.wait()

    def _stop(self, row_id: RowId) -> None:
        """Cancel an attempt whose lease has ended; further tokens would be wasted. One that runs
        together with others only loses its result, until no other is left."""
        run = self._running.get(row_id)
        if run is not None and run.task is not None:
            run.wanted.pop(row_id, None)
            if not run.wanted:
                run.task.cancel()

    async def _attempt(self, run: _Run, task: Task) -> None:
        done = partial(self._done, run)
        grants = list(run.grants.values())
        try:
            if len(grants) > 1:
                await self._attempt_runner.run_together(grants, task, done)
            else:
                done(grants[0], await self._attempt_runner.run(grants[0], task))
        finally:
            for row_id in run.grants:
                self._running.pop(row_id, None)
            self._freed.set()

    def _done(self, run: _Run, grant: Grant, trajectory: Trajectory) -> None:
        row_id = grant.row_id
        self._backoff.record(failed=trajectory.outcome.kind is OutcomeKind.FAILED)
        if run.wanted.pop(row_id, None) is not None:
            self._delivery_queue.put(trajectory, grant.secret)
        del self._running[row_id]
        self._freed.set()
