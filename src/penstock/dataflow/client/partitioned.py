# SPDX-License-Identifier: Apache-2.0
"""A rollout node's calls spread over every partition of a run: beats go to all, leases come from
whoever has work, results go where their slot lies.

To the node it looks like one service. The partitions are learnt from home's answers, so a URL and
a token are still all that a joiner needs.
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
"""Well under any ttl."""
POLL_S = 2.0
"""With several partitions a poll is held open so long at one before the others are asked."""


class PartitionedNodeClient:
    def __init__(self, url: str, token: str) -> None:
        self._token = token
        self._clients = {COORDINATOR: NodeClient(url, token)}
        self._urls = {COORDINATOR: url}
        self._retired: list[NodeClient] = []
        """Of partitions that moved or are gone: a call may still be on its way there."""
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
        """A partition that is away gets to know this node by a later heartbeat."""
        assert self._register is not None, "home comes first"
        with suppress(Unreachable):
            await client.register(self._register, deadline_s=RETRY_HEARTBEAT_S)

    async def heartbeat(self, node_id: NodeId, body: Heartbeat) -> HeartbeatAnswer:
        """Home's answer. While home is away the others go on hearing from this node. Home alone
        says which life of a node is the current one: a partition that still knows the last one was
        away when this one began, and is told once home has answered."""
        asking = asyncio.create_task(self._clients[COORDINATOR].heartbeat(node_id, body))
        stop: list[RowId] = []
        outdated: set[NodeClient] = set()
        try:
            while True:
                beats = [
                    self._heartbeat_at(self._clients[i], node_id, body, outdated)
                    for i in self._remote_indexes()
                ]
                for told in await asyncio.gather(*beats):
                    stop += told
                await asyncio.wait({asking}, timeout=RETRY_HEARTBEAT_S)
                if asking.done():
                    break
        finally:
            asking.cancel()
            await asyncio.wait({asking})
        answer = asking.result()
        await asyncio.gather(*map(self._join, outdated))
        await self._update_partitions(answer.partitions)
        told = (*answer.orders.stop, *stop)
        return replace(answer, orders=replace(answer.orders, stop=told))

    async def _heartbeat_at(
        self, client: NodeClient, node_id: NodeId, body: Heartbeat, outdated: set[NodeClient]
    ) -> tuple[RowId, ...]:
        """What this partition wants stopped. One that is away for a moment is asked again soon."""
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
        """Follow home's list: join what is new or has moved, forget what is gone."""
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
        """Ask each partition once; if none has work, wait at one of them."""
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
        """One that is away, home included, holds up nobody: the others have work too."""
        client = self._clients.get(index)  # home may have given it up meanwhile
        if client is not None:
            # This life is not known there yet, or no more; the next heartbeat joins, or tells.
            unknown = (NotFound,) if index == COORDINATOR else (NotFound, Fenced)
            with suppress(Unreachable, *unknown):
                return await client.lease(body, deadline_s=body.wait_s + RETRY_HEARTBEAT_S)
        return LeaseAnswer(tasks=(), grants=(), orders=NodeDirectives(wanted=()))

    async def deliver(self, body: DeliveryRequest) -> DeliveryAnswer:
        """A call lasts until all partitions it is for have answered; who must not wait for one
        that is away calls for each apart."""
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
        """Tried at each partition once: what does not arrive is only generated again."""
        for place in dict.fromkeys(_partition_of(turn.row_id) for turn in body.turns):
            told = tuple(turn for turn in body.turns if _partition_of(turn.row_id) == place)
            client = self._clients.get(place)
            if client is not None:
                with suppress(WireError):
                    await client.record(replace(body, turns=told), deadline_s=RETRY_HEARTBEAT_S)

    async def recorded(self, node_id: NodeId, row_id: RowId) -> tuple[Turn, ...]:
        """Nothing, when the partition does not say in time."""
        client = self._clients.get(_partition_of(row_id), self._clients[COORDINATOR])
        with suppress(WireError):
            return await client.recorded(node_id, row_id, deadline_s=RETRY_HEARTBEAT_S)
        return ()

    async def _deliver_at(self, index: int, part: DeliveryRequest) -> DeliveryAnswer:
        """Tried again while the partition is away, where it has moved to, and at home when it is
        gone: home refuses what is not its own."""
        while index in self._remote_indexes():
            with suppress(Unreachable):
                return await self._clients[index].deliver(part, deadline_s=RETRY_HEARTBEAT_S)
        return await self._clients[COORDINATOR].deliver(part)


def _partition_of(row_id: RowId) -> int:
    number = row_id[1:].partition("-")[0]
    return int(number) if number.isdecimal() else COORDINATOR


def _for_partition(body: DeliveryRequest, index: int) -> DeliveryRequest:
    """What of it belongs to this partition."""
    return replace(
        body,
        deliveries=tuple(d for d in body.deliveries if _partition_of(d.row_id) == index),
        released=tuple(row_id for row_id in body.released if _partition_of(row_id) == index),
    )
