# SPDX-License-Identifier: Apache-2.0
"""Registration and heartbeats of this node: its id, its state, its live versions. Holds no work."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol, TypeVar

import structlog

from penstock.dataflow.core.leasing import LiveVersion, NodeState, RegisterRequest
from penstock.dataflow.service.nodes.messages import (
    Heartbeat,
    HeartbeatAnswer,
    LeaseRequest,
    RegisterAnswer,
)
from penstock.errors import Fenced, NotFound, WireError
from penstock.rollout.orders import NodeOrders
from penstock.types import NodeId

T = TypeVar("T")
REJOIN_S = 0.2
LEASE_WAIT_S = 10.0
log = structlog.get_logger(__name__)


class MembershipApi(Protocol):
    async def register(self, body: RegisterRequest) -> RegisterAnswer: ...
    async def heartbeat(self, node_id: NodeId, body: Heartbeat) -> HeartbeatAnswer: ...
    async def leave(self, node_id: NodeId, boot_id: str) -> None: ...


class Membership:
    """Registration of one node process, identified by its `boot_id`."""

    def __init__(
        self,
        api: MembershipApi,
        orders: NodeOrders,
        *,
        node_id: NodeId,
        capacity: int,
        tags: tuple[str, ...] = (),
    ) -> None:
        self.node_id = node_id
        self.boot_id = secrets.token_hex(8)
        self._api = api
        self._orders = orders
        self._capacity = capacity
        self._tags = tags
        self.live: tuple[LiveVersion, ...] = ()
        self.ready = asyncio.Event()
        """Set once every policy has a live version; the node may then lease."""
        self._announced = asyncio.Event()

    def announce(self, live: tuple[LiveVersion, ...], *, is_ready: bool) -> None:
        """Report live versions with an immediate heartbeat; `is_ready` if every policy has one."""
        self.live = live
        if is_ready:
            self.ready.set()
        self._announced.set()

    async def join(self) -> RegisterAnswer:
        registered = await self._api.register(
            RegisterRequest(
                node_id=self.node_id,
                boot_id=self.boot_id,
                capacity=self._capacity,
                policies=(),
                tags=self._tags,
            )
        )
        self._orders.apply(registered.orders, registered.weights_url)
        log.info("joined run", node=self.node_id, run=registered.facts.run, capacity=self._capacity)
        return registered

    def lease_request(self, max_slots: int) -> LeaseRequest:
        return LeaseRequest(
            request_id=secrets.token_hex(8),
            node_id=self.node_id,
            boot_id=self.boot_id,
            max_slots=max_slots,
            wait_s=LEASE_WAIT_S,
            live=self.live,
        )

    async def with_rejoin(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call; register again if the service no longer knows this node."""
        while True:
            try:
                return await call()
            except NotFound:
                log.warning("node unknown to the dataflow: rejoining", node=self.node_id)
                await asyncio.sleep(REJOIN_S)
                await self.join()
            except Fenced as error:
                raise Fenced(
                    f"node {self.node_id} was registered by another process: {error}; "
                    "this one stops. Use a unique node id per process"
                ) from error

    async def heartbeat_loop(self, interval_s: float, num_held: Callable[[], int]) -> None:
        """consumes: live versions, number of held slots · produces: renewed leases, orders
        waits for: the next heartbeat · woken by: `announce()`"""
        while True:
            self._announced.clear()
            answer = await self.with_rejoin(
                lambda: self._api.heartbeat(self.node_id, self._heartbeat(num_held()))
            )
            self._orders.apply(answer.orders, answer.weights_url)
            with suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._announced.wait()

    async def leave(self) -> None:
        """Deregister. Errors are only logged: the service also notices a missing node by itself."""
        try:
            await self._api.leave(self.node_id, self.boot_id)
        except WireError as error:
            log.warning("deregistration failed", node=self.node_id, error=str(error))

    def _heartbeat(self, num_held: int) -> Heartbeat:
        state = NodeState.LIVE if self.ready.is_set() else NodeState.STARTING
        if self._orders.drained.is_set():
            state = NodeState.DRAINING
        return Heartbeat(boot_id=self.boot_id, state=state, live=self.live, num_held=num_held)
