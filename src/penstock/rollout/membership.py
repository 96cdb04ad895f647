# SPDX-License-Identifier: Apache-2.0
"""Registration, heartbeats and orders of this node: its id, its state, its live versions. Holds no
work. Every response of the dataflow carries its orders; this module merges them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol, TypeVar

import structlog

from penstock.dataflow.core.leasing import LiveVersion, NodeState, RegisterRequest
from penstock.dataflow.service.nodes.messages import (
    Heartbeat,
    HeartbeatAnswer,
    LeaseRequest,
    NodeDirectives,
    RegisterAnswer,
)
from penstock.errors import Fenced, NotFound, WireError
from penstock.rollout.activities import Activities
from penstock.types import NodeId, PolicyName, PublishedVersion, RowId

T = TypeVar("T")
REJOIN_S = 0.2
SHARED_HEARTBEAT_S = 0.25
"""Between heartbeats of a node whose resource also trains: the trainer waits for its pause."""
LEASE_WAIT_S = 10.0
log = structlog.get_logger(__name__)


class MembershipApi(Protocol):
    async def register(self, body: RegisterRequest) -> RegisterAnswer: ...
    async def heartbeat(self, node_id: NodeId, body: Heartbeat) -> HeartbeatAnswer: ...
    async def leave(self, node_id: NodeId, boot_id: str) -> None: ...


class NodeOrders:
    """The newest orders. Responses may arrive out of order, so orders never move backwards."""

    def __init__(self) -> None:
        self.targets: dict[PolicyName, PublishedVersion] = {}
        self.pinned: tuple[PublishedVersion, ...] = ()
        """Versions of the evaluation in progress."""
        self.weights_url = ""
        self.changed = asyncio.Event()
        """Set when a target version changes; the loader clears it."""
        self.drained = asyncio.Event()
        self.pause = ""
        """Why the node should generate nothing; empty: it should."""
        self.is_shared = False
        """Whether its resource also trains."""
        self.is_finished = False
        self.is_ordered_to_leave = False
        """An operator drains this node; the run goes on without it."""
        self.on_stop: Callable[[RowId], None] = lambda row_id: None
        """Called for each lease of this node that has ended; its work can no longer be used."""

    def apply(self, orders: NodeDirectives, weights_url: str = "") -> None:
        """`weights_url`: given by the coordinator, which alone knows that no evaluation is in
        progress."""
        if orders.pinned != self.pinned and (orders.pinned or weights_url):
            self.pinned = orders.pinned
            self.changed.set()
        for version in orders.wanted:
            known = self.targets.get(version.policy)
            if known is None or _age(known) < _age(version):
                self.targets[version.policy] = version
                self.changed.set()
        if weights_url:
            self.is_shared = orders.is_shared
            if orders.pause != self.pause:
                self.pause = orders.pause
                self.changed.set()
        self.weights_url = weights_url or self.weights_url
        self.is_finished = self.is_finished or orders.finished
        for row_id in orders.stop:
            self.on_stop(row_id)
        if orders.drain or orders.finished:
            self.is_ordered_to_leave = self.is_ordered_to_leave or not orders.finished
            self.drain()

    def drain(self) -> None:
        self.drained.set()


def _age(version: PublishedVersion) -> tuple[int, int]:
    return version.incarnation, version.number


@dataclass(slots=True)
class Membership:
    """Registration of one node process, identified by its `boot_id`."""

    _api: MembershipApi
    _orders: NodeOrders
    _: KW_ONLY
    node_id: NodeId
    capacity: int
    policies: tuple[PolicyName, ...] = ()
    """Policies that it serves; empty: all of the run."""
    tags: tuple[str, ...] = ()
    boot_id: str = field(default_factory=lambda: secrets.token_hex(8))
    live: tuple[LiveVersion, ...] = ()
    pinned: tuple[LiveVersion, ...] = ()
    """Versions that are loaded for an evaluation."""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once every policy has a live version; the node may then lease."""
    is_paused: bool = False
    """Whether its engines generate nothing, as ordered."""
    activities: Activities = field(default_factory=Activities)
    """What the node is busy with."""
    _announced: asyncio.Event = field(default_factory=asyncio.Event)

    def announce(self, live: tuple[LiveVersion, ...], *, is_ready: bool) -> None:
        """Report live versions with an immediate heartbeat; `is_ready` if every policy has one."""
        self.live = live
        if is_ready:
            self.ready.set()
        self._announced.set()

    def announce_pinned(self, pinned: tuple[LiveVersion, ...]) -> None:
        """Report the versions that are loaded for an evaluation, with an immediate heartbeat."""
        self.pinned = pinned
        self._announced.set()

    def announce_pause(self, is_paused: bool) -> None:
        """Report that the engines have stopped, or go on, with an immediate heartbeat."""
        self.is_paused = is_paused
        self._announced.set()

    async def join(self) -> RegisterAnswer:
        registered = await self._api.register(
            RegisterRequest(
                node_id=self.node_id,
                boot_id=self.boot_id,
                capacity=self.capacity,
                policies=self.policies,
                tags=self.tags,
            )
        )
        self._orders.apply(registered.orders, registered.weights_url)
        log.info("joined run", node=self.node_id, run=registered.facts.run, capacity=self.capacity)
        return registered

    def lease_request(self, max_slots: int) -> LeaseRequest:
        return LeaseRequest(
            request_id=secrets.token_hex(8),
            node_id=self.node_id,
            boot_id=self.boot_id,
            max_slots=max_slots,
            wait_s=LEASE_WAIT_S,
            live=self.live,
            pinned=self.pinned,
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
                is_shared = self._orders.is_shared
                async with asyncio.timeout(SHARED_HEARTBEAT_S if is_shared else interval_s):
                    await self._announced.wait()

    async def leave(self) -> None:
        """Deregister. Errors are only logged: the service also notices a missing node by itself."""
        try:
            await self._api.leave(self.node_id, self.boot_id)
        except WireError as error:
            log.warning("deregistration failed", node=self.node_id, error=str(error))

    def _heartbeat(self, num_held: int) -> Heartbeat:
        state = NodeState.LIVE if self.ready.is_set() else NodeState.STARTING
        if self.is_paused:
            state = NodeState.PAUSED
        if self._orders.drained.is_set():
            state = NodeState.DRAINING
        return Heartbeat(
            boot_id=self.boot_id,
            state=state,
            live=self.live,
            num_held=num_held,
            pinned=self.pinned,
            work=self.activities.longest(),
            num_done=self.activities.num_done,
        )
