# SPDX-License-Identifier: Apache-2.0
"""Delivers finished trajectories to the dataflow and logs acknowledged row ids on disk.

Trajectories collect while a delivery is in flight, so the call rate follows the service's latency,
not the rollout rate.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec
import structlog

from penstock.bounds import MAX_ROW_BYTES
from penstock.dataflow.core.leasing import DeliveryStatus
from penstock.dataflow.service.nodes.messages import (
    Delivery,
    DeliveryAnswer,
    DeliveryRequest,
    DeliveryResult,
)
from penstock.errors import BadRequest, TooLarge
from penstock.rollout.membership import Membership
from penstock.rollout.user_errors import shorten
from penstock.types import FailureKind, GroupId, NodeId, Outcome, OutcomeKind, RowId, Trajectory
from penstock.wire.codec import decode, encode

MAX_ROWS = 512
MAX_BYTES = 4 << 20
FLUSH_S = 10.0
"""How long a leaving node tries to deliver finished work; the rest is redone on other nodes."""
REFUSED = (BadRequest, TooLarge)
"""Errors of a call that may be the fault of a single row in it; a repetition ends the same way."""
FIX = (
    "if this is rare, nothing: the attempt counts as failed. Else let the workflow or the agent "
    "make fewer turns per rollout, with shorter schemas and results of tools"
)
ACKNOWLEDGED = (DeliveryStatus.STORED, DeliveryStatus.DUPLICATE)
log = structlog.get_logger(__name__)


class DeliveryApi(Protocol):
    async def deliver(self, body: DeliveryRequest) -> DeliveryAnswer: ...


class AckLog:
    """Acknowledged row ids, one per line. `penstock audit` checks the ledger against it."""

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
    """Remove the partial id that a node killed mid-write leaves at the end of the file."""
    size = os.fstat(file).st_size
    start = max(0, size - 4096)
    tail = os.pread(file, 4096, start)
    if tail and not tail.endswith(b"\n"):
        os.ftruncate(file, start + tail.rfind(b"\n") + 1)


@dataclass(slots=True, eq=False)
class _PartitionQueue:
    """Deliveries and released slots for one partition, waiting or in flight."""

    waiting: list[Delivery] = field(default_factory=list[Delivery])
    released: dict[RowId, str] = field(default_factory=dict[RowId, str])
    """Row ids of released slots, and the secrets of their leases."""
    num_sending: int = 0
    filled: asyncio.Event = field(default_factory=asyncio.Event)

    def __len__(self) -> int:
        return len(self.waiting) + len(self.released) + self.num_sending


@dataclass(slots=True, eq=False)
class DeliveryQueue:
    """One queue per partition, so an unreachable partition does not delay the others."""

    _api: DeliveryApi
    _membership: Membership
    _ack_log: AckLog
    _queues: dict[str, _PartitionQueue] = field(default_factory=dict[str, _PartitionQueue])
    _opened: asyncio.Queue[_PartitionQueue] = field(default_factory=asyncio.Queue[_PartitionQueue])
    _has_shrunk: asyncio.Event = field(default_factory=asyncio.Event)

    def __len__(self) -> int:
        """Number of rows not yet acknowledged and slots not yet released."""
        return sum(map(len, self._queues.values()))

    def put(self, trajectory: Trajectory, secret: str) -> None:
        """Queue a trajectory, stamped with this process's `boot_id`. `secret`: of its lease."""
        boot_id, stamped = self._membership.boot_id, trajectory
        if trajectory.boot_id != boot_id:
            stamped = replace(trajectory, boot_id=boot_id)
        queue = self._queue_for(stamped.row_id)
        payload = memoryview(encode(stamped))
        delivery = Delivery(row_id=stamped.row_id, payload=payload, secret=secret)
        if len(payload) > MAX_ROW_BYTES:
            why = f"it has {len(payload)} bytes; the limit per trajectory is {MAX_ROW_BYTES}"
            delivery = _as_failed(delivery, why)
        queue.waiting.append(delivery)
        queue.filled.set()

    def release(self, row_id: RowId, secret: str) -> None:
        """Queue the release of a slot without a result. `secret`: of its lease."""
        queue = self._queue_for(row_id)
        queue.released[row_id] = secret
        queue.filled.set()

    def _queue_for(self, row_id: RowId) -> _PartitionQueue:
        """The queue of the row's partition, which is the prefix of its row id."""
        partition = row_id.partition("-")[0]
        queue = self._queues.get(partition)
        if queue is None:
            queue = self._queues[partition] = _PartitionQueue()
            self._opened.put_nowait(queue)
        return queue

    async def wait_until_at_most(self, num_rows: int) -> None:
        """Wait until at most `num_rows` entries are left."""
        while len(self) > num_rows:
            self._has_shrunk.clear()
            await self._has_shrunk.wait()

    async def flush(self) -> None:
        try:
            async with asyncio.timeout(FLUSH_S):
                await self.wait_until_at_most(0)
        except TimeoutError:
            log.warning("flush timed out", num_undelivered=len(self))

    async def deliver(self) -> None:
        """consumes: the first row of a partition · produces: a delivery loop for that partition
        waits for: a new partition · woken by: `put()`, `release()`"""
        async with asyncio.TaskGroup() as loops:
            while True:
                loops.create_task(self._deliver(await self._opened.get()))

    async def _deliver(self, queue: _PartitionQueue) -> None:
        """consumes: trajectories and released slots · produces: acknowledged ids on disk
        waits for: entries to send, then the service's fsync · woken by: `put()`, `release()`"""
        while True:
            await queue.filled.wait()
            await asyncio.sleep(0)  # include results that finish in the same event-loop iteration
            request = self._next_request(queue)
            await self._send(request)
            queue.num_sending = 0
            self._has_shrunk.set()
            if not queue.waiting and not queue.released:
                queue.filled.clear()

    async def _send(self, request: DeliveryRequest) -> None:
        """Send a request; if it is refused as a whole, its rows one by one and then its releases,
        so that a row that cannot be stored costs no other."""
        try:
            return await self._call(request)
        except REFUSED as error:
            if not request.deliveries:
                raise
            log.info("deliveries refused: sending them one by one", why=str(error))
        for delivery in request.deliveries:
            await self._send_row(replace(request, deliveries=(delivery,), released={}), delivery)
        if request.released:
            await self._call(replace(request, deliveries=()))

    async def _send_row(self, request: DeliveryRequest, delivery: Delivery) -> None:
        """Send a row; if it is refused, a failed one in its place, and if that is refused, the
        release of its slot. A service that refuses all three refuses everything: raises."""
        try:
            return await self._call(request)
        except REFUSED as error:
            failed = _as_failed(delivery, str(error))
        try:
            return await self._call(replace(request, deliveries=(failed,)))
        except REFUSED as error:
            log.warning(
                "failed trajectory refused: releasing its slot",
                row=delivery.row_id,
                why=str(error),
                fix="look for the cause in the log of the dataflow; another node redoes the slot",
            )
        released = {delivery.row_id: delivery.secret}
        await self._call(replace(request, deliveries=(), released=released))

    async def _call(self, request: DeliveryRequest) -> None:
        answer = await self._membership.with_rejoin(partial(self._api.deliver, request))
        self._record_results(request, answer.results)

    def _next_request(self, queue: _PartitionQueue) -> DeliveryRequest:
        deliveries, queue.waiting = split(queue.waiting)
        released, queue.released = queue.released, {}
        queue.num_sending = len(deliveries) + len(released)
        return DeliveryRequest(
            node_id=self._membership.node_id,
            boot_id=self._membership.boot_id,
            deliveries=tuple(deliveries),
            released=released,
        )

    def _record_results(self, request: DeliveryRequest, results: Sequence[DeliveryResult]) -> None:
        # A released slot also gets a result, but it has no row.
        delivered = [delivery.row_id for delivery in request.deliveries]
        acknowledged = {result.row_id for result in results if result.status in ACKNOWLEDGED}
        self._ack_log.append(row_id for row_id in delivered if row_id in acknowledged)
        if num_late := sum(result.status is DeliveryStatus.FENCED for result in results):
            log.info("late results dropped: leases had expired", num_rows=num_late)
        rejected = [r for r in results if r.status not in (*ACKNOWLEDGED, DeliveryStatus.FENCED)]
        for r in rejected:  # our bug: the record violates the contract, so a retry cannot help
            log.error("trajectory rejected", row=r.row_id, status=r.status, detail=r.detail)


