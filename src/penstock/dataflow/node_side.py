# SPDX-License-Identifier: Apache-2.0
"""What rollout nodes ask of a partition: join, beat, lease, deliver, leave. No HTTP here.

Each command runs the core, makes its records durable, then answers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog

from penstock.dataflow.columns import REWARD, TURNS
from penstock.dataflow.intake import Intake, Taken
from penstock.dataflow.partition_host import PartitionHost
from penstock.dataflow.process import IsGone, Process, stays
from penstock.dataflow.protocol import (
    Delivery,
    DeliveryAnswer,
    DeliveryRequest,
    DeliveryStatus,
    Heartbeat,
    LeaseAnswer,
    LeaseRequest,
    LiveVersion,
    Orders,
    Register,
)
from penstock.dataflow.row_service import RowService
from penstock.errors import BadRequest, TooLarge
from penstock.types import NodeId, PolicyName, PublishedVersion

log = structlog.get_logger(__name__)

MAX_DELIVERIES = 10_000
MAX_CALL_BYTES = 64 << 20
MAX_ROW_BYTES = 256 << 20
"""Of one trajectory; 100,000 tokens are about 1 MB."""
RATE_WINDOW_S = 10.0
BORN = (TURNS,)
BORN_SCORED = (TURNS, REWARD)


class NodeSide:
    def __init__(
        self,
        process: Process,
        host: PartitionHost,
        rows: RowService,
        is_finished: Callable[[], bool],
    ) -> None:
        self.trajectories = 0
        self.sampled_tokens = 0
        self.failed_tokens = 0
        """Of attempts that came to nothing."""
        self.tokens_seen: deque[tuple[float, int]] = deque()
        self._process = process
        self._host = host
        self._partition = host.partition
        self._rows = rows
        self._is_finished = is_finished
        self.intake = Intake(
            host.partition,
            process.ledger,
            host.gate.is_published,
            next_arrival=rows.shelf.next_arrival,
            is_scored=host.completion.is_scored,
        )
        self._told: dict[NodeId, tuple[PublishedVersion, ...]] = {}
        self._look = asyncio.Lock()
        """Held by the one poll that looks whether it can be answered."""

    # --- membership ---------------------------------------------------------------------------

    def orders(self, node_id: NodeId) -> Orders:
        self._told[node_id] = self._host.gate.wanted
        finished = self._is_finished()
        return Orders(
            wanted=self._told[node_id],
            drain=finished,
            finished=finished,
            stop=self._partition.roster.stopped(node_id),
        )

    async def register(self, body: Register) -> Orders:
        self._partition.register(body, self._process.clock())
        await self._process.settle()
        log.info("node registered", node=body.node_id, capacity=body.capacity)
        return self.orders(body.node_id)

    async def heartbeat(self, node_id: NodeId, body: Heartbeat) -> Orders:
        self._partition.heartbeat(
            node_id, body.session, self._process.clock(), state=body.state, live=body.live
        )
        self._process.wake()
        return self.orders(node_id)

    async def leave(self, node_id: NodeId, session: str) -> None:
        self._partition.leave(node_id, session, self._process.clock())
        await self._process.settle()
        self._told.pop(node_id, None)
        log.info("node left", node=node_id)

    # --- leases -------------------------------------------------------------------------------

    async def lease(self, body: LeaseRequest, is_gone: IsGone = stays) -> LeaseAnswer:
        process = self._process
        give_up_at = process.hold_until(body.wait_s)
        if not 0 < len(body.request_id) <= 128:
            raise BadRequest("request_id has 1 to 128 characters")
        self._partition.ask(body.node_id, body.session, body.request_id, process.clock())
        key = (body.node_id, "work")
        try:
            while True:
                change = process.changed
                answer = await self._try_lease(body)
                if answer.grants or answer.orders.drain or answer.orders.stop:
                    return answer
                if self._told.get(body.node_id) != self._host.gate.wanted:
                    return replace(answer, orders=self.orders(body.node_id))
                if process.clock() >= give_up_at:
                    return answer
                process.waiting_since.setdefault(key, process.clock())
                if not await self._wait_for_news(body, change, give_up_at, is_gone):
                    return answer  # a grant now would be held by nobody
        finally:
            process.waiting_since.pop(key, None)

    async def _wait_for_news(
        self, body: LeaseRequest, change: asyncio.Event, give_up_at: float, is_gone: IsGone
    ) -> bool:
        """consumes: nothing · produces: nothing · waits for: a change that may concern this poll
        woken by: any command. False: its node listens no more.

        Thousands may wait: they look one after the other, so that those for whom nothing is left
        go on waiting at no further cost."""
        process = self._process
        while True:
            await process.wait_for(change, give_up_at)
            async with self._look:
                change = process.changed
                if self._concerns(body) or process.clock() >= give_up_at:
                    return not await is_gone()

    def _concerns(self, body: LeaseRequest) -> bool:
        """May this poll be answered now? Cheap, because it is asked for each poll at each
        change."""
        if self._partition.num_waiting or self._is_finished():
            return True
        node = self._partition.nodes.get(body.node_id)
        is_replaced = node is None or node.record.session != body.session
        return is_replaced or self._told.get(body.node_id) != self._host.gate.wanted

    async def _try_lease(self, body: LeaseRequest) -> LeaseAnswer:
        process = self._process
        grants = self._partition.lease(
            body.node_id,
            body.session,
            body.request_id,
            body.max_slots if process.has_room else 0,
            self._live_now(body),
            process.clock(),
        )
        groups = dict.fromkeys(grant.group_id for grant in grants)
        tasks = tuple(self._partition.groups[group_id].task for group_id in groups)
        wanted = self._told.get(body.node_id)
        if grants:
            await process.repeat()  # a repeated request's first answer may be lost
            wanted = None
        finished = self._is_finished()
        return LeaseAnswer(
            tasks=tasks,
            grants=tuple(grants),
            orders=self.orders(body.node_id)
            if wanted is None
            else Orders(wanted=wanted, drain=finished, finished=finished),
        )

    def _live_now(self, body: LeaseRequest) -> tuple[LiveVersion, ...]:
        """What the node serves by its newest word: a heartbeat may overtake a held request."""
        node = self._partition.nodes.get(body.node_id)
        newest: dict[PolicyName, LiveVersion] = {}
        for version in (*body.live, *(node.live if node is not None else ())):
            known = newest.setdefault(version.policy, version)
            if (version.incarnation, version.number) > (known.incarnation, known.number):
                newest[version.policy] = version
        return tuple(newest.values())

    # --- deliveries ---------------------------------------------------------------------------

    async def deliver(self, body: DeliveryRequest) -> DeliveryAnswer:
        if len(body.deliveries) + len(body.released) > MAX_DELIVERIES:
            raise BadRequest(f"at most {MAX_DELIVERIES} deliveries and releases per call")
        self._require_room(body.deliveries)
        deliveries = [await self._fetched(delivery) for delivery in body.deliveries]
        now = self._process.clock()
        taken = [self.intake.take(body.node_id, delivery, now) for delivery in deliveries]
        results = [item.result for item in taken]
        results += [self.intake.release(body.node_id, row_id, now) for row_id in body.released]
        for item in taken:
            self._count(item, now)
        await self._process.settle()
        if any(result.status is DeliveryStatus.FENCED for result in results):
            await self._process.ledger.flush()  # its first copy may be committing just now
            payloads = {delivery.row_id: delivery.payload for delivery in deliveries}
            results = [self.intake.look_again(result, payloads) for result in results]
        return DeliveryAnswer(results=tuple(results), durability=self._process.ledger.durability)

    def _require_room(self, deliveries: Sequence[Delivery]) -> None:
        """Blobs count too: they are read to be judged, so a call could name more than memory."""
        if not deliveries:
            return
        sizes = [self._rows.blobs.claim(d.blob) if d.blob else len(d.payload) for d in deliveries]
        if (sum(sizes) > MAX_CALL_BYTES and len(sizes) > 1) or max(sizes) > MAX_ROW_BYTES:
            raise TooLarge(
                f"these deliveries have {sum(sizes)} bytes; a call takes {MAX_CALL_BYTES}, blobs "
                f"included, and a trajectory {MAX_ROW_BYTES}: send fewer at a time"
            )
        self._process.require_room(sum(sizes))

    async def _fetched(self, delivery: Delivery) -> Delivery:
        """With the payload that went ahead as a blob, read off the event loop."""
        if not delivery.blob:
            return delivery
        read = self._rows.blobs.read
        return replace(delivery, payload=await asyncio.to_thread(read, delivery.blob))

    def _count(self, item: Taken, now: float) -> None:
        if item.row is None:
            return
        if not item.is_failure:
            columns = BORN_SCORED if item.row.reward is not None else BORN
            arrived = self._rows.shelf.arrived
            arrived(item.row.space, item.row.row_id, item.row.arrival, columns, now)
        self.trajectories += 1
        self.sampled_tokens += item.tokens
        node = self._partition.nodes.get(item.row.node_id)
        if node is not None:
            node.num_tokens += item.tokens
        self.tokens_seen.append((now, item.tokens))
        while self.tokens_seen and self.tokens_seen[0][0] < now - RATE_WINDOW_S:
            self.tokens_seen.popleft()
        if item.is_failure:
            self.failed_tokens += item.tokens

    def tokens_per_s(self, now: float) -> float:
        seen = [tokens for at, tokens in self.tokens_seen if at > now - RATE_WINDOW_S]
        span_s = min(RATE_WINDOW_S, max(1.0, now - self._process.started_at))
        return sum(seen) / span_s
