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
from penstock.dataflow.core.leasing import Register
from penstock.dataflow.service.nodes.messages import (
    DeliveryAnswer,
    DeliveryRequest,
    DeliveryResult,
    Heartbeat,
    HeartbeatAnswer,
    LeaseAnswer,
    LeaseRequest,
    Orders,
    PartitionAddress,
    RecordRequest,
    Registered,
)
from penstock.errors import Fenced, NotFound, Unreachable, WireError
from penstock.types import NodeId, RowId, Turn

HOME = 0
REBEAT_S = 2.0
"""Well under any ttl."""
HOLD_S = 2.0
"""With several partitions a poll is held open so long at one before the others are asked."""


class SpreadClient:
    def __init__(self, url: str, token: str) -> None:
        self._token = token
        self._clients = {HOME: NodeClient(url, token)}
        self._urls = {HOME: url}
        self._retired: list[NodeClient] = []
        """Of partitions that moved or are gone: a call may still be on its way there."""
        self._register: Register | None = None
        self._turn = 0

    async def close(self) -> None:
        for client in (*self._clients.values(), *self._retired):
            await client.close()

    # --- membership ---------------------------------------------------------------------------

    async def register(self, body: Register) -> Registered:
        self._register = body
        registered = await self._clients[HOME].register(body)
        await self._learn(registered.partitions)
        await asyncio.gather(*(self._join(self._clients[index]) for index in self._others()))
        return registered

    async def _join(self, client: NodeClient) -> None:
        """A partition that is away gets to know this node by a later heartbeat."""
        assert self._register is not None, "home comes first"
        with suppress(Unreachable):
            await client.register(self._register, deadline_s=REBEAT_S)

    async def heartbeat(self, node_id: NodeId, body: Heartbeat) -> HeartbeatAnswer:
        """Home's answer. While home is away the others go on hearing from this node. Home alone
        says which life of a node is the current one: a partition that still knows the last one was
        away when this one began, and is told once home has answered."""
        asking = asyncio.create_task(self._clients[HOME].heartbeat(node_id, body))
        stop: list[RowId] = []
        behind: set[NodeClient] = set()
        try:
            while True:
                beats = [
                    self._beat(self._clients[i], node_id, body, behind) for i in self._others()
                ]
                for told in await asyncio.gather(*beats):
                    stop += told
                await asyncio.wait({asking}, timeout=REBEAT_S)
                if asking.done():
                    break
        finally:
            asking.cancel()
            await asyncio.wait({asking})
        answer = asking.result()
        await asyncio.gather(*map(self._join, behind))
        await self._learn(answer.partitions)
        told = (*answer.orders.stop, *stop)
        return replace(answer, orders=replace(answer.orders, stop=told))

    async def _beat(
        self, client: NodeClient, node_id: NodeId, body: Heartbeat, behind: set[NodeClient]
    ) -> tuple[RowId, ...]:
        """What this partition wants stopped. One that is away for a moment is asked again soon."""
        try:
            answer = await client.heartbeat(node_id, body, deadline_s=REBEAT_S)
        except NotFound:
            await self._join(client)
        except Fenced:
            behind.add(client)
        except Unreachable:
            pass
        else:
            return answer.orders.stop
        return ()

    async def leave(self, node_id: NodeId, session: str) -> None:
        calls = (client.leave(node_id, session) for client in self._clients.values())
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _learn(self, partitions: Iterable[PartitionAddress]) -> None:
        """Follow home's list: join what is new or has moved, forget what is gone."""
        named = {partition.index: partition.url for partition in partitions}
        for index in [i for i in self._others() if named.get(i) != self._urls[i]]:
            self._retired.append(self._clients.pop(index))
            del self._urls[index]
        for index, url in named.items():
            if index not in self._clients:
                self._clients[index], self._urls[index] = NodeClient(url, self._token), url
                await self._join(self._clients[index])

    def _others(self) -> list[int]:
        return [index for index in self._clients if index != HOME]

    # --- work ---------------------------------------------------------------------------------

    async def lease(self, body: LeaseRequest) -> LeaseAnswer:
        """Ask each partition once; if none has work, wait at one of them."""
        if not self._others():
            return await self._clients[HOME].lease(body)
        indices = sorted(self._clients)
        self._turn += 1
        start = self._turn % len(indices)
        for index in (*indices[start:], *indices[:start]):
            answer = await self._lease_at(index, replace(body, wait_s=0.0))
            if answer.grants or answer.orders.drain:
                return answer
        return await self._lease_at(indices[start], replace(body, wait_s=min(HOLD_S, body.wait_s)))

    async def _lease_at(self, index: int, body: LeaseRequest) -> LeaseAnswer:
        """One that is away, home included, holds up nobody: the others have work too."""
        client = self._clients.get(index)  # home may have given it up meanwhile
        if client is not None:
            # This life is not known there yet, or no more; the next heartbeat joins, or tells.
            unknown = (NotFound,) if index == HOME else (NotFound, Fenced)
            with suppress(Unreachable, *unknown):
                return await client.lease(body, deadline_s=body.wait_s + REBEAT_S)
        return LeaseAnswer(tasks=(), grants=(), orders=Orders(wanted=()))

    async def deliver(self, body: DeliveryRequest) -> DeliveryAnswer:
        """A call lasts until all partitions it is for have answered; who must not wait for one
        that is away calls for each apart."""
        row_ids = [*(delivery.row_id for delivery in body.deliveries), *body.released]
        places = dict.fromkeys(map(_partition_of, row_ids))
        answers = await asyncio.gather(
            *(self._deliver_at(place, _part(body, place)) for place in places)
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
                    await client.record(replace(body, turns=told), deadline_s=REBEAT_S)

    async def recorded(self, node_id: NodeId, row_id: RowId) -> tuple[Turn, ...]:
        """Nothing, when the partition does not say in time."""
        client = self._clients.get(_partition_of(row_id), self._clients[HOME])
        with suppress(WireError):
            return await client.recorded(node_id, row_id, deadline_s=REBEAT_S)
        return ()

    async def _deliver_at(self, index: int, part: DeliveryRequest) -> DeliveryAnswer:
        """Tried again while the partition is away, where it has moved to, and at home when it is
        gone: home refuses what is not its own."""
        while index in self._others():
            with suppress(Unreachable):
                return await self._clients[index].deliver(part, deadline_s=REBEAT_S)
        return await self._clients[HOME].deliver(part)


def _partition_of(row_id: RowId) -> int:
    number = row_id[1:].partition("-")[0]
    return int(number) if number.isdecimal() else HOME


def _part(body: DeliveryRequest, index: int) -> DeliveryRequest:
    """What of it belongs to this partition."""
    return replace(
        body,
        deliveries=tuple(d for d in body.deliveries if _partition_of(d.row_id) == index),
        released=tuple(row_id for row_id in body.released if _partition_of(row_id) == index),
    )