class _Origin(msgspec.Struct):
    """The fields of a trajectory that a failed one keeps; all are short."""

    row_id: RowId
    group_id: GroupId
    slot: int
    epoch: int
    attempt: int
    node_id: NodeId
    started_at: float
    ended_at: float
    boot_id: str


def _as_failed(delivery: Delivery, why: str) -> Delivery:
    """A delivery that says that the trajectory was refused, without turns: a failed attempt counts,
    while a slot that is only released would be tried again without end."""
    log.warning(
        "trajectory refused: delivered as a failed attempt, without its turns",
        row=delivery.row_id,
        num_bytes=len(delivery.payload),
        why=why,
        fix=FIX,
    )
    failed = Trajectory(
        **msgspec.structs.asdict(decode(delivery.payload, _Origin)),
        turns=(),
        reward=None,
        outcome=Outcome(
            kind=OutcomeKind.FAILED,
            reason=FailureKind.WORKFLOW,
            detail=shorten(f"the trajectory was refused: {why}"),
        ),
    )
    return replace(delivery, payload=memoryview(encode(failed)))


def split(deliveries: list[Delivery]) -> tuple[list[Delivery], list[Delivery]]:
    """Split into the deliveries for one call and the rest; a call has at least one."""
    num_bytes = 0
    for index, delivery in enumerate(deliveries[:MAX_ROWS]):
        num_bytes += len(delivery.payload)
        if num_bytes > MAX_BYTES and index:
            return deliveries[:index], deliveries[index:]
    return deliveries[:MAX_ROWS], deliveries[MAX_ROWS:]
