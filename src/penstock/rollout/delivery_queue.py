# SPDX-License-Identifier: Apache-2.0
"""Finished trajectories on their way to the ledger, and the node's own record of what was
acknowledged.

While one delivery is on its way the next one forms, so the number of calls follows the service, not
the work.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import structlog

from penstock.dataflow.core.leasing import DeliveryStatus
from penstock.dataflow.service.nodes.messages import (
    Delivery,
    DeliveryAnswer,
    DeliveryRequest,
    DeliveryResult,
)
from penstock.rollout.membership import Membership
from penstock.types import RowId, Trajectory
from penstock.wire.codec import encode

MAX_ROWS = 512
MAX_BYTES = 4 << 20
ACKNOWLEDGED = (DeliveryStatus.STORED, DeliveryStatus.DUPLICATE)
log = structlog.get_logger(__name__)


class Deliveries(Protocol):
    async def deliver(self, body: DeliveryRequest) -> DeliveryAnswer: ...


class Acknowledgements:
    """One row id per line, written after the service's answer: what `penstock audit` holds the
    ledger to."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        _drop_torn_line(self._file)

    def append(self, row_ids: Iterable[RowId]) -> None:
        if text := "".join(f"{row_id}\n" for row_id in row_ids):
            os.write(self._file, text.encode())

    def close(self) -> None:
        os.close(self._file)


def _drop_torn_line(file: int) -> None:
    """A node killed in mid-write leaves half an id, which no ledger would know."""
    size = os.fstat(file).st_size
    start = max(0, size - 4096)
    tail = os.pread(file, 4096, start)
    if tail and not tail.endswith(b"\n"):
        os.ftruncate(file, start + tail.rfind(b"\n") + 1)


@dataclass(slots=True, eq=False)
class _Lane:
    """What is for one partition: waiting, and on its way."""

    waiting: list[Delivery] = field(default_factory=list[Delivery])
    released: list[RowId] = field(default_factory=list[RowId])
    num_sending: int = 0
    filled: asyncio.Event = field(default_factory=asyncio.Event)

    def __len__(self) -> int:
        return len(self.waiting) + len(self.released) + self.num_sending


class Outbox:
    """One lane per partition: while one is away its rows wait here, and the others' go on."""

    def __init__(
        self, calls: Deliveries, membership: Membership, acknowledgements: Acknowledgements
    ) -> None:
        self._calls = calls
        self._membership = membership
        self._acknowledgements = acknowledgements
        self._lanes: dict[str, _Lane] = {}
        self._opened: asyncio.Queue[_Lane] = asyncio.Queue()
        self._shrunk = asyncio.Event()

    def __len__(self) -> int:
        """Rows not yet acknowledged, and slots not yet handed back."""
        return sum(map(len, self._lanes.values()))

    def put(self, trajectory: Trajectory) -> None:
        """As made by this life of the node."""
        signed = replace(trajectory, session=self._membership.session)
        lane = self._lane(signed.row_id)
        lane.waiting.append(Delivery(row_id=signed.row_id, payload=memoryview(encode(signed))))
        lane.filled.set()

    def release(self, row_id: RowId) -> None:
        """Hand the slot back without a result."""
        lane = self._lane(row_id)
        lane.released.append(row_id)
        lane.filled.set()

    def _lane(self, row_id: RowId) -> _Lane:
        """A row's name begins with its partition."""
        partition = row_id.partition("-")[0]
        lane = self._lanes.get(partition)
        if lane is None:
            lane = self._lanes[partition] = _Lane()
            self._opened.put_nowait(lane)
        return lane

    async def at_most(self, num_rows: int) -> None:
        """Wait until no more than so many are here."""
        while len(self) > num_rows:
            self._shrunk.clear()
            await self._shrunk.wait()

    async def deliver(self) -> None:
        """consumes: the first row of a partition · produces: a loop that delivers there
        waits for: a new partition · woken by: `put()`, `release()`"""
        async with asyncio.TaskGroup() as loops:
            while True:
                loops.create_task(self._deliver(await self._opened.get()))

    async def _deliver(self, lane: _Lane) -> None:
        """consumes: trajectories and released slots · produces: acknowledged ids on disk
        waits for: something to send, then the service's fsync · woken by: `put()`, `release()`"""
        while True:
            await lane.filled.wait()
            await asyncio.sleep(0)  # those that finish in the same turn of the loop come along
            request = self._next_request(lane)
            answer = await self._membership.known(partial(self._calls.deliver, request))
            self._settle(request, answer.results)
            lane.num_sending = 0
            self._shrunk.set()
            if not lane.waiting and not lane.released:
                lane.filled.clear()

    def _next_request(self, lane: _Lane) -> DeliveryRequest:
        deliveries, lane.waiting = split(lane.waiting)
        released, lane.released = tuple(lane.released), []
        lane.num_sending = len(deliveries) + len(released)
        return DeliveryRequest(
            node_id=self._membership.node_id,
            session=self._membership.session,
            deliveries=tuple(deliveries),
            released=released,
        )

    def _settle(self, request: DeliveryRequest, results: Iterable[DeliveryResult]) -> None:
        # A released slot has a result too, but no row stands behind it.
        delivered = {delivery.row_id for delivery in request.deliveries}
        acknowledged: list[RowId] = []
        num_late = 0
        for result in results:
            if result.status in ACKNOWLEDGED:
                if result.row_id in delivered:
                    acknowledged.append(result.row_id)
            elif result.status is DeliveryStatus.FENCED:
                num_late += 1
            else:  # ours: the record breaks the contract, and no retry will mend it
                log.error("refused", row=result.row_id, status=result.status, detail=result.detail)
        self._acknowledgements.append(acknowledged)
        if num_late:
            log.info("leases had ended before their results came", num_rows=num_late)


def split(deliveries: list[Delivery]) -> tuple[list[Delivery], list[Delivery]]:
    """What fits into one call, and the rest; one delivery always fits."""
    num_bytes = 0
    for index, delivery in enumerate(deliveries[:MAX_ROWS]):
        num_bytes += len(delivery.payload)
        if num_bytes > MAX_BYTES and index:
            return deliveries[:index], deliveries[index:]
    return deliveries[:MAX_ROWS], deliveries[MAX_ROWS:]
