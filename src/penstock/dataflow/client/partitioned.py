# SPDX-License-Identifier: Apache-2.0
"""A rollout node's client for a run with several partitions: heartbeats go to all, leases come from
any partition that has work, results go to the partition of their slot.

To the node it looks like one service. The coordinator's responses list the partitions, so a URL and
a token are still enough to join.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

from penstock.dataflow.client.dataflow import NodeClient
from penstock.dataflow.core.leasing import RegisterRequest
from penstock.dataflow.service.nodes.messages import (
    DeliveryAnswer,
    DeliveryRequest,
    DeliveryResult,
    Heartbeat,
    HeartbeatAnswer,
    LeaseAnswer,
    LeaseRequest,
    NodeDirectives,
    PartitionAddress,
    RecordRequest,
    RegisterAnswer,
)
from penstock.errors import Fenced, NotFound, Unreachable, WireError
from penstock.types import NodeId, RowId, Turn

COORDINATOR = 0
RETRY_HEARTBEAT_S = 2.0
"""Well below any ttl."""
POLL_S = 2.0
"""How long to wait for work at one partition before polling the others."""


class PartitionedNodeClient:
    def __init__(self, url: str, token: str) -> None:
        self._token = token
        self._clients = {COORDINATOR: NodeClient(url, token)}
        self._urls = {COORDINATOR: url}
        self._retired: list[NodeClient] = []
        """Clients of partitions that moved or were removed; they may still have calls in flight."""
        self._register: RegisterRequest | None = None
        self._turn = 0

    async def close(self) -> None:
        for client in (*self._clients.values(), *self._retired):
            await client.close()

    # --- membership ---------------------------------------------------------------------------

    async def register(self, body: RegisterRequest) -> RegisterAnswer:
        self._register = body
        registered = await self._clients[COORDINATOR].register(body)
        await self._update_partitions(registered.partitions)
        await asyncio.gather(
            *(self._join(self._clients[index]) for index in self._remote_indexes())
        )
        return registered

    async def _join(self, client: NodeClient) -> None:
        """Register at a partition. If it is unreachable, a later heartbeat registers."""
        assert self._register is not None, "register at the coordinator first"
        with suppress(Unreachable):
            await client.register(self._register, deadline_s=RETRY_HEARTBEAT_S)

    async def heartbeat(self, node_id: NodeId, body: Heartbeat) -> HeartbeatAnswer:
        """Returns the coordinator's response. While the coordinator is unreachable, the partitions
        still get heartbeats. Only the coordinator decides which boot_id of a node is current: a
        partition with an older one missed the registration, and gets it after the coordinator has
        responded."""
        pending = asyncio.create_task(self._clients[COORDINATOR].heartbeat(node_id, body))
        stop: list[RowId] = []
        outdated: set[NodeClient] = set()
        try:
            while True:
                beats = [
                    self._heartbeat_at(self._clients[i], node_id, body, outdated)
                    for i in self._remote_indexes()
                ]
                for row_ids in await asyncio.gather(*beats):
                    stop += row_ids
                await asyncio.wait({pending}, timeout=RETRY_HEARTBEAT_S)
                if pending.done():
                    break
        finally:
            pending.cancel()
            await asyncio.wait({pending})
        answer = pending.result()
        await asyncio.gather(*map(self._join, outdated))
        await self._update_partitions(answer.partitions)
        all_stopped = (*answer.orders.stop, *stop)
        return replace(answer, orders=replace(answer.orders, stop=all_stopped))

    async def _heartbeat_at(
        self, client: NodeClient, node_id: NodeId, body: Heartbeat, outdated: set[NodeClient]
    ) -> tuple[RowId, ...]:
        """Rows that the node must stop at this partition's request; none if it is unreachable."""
        try:
            answer = await client.heartbeat(node_id, body, deadline_s=RETRY_HEARTBEAT_S)
        except NotFound:
            await self._join(client)
        except Fenced:
            outdated.add(client)
        except Unreachable:
            pass
        else:
            return answer.orders.stop
        return ()

    async def leave(self, node_id: NodeId, boot_id: str) -> None:
        calls = (client.leave(node_id, boot_id) for client in self._clients.values())
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _update_partitions(self, partitions: Iterable[PartitionAddress]) -> None:
        """Apply the coordinator's list: join new and moved partitions, drop removed ones."""
        named = {partition.index: partition.url for partition in partitions}
        for index in [i for i in self._remote_indexes() if named.get(i) != self._urls[i]]:
            self._retired.append(self._clients.pop(index))
            del self._urls[index]
        for index, url in named.items():
            if index not in self._clients:
                self._clients[index], self._urls[index] = NodeClient(url, self._token), url
                await self._join(self._clients[index])

    def _remote_indexes(self) -> list[int]:
        return [index for index in self._clients if index != COORDINATOR]

    # --- work ---------------------------------------------------------------------------------

    async def lease(self, body: LeaseRequest) -> LeaseAnswer:
        """Try each partition once; if none has work, wait at one of them."""
        if not self._remote_indexes():
            return await self._clients[COORDINATOR].lease(body)
        indices = sorted(self._clients)
        self._turn += 1
        start = self._turn % len(indices)
        for index in (*indices[start:], *indices[:start]):
            answer = await self._lease_at(index, replace(body, wait_s=0.0))
            if answer.grants or answer.orders.drain:
                return answer
        return await self._lease_at(indices[start], replace(body, wait_s=min(POLL_S, body.wait_s)))

    async def _lease_at(self, index: int, body: LeaseRequest) -> LeaseAnswer:
        """No grants if the partition is unreachable, so that the others are tried."""
        client = self._clients.get(index)  # the coordinator may have removed it meanwhile
        if client is not None:
            # This boot_id may be unknown or outdated there; the next heartbeat resolves it.
            unknown = (NotFound,) if index == COORDINATOR else (NotFound, Fenced)
            with suppress(Unreachable, *unknown):
                return await client.lease(body, deadline_s=body.wait_s + RETRY_HEARTBEAT_S)
        return LeaseAnswer(tasks=(), grants=(), orders=NodeDirectives(wanted=()))

    async def deliver(self, body: DeliveryRequest) -> DeliveryAnswer:
        """Returns when every partition concerned has responded. Make a separate call per partition
        to avoid waiting for an unreachable one."""
        row_ids = [*(delivery.row_id for delivery in body.deliveries), *body.released]
        places = dict.fromkeys(map(_partition_of, row_ids))
        answers = await asyncio.gather(
            *(self._deliver_at(place, _for_partition(body, place)) for place in places)
        )
        found: dict[RowId, DeliveryResult] = {
            result.row_id: result for answer in answers for result in answer.results
        }
        return DeliveryAnswer(
            results=tuple(found[row_id] for row_id in row_ids),
            durability=min((answer.durability for answer in answers), default="D1"),
        )

    async def record(self, body: RecordRequest) -> None:
        """Best effort, once per partition: a lost turn only has to be generated again."""
        for index in dict.fromkeys(_partition_of(turn.row_id) for turn in body.turns):
            turns = tuple(turn for turn in body.turns if _partition_of(turn.row_id) == index)
            client = self._clients.get(index)
            if client is not None:
                with suppress(WireError):
                    await client.record(replace(body, turns=turns), deadline_s=RETRY_HEARTBEAT_S)

    async def recorded(self, node_id: NodeId, row_id: RowId, secret: str) -> tuple[Turn, ...]:
        """Empty if the partition does not respond in time."""
        client = self._clients.get(_partition_of(row_id), self._clients[COORDINATOR])
        with suppress(WireError):
            return await client.recorded(node_id, row_id, secret, deadline_s=RETRY_HEARTBEAT_S)
        return ()

    async def _deliver_at(self, index: int, part: DeliveryRequest) -> DeliveryAnswer:
        """Retries while the partition is unreachable, follows it if it moves, and falls back to the
        coordinator if it is removed; the coordinator rejects rows of other partitions."""
        while index in self._remote_indexes():
            with suppress(Unreachable):
                return await self._clients[index].deliver(part, deadline_s=RETRY_HEARTBEAT_S)
        return await self._clients[COORDINATOR].deliver(part)


def _partition_of(row_id: RowId) -> int:
    number = row_id[1:].partition("-")[0]
    return int(number) if number.isdecimal() else COORDINATOR


def _for_partition(body: DeliveryRequest, index: int) -> DeliveryRequest:
    """The part of a request that belongs to this partition."""
    return replace(
        body,
        deliveries=tuple(d for d in body.deliveries if _partition_of(d.row_id) == index),
        released={
            row_id: secret
            for row_id, secret in body.released.items()
            if _partition_of(row_id) == index
        },
    )
