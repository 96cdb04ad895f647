# SPDX-License-Identifier: Apache-2.0
"""Gateway process for external agents: serves them over HTTP and keeps a small pool of leased slots
for new sessions.

    dataflow ──slots──► SlotPool ──one each──► OnlineGateway (sessions ► engines) ──► DeliveryQueue
    dataflow ──orders──► NodeOrders ──targets──► Loader ──live──► Membership ──heartbeat──► dataflow

Pacing limits slots, never answers: a session without a slot is served but not recorded. After the
run has ended nothing is recorded, but agents are still served. A session that has no reward when
this process ends is lost, and its slot is issued again.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from functools import partial
from typing import Unpack

import structlog

from penstock.dataflow.core.leasing import Grant
from penstock.dataflow.service.nodes.messages import RunInfo
from penstock.errors import ConfigError
from penstock.gateway.online import EndedSession, OnlineGateway, SessionTerms, Tokens
from penstock.gateway.online_routes import build_online_app
from penstock.rollout.attempt import COMPLETED, failed, resolve_outcome
from penstock.rollout.delivery_queue import DeliveryQueue
from penstock.rollout.membership import Membership, NodeOrders
from penstock.rollout.node import NodeDeps, NodeOptions, connect, on_stop_signals
from penstock.rollout.slots import PAUSE_S, LeaseApi
from penstock.rollout.weight_loader import Loader, WeightServerFetcher
from penstock.types import SESSION_TAG, FailureKind, NodeId, RowId, Trajectory
from penstock.wire.held_token import Token
from penstock.wire.serving import Tls, serve_on_socket

CAPACITY = 1024
"""Most sessions recorded at the same time."""
SLOT_POOL_SIZE = 32
"""Free slots kept for new sessions."""
LAST_LOAD_S = 600.0
"""How long a gateway tries to load the last version of a finished run."""
SWEEP_S = 1.0
NO_REWARD = "no reward arrived before its deadline"
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _LeasedSlot:
    grant: Grant
    leased_at: float


@dataclass(slots=True)
class SlotPool:
    """Leased slots: free ones for new sessions, and those in use by running sessions."""

    _api: LeaseApi
    _membership: Membership
    _orders: NodeOrders
    _delivery_queue: DeliveryQueue
    _: KW_ONLY
    size: int
    keep_s: float
    """A slot unused for `keep_s` is exchanged for a new one, so that its lease does not expire
    during a session."""
    on_slot_lost: Callable[[RowId], None] = lambda row_id: None
    """Called for a session whose lease the dataflow has ended."""
    _free: deque[_LeasedSlot] = field(default_factory=deque[_LeasedSlot])
    _in_use: dict[RowId, Grant] = field(default_factory=dict[RowId, Grant])
    _freed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._orders.on_stop = self._stop

    def num_held(self) -> int:
        return len(self._free) + len(self._in_use) + len(self._delivery_queue)

    @property
    def num_free(self) -> int:
        return len(self._free)

    async def lease(self) -> None:
        """consumes: capacity of the run · produces: free slots
        waits for: a live version, a quarter of the pool used, capacity
        woken by: `acquire_slot()`"""
        await self._membership.ready.wait()
        while True:
            while self.size - len(self._free) < max(1, self.size // 4):
                self._freed.clear()
                await self._freed.wait()
            request = self._membership.lease_request(self.size - len(self._free))
            answer = await self._membership.with_rejoin(partial(self._api.lease, request))
            now = time.monotonic()
            self._free += [_LeasedSlot(grant, now) for grant in answer.grants]
            self._orders.apply(answer.orders)
            if not answer.grants:
                await asyncio.sleep(PAUSE_S)

    def release_free(self, min_age_s: float = 0.0) -> None:
        """Release the free slots that are at least this old."""
        while self._free and time.monotonic() >= self._free[0].leased_at + min_age_s:
            grant = self._free.popleft().grant
            self._delivery_queue.release(grant.row_id, grant.secret)
            self._freed.set()

    def drop_in_use(self) -> None:
        """Stop recording the running sessions; the run has ended."""
        for row_id in [*self._in_use]:
            self._stop(row_id)

    # --- slot source of the gateway -----------------------------------------------------------

    def acquire_slot(self) -> RowId | None:
        self.release_free(self.keep_s)
        if not self._free or self._orders.drained.is_set():
            return None
        grant = self._free.popleft().grant
        self._in_use[grant.row_id] = grant
        self._freed.set()
        return grant.row_id

    def release_slot(self, row_id: RowId) -> None:
        grant = self._in_use.pop(row_id, None)
        if grant is not None:
            self._delivery_queue.release(row_id, grant.secret)

    def deliver(self, ended: EndedSession) -> None:
        grant = self._in_use.pop(ended.row_id, None)
        if grant is None:
            return
        outcome = resolve_outcome(COMPLETED, ended.turns)
        if ended.reward is None:
            outcome = failed(FailureKind.REWARD_DEADLINE, NO_REWARD)
        elif ended.reason:
            outcome = replace(outcome, detail=ended.reason)
        self._delivery_queue.put(
            Trajectory(
                row_id=ended.row_id,
                group_id=grant.group_id,
                slot=grant.slot,
                epoch=grant.epoch,
                attempt=grant.attempt,
                node_id=self._membership.node_id,
                turns=ended.turns,
                reward=ended.reward,
                outcome=outcome,
                started_at=ended.started_at,
                ended_at=time.time(),
            ),
            grant.secret,
        )

    def _stop(self, row_id: RowId) -> None:
        self._free = deque(leased for leased in self._free if leased.grant.row_id != row_id)
        self._freed.set()
        if self._in_use.pop(row_id, None) is not None:
            self.on_slot_lost(row_id)


@dataclass(slots=True, kw_only=True)
class OnlineNode:
    orders: NodeOrders
    membership: Membership
    loader: Loader
    online: OnlineGateway
    slot_pool: SlotPool
    delivery_queue: DeliveryQueue
    listener: socket.socket
    tls: Tls | None
    heartbeat_s: float
    stopping: asyncio.Event
    """Set to stop this process. The end of the run does not stop it."""

    async def run(self) -> None:
        """consumes: calls from agents, slots · produces: recorded sessions
        waits for: `stopping` · ends: gracefully; an error in any loop ends the process"""
        async with asyncio.TaskGroup() as tasks:
            app = build_online_app(self.online)
            serving = tasks.create_task(serve_on_socket(app, self.listener, self.tls), name="serve")
            sweeping = tasks.create_task(self._sweep(), name="sweep")
            heartbeats = self.membership.heartbeat_loop(self.heartbeat_s, self.slot_pool.num_held)
            loops = [
                tasks.create_task(self.slot_pool.lease()),
                tasks.create_task(heartbeats),
                tasks.create_task(self.loader.run()),
                tasks.create_task(self.delivery_queue.deliver()),
            ]
            stopping = tasks.create_task(self.stopping.wait())
            drained = tasks.create_task(self.orders.drained.wait())
            await asyncio.wait({stopping, drained}, return_when=asyncio.FIRST_COMPLETED)
            if not self.stopping.is_set():
                log.info("run drained: agents are still served, sessions are not recorded")
                await self._load_last_version(stopping)
                await self._leave_run(loops)
            await self.stopping.wait()
            serving.cancel()
            await asyncio.wait({serving})
            if not self.orders.drained.is_set():
                await self._leave_run(loops)
            for task in (sweeping, stopping, drained):
                task.cancel()

    async def _load_last_version(self, stopping: asyncio.Task[bool]) -> None:
        """Agents are served from now on by the version that is live here, so let a load end."""
        current = asyncio.create_task(self.loader.wait_until_current())
        done, _ = await asyncio.wait(
            {current, stopping}, timeout=LAST_LOAD_S, return_when=asyncio.FIRST_COMPLETED
        )
        if not done:
            live = [f"{one.incarnation}.{one.number}" for one in self.membership.live]
            log.error("last version not loaded in time: agents get an older one", live=live)
        current.cancel()

    async def _leave_run(self, loops: list[asyncio.Task[None]]) -> None:
        """Release free slots, deliver finished sessions, then leave the run."""
        loops[0].cancel()
        self.slot_pool.release_free()
        if self.stopping.is_set():
            self.online.close_all()
        else:
            self.slot_pool.drop_in_use()
        await self.delivery_queue.flush()
        for loop in loops[1:]:
            loop.cancel()
        await self.membership.leave()

    async def _sweep(self) -> None:
        """consumes: time · produces: ended sessions, renewed slots · waits for: the next sweep"""
        pause_s = min(SWEEP_S, self.online.terms.idle_s / 4)
        while True:
            slept_at = time.monotonic()
            await asyncio.sleep(pause_s)
            late_s = time.monotonic() - slept_at - pause_s
            if late_s > pause_s:
                log.warning("gateway stalled: session deadlines extended", seconds=late_s)
                self.online.extend_deadlines(late_s)
            self.online.sweep()
            self.slot_pool.release_free(self.slot_pool.keep_s)


@asynccontextmanager
async def build_online(
    deps: NodeDeps,
    tokens: Tokens,
    *,
    node_id: NodeId,
    listener: socket.socket,
    tls: Tls | None = None,
    capacity: int = CAPACITY,
    slot_pool_size: int = SLOT_POOL_SIZE,
) -> AsyncGenerator[OnlineNode]:
    """Register as a node that serves sessions, and build the gateway from the run's settings."""
    orders = NodeOrders()
    membership = Membership(
        deps.dataflow, orders, node_id=node_id, capacity=capacity, tags=(SESSION_TAG,)
    )
    registered = await membership.join()
    run_info = registered.facts
    if run_info.session is None:
        await membership.leave()
        raise ConfigError(
            f"run {run_info.run} has no session source; add "
            "`- {name: live, session: {}}` to `sources` in its run.yaml"
        )
    terms = SessionTerms(**asdict(run_info.session))
    fetch = deps.make_fetcher(run_info)
    engines = deps.engines(run_info)
    delivery_queue = DeliveryQueue(deps.dataflow, membership, deps.ack_log)
    slot_pool = SlotPool(
        deps.dataflow,
        membership,
        orders,
        delivery_queue,
        size=min(slot_pool_size, capacity),
        keep_s=terms.idle_s / 2,
    )
    online = OnlineGateway(
        engines,
        slot_pool,
        terms,
        tokens,
        policies=run_info.policies,
        sampling=run_info.sampling,
        roles=run_info.roles,
    )
    slot_pool.on_slot_lost = online.on_slot_dropped
    try:
        yield OnlineNode(
            orders=orders,
            membership=membership,
            loader=Loader(orders, membership, engines, online, fetch),
            online=online,
            slot_pool=slot_pool,
            delivery_queue=delivery_queue,
            listener=listener,
            tls=tls,
            heartbeat_s=registered.heartbeat_s,
            stopping=asyncio.Event(),
        )
    finally:
        await engines.close()
        await fetch.close()


async def run_online(
    url: str,
    token: Token,
    tokens: Tokens,
    *,
    node_id: NodeId,
    listener: socket.socket,
    tls: Tls | None = None,
    capacity: int | None = None,
    **options: Unpack[NodeOptions],
) -> None:
    """Serve agents of the run at `url` until SIGTERM or SIGINT; `options` as in `connect`."""
    weights = options["state_dir"] / "weights"

    def fetch(run_info: RunInfo) -> WeightServerFetcher:
        return WeightServerFetcher(token, weights, transfer=run_info.transfer)

    async with (
        connect(url, token, fetch, node_id=node_id, **options) as deps,
        build_online(
            deps, tokens, node_id=node_id, listener=listener, tls=tls, capacity=capacity or CAPACITY
        ) as node,
    ):
        with on_stop_signals(node.stopping.set):
            await node.run()
