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
from functools import partial
from pathlib import Path
from typing import Protocol

import structlog

from penstock.dataflow.protocol import (
    Delivery,
    DeliveryAnswer,
    DeliveryRequest,
    DeliveryResult,
    DeliveryStatus,
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


class Outbox:
    def __init__(
        self, calls: Deliveries, membership: Membership, acknowledgements: Acknowledgements
    ) -> None:
        self._calls = calls
        self._membership = membership
        self._acknowledgements = acknowledgements
        self._waiting: list[Delivery] = []
        self._released: list[RowId] = []
        self._num_sending = 0
        self._filled = asyncio.Event()
        self._shrunk = asyncio.Event()

    def __len__(self) -> int:
        """Rows not yet acknowledged, and slots not yet handed back."""
        return len(self._waiting) + len(self._released) + self._num_sending

    def put(self, trajectory: Trajectory) -> None:
        self._waiting.append(Delivery(row_id=trajectory.row_id, payload=encode(trajectory)))
        self._filled.set()

    def release(self, row_id: RowId) -> None:
        """Hand the slot back without a result."""
        self._released.append(row_id)
        self._filled.set()

    async def at_most(self, num_rows: int) -> None:
        """Wait until no more than so many are here."""
        while len(self) > num_rows:
            self._shrunk.clear()
            await self._shrunk.wait()

    async def deliver(self) -> None:
        """consumes: trajectories and released slots · produces: acknowledged ids on disk
        waits for: something to send, then the service's fsync · woken by: `put()`, `release()`"""
        while True:
            await self._filled.wait()
            await asyncio.sleep(0)  # those that finish in the same turn of the loop come along
            request = self._next_request()
            answer = await self._membership.known(partial(self._calls.deliver, request))
            self._settle(request, answer.results)
            self._num_sending = 0
            self._shrunk.set()
            if not self._waiting and not self._released:
                self._filled.clear()

    def _next_request(self) -> DeliveryRequest:
        deliveries, self._waiting = split(self._waiting)
        released, self._released = tuple(self._released), []
        self._num_sending = len(deliveries) + len(released)
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
