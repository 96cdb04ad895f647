# SPDX-License-Identifier: Apache-2.0
"""Commands of rollout nodes at a partition: register, heartbeat, lease, deliver, leave. No HTTP.

Each command runs the core, makes its records durable, then answers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import cache

import structlog

from penstock.bounds import MAX_ROW_BYTES
from penstock.dataflow.core.groups import Node
from penstock.dataflow.core.leasing import DeliveryStatus, LiveVersion, RegisterRequest
from penstock.dataflow.core.names import EVAL, REWARD, TURNS
from penstock.dataflow.core.partition_runtime import PartitionRuntime
from penstock.dataflow.service.nodes.intake import DeliveryIntake, IntakeResult, digest_of
from penstock.dataflow.service.nodes.messages import (
    Delivery,
    DeliveryAnswer,
    DeliveryRequest,
    DeliveryResult,
    Heartbeat,
    LeaseAnswer,
    LeaseRequest,
    NodeDirectives,
)
from penstock.dataflow.service.nodes.polls import Poll, PollQueue
from penstock.dataflow.service.nodes.turns import TurnHandlers
from penstock.dataflow.service.operators.messages import PartitionMetrics
from penstock.dataflow.service.process import IsDisconnected, Process, never_disconnected
from penstock.dataflow.service.resource_sharing import ResourceSharing
from penstock.dataflow.service.rows.handlers import RowService
from penstock.errors import BadRequest, Busy, NotFound, TooLarge
from penstock.types import NodeId, PolicyName, PublishedVersion, RowId, subject_of_node
from penstock.wire.call_budget import CallBudget

log = structlog.get_logger(__name__)

MAX_CALL_BYTES = 64 << 20
RATE_WINDOW_S = 10.0
RECHECKS_PER_TURN = 64
_Versions = tuple[tuple[PublishedVersion, ...], tuple[PublishedVersion, ...]]
"""Those that a node should load: the newest ones, and the pinned ones."""
CatchUpWithCoordinator = Callable[[], Awaitable[bool]]
"""Receive everything the coordinator has sent so far; False when it is unreachable."""


class NodeHandlers:
    def __init__(
        self,
        process: Process,
        host: PartitionRuntime,
        rows: RowService,
        is_finished: Callable[[], bool],
        catch_up: CatchUpWithCoordinator | None = None,
        sharing: ResourceSharing | None = None,
    ) -> None:
        """`catch_up`: given when the coordinator runs in another process; `sharing`: when it runs
        in this one."""
        self.trajectories = 0
        self.sampled_tokens = 0
        self.untrusted_tokens = 0
        """Of these, tokens that untrusted nodes delivered."""
        self.failed_tokens = 0
        """Tokens of failed attempts."""
        self.tokens_seen: deque[tuple[float, int]] = deque()
        self.process = process
        self._host = host
        self.partition = host.partition
        self._rows = rows
        self._is_finished = is_finished
        self._catch_up = catch_up
        self._sharing = sharing
        self.intake = DeliveryIntake(
            host.partition,
            process.ledger,
            host.gate.is_published,
            next_arrival=rows.row_window.next_arrival,
            is_scored=host.completion.is_scored,
        )
        self.turns = TurnHandlers(host.partition)
        self.pinned_versions: Callable[[], tuple[PublishedVersion, ...]] = lambda: (
            host.partition.pinned_versions
        )
        """Versions of the evaluation in progress; only the coordinator knows of all."""
        self._sent_versions: dict[NodeId, _Versions] = {}
        self._ordered_to_leave: dict[NodeId, str] = {}
        """The process of each node that an operator drains."""
        self._polls = PollQueue()
        self._session_polls = PollQueue()
        """Polls of nodes that serve external agents; they lease other slots."""
        self._reading = CallBudget()
        """Bytes that deliveries read from blobs, by subject: their bodies are small."""
        self._num_offered = 0
        """Slots on offer when polls were last woken."""
        self._last_orders: tuple[_Versions, bool] = (((), ()), False)
        """Versions to load, and whether the run is finished, when polls were last woken."""

    # --- membership ---------------------------------------------------------------------------

    def node(self, node_id: NodeId) -> Node | None:
        return self.partition.nodes.get(node_id)

    def _versions_for(self, node_id: NodeId) -> _Versions:
        node = self.partition.nodes.get(node_id)
        targets = self._host.partition.target_versions
        if node is None:
            return targets, ()
        pinned = self.pinned_versions() if self.partition.waiting.may_evaluate(node) else ()
        return () if node.is_evaluator else targets, pinned

    def orders(self, node_id: NodeId) -> NodeDirectives:
        wanted, pinned = self._sent_versions[node_id] = self._versions_for(node_id)
        finished = self._is_finished()
        node, sharing = self.partition.nodes.get(node_id), self._sharing
        is_shared = sharing is not None and node is not None and sharing.is_shared(node)
        return NodeDirectives(
            pause=sharing.pause_of(node) if sharing and node and is_shared else "",
            is_shared=is_shared,
            wanted=wanted,
            pinned=pinned,
            drain=finished or self._is_ordered_to_leave(node_id),
            finished=finished,
            stop=self.partition.node_registry.revoked(node_id),
        )

    async def register(self, body: RegisterRequest) -> NodeDirectives:
        self.partition.register(body, self.process.clock())
        self._call(body.node_id)
        if self._sharing is not None:
            self._sharing.joined(self.partition.nodes[body.node_id])
        await self.process.make_durable()
        log.info("node registered", node=body.node_id, capacity=body.capacity)
        return self.orders(body.node_id)

    async def heartbeat(self, node_id: NodeId, body: Heartbeat) -> NodeDirectives:
        known = self.partition.nodes.get(node_id)
        before = None if known is None else (known.state, known.live)
        is_new = self.partition.heartbeat(
            node_id,
            body.boot_id,
            self.process.clock(),
            state=body.state,
            live=body.live,
            pinned=body.pinned,
        )
        node = self.partition.nodes[node_id]
        node.work, node.num_done = body.work, body.num_done
        if is_new:
            self._call(node_id)
            if self._sharing is not None and before is not None:
                self._sharing.reported(node, *before)
        return self.orders(node_id)

    async def leave(self, node_id: NodeId, boot_id: str) -> None:
        self.partition.leave(node_id, boot_id, self.process.clock())
        self._call(node_id)
        await self.process.make_durable()
        self._sent_versions.pop(node_id, None)
        self._ordered_to_leave.pop(node_id, None)
        log.info("node left", node=node_id)

    def drain(self, name: str) -> None:
        """Tell this process of a node to return its work and leave; its next answer says so. A
        later process of the node is not meant."""
        node_id = NodeId(name)
        node = self.partition.nodes.get(node_id)
        if node is None:
            raise NotFound(
                f"no node {name[:128]} in this run; `penstock status RUN --json` lists the nodes"
            )
        self._ordered_to_leave[node_id] = node.record.boot_id
        log.info("node ordered to leave", node=node_id)
        self._call(node_id)

    def _is_ordered_to_leave(self, node_id: NodeId) -> bool:
        node = self.partition.nodes.get(node_id)
        return node is not None and self._ordered_to_leave.get(node_id) == node.record.boot_id

    def forget_silent(self, subject: str) -> bool:
        """Forget the node of this subject that is silent for longest; False if there is none.
        Durable with the next command."""
        node_id = self.partition.forget_silent(subject, self.process.clock())
        if node_id is not None:
            self._sent_versions.pop(node_id, None)
            self._ordered_to_leave.pop(node_id, None)
        return node_id is not None

    # --- leases -------------------------------------------------------------------------------

    async def lease(
        self, body: LeaseRequest, is_disconnected: IsDisconnected = never_disconnected
    ) -> LeaseAnswer:
        process = self.process
        give_up_at = process.poll_deadline(body.wait_s)
        if not 0 < len(body.request_id) <= 128:
            raise BadRequest("request_id must be 1 to 128 characters long")
        self.partition.ask(body.node_id, body.boot_id, body.request_id, process.clock())
        is_session_gateway = self.partition.nodes[body.node_id].is_session_gateway
        polls = self._session_polls if is_session_gateway else self._polls
        key = (body.node_id, "work")
        capacity = self.partition.nodes[body.node_id].record.capacity
        poll = Poll(body.node_id, max(1, min(body.max_slots, capacity)))
        try:
            while True:
                polls.mark_checked(poll)
                answer = await self._try_lease(body)
                if answer.grants:
                    polls.call(body.node_id)  # the same request may have arrived twice
                    return answer
                if answer.orders.drain or answer.orders.stop:
                    return answer
                if self._sent_versions.get(body.node_id) != self._versions_for(body.node_id):
                    return replace(answer, orders=self.orders(body.node_id))
                now = process.clock()
                if now >= give_up_at:
                    return answer
                process.waiting_since.setdefault(key, now)
                self._offer()
                await polls.wait(poll, give_up_at - now)
                if await is_disconnected():
                    return answer  # the caller hung up; a grant would have no holder
        finally:
            process.waiting_since.pop(key, None)
            polls.mark_checked(poll)
            self._offer()

    def on_wake(self) -> None:
        """Wake the polls that a command may affect."""
        versions = (self._host.partition.target_versions, self.pinned_versions())
        orders = (versions, self._is_finished())
        if orders != self._last_orders:
            self._last_orders = orders
            self._polls.wake_all()
            self._session_polls.wake_all()
        if self.partition.waiting.num_queued != self._num_offered:
            self._num_offered = self.partition.waiting.num_queued
            self._mark_new_work()
        self._offer()

    def _call(self, node_id: NodeId) -> None:
        self._polls.call(node_id)
        self._session_polls.call(node_id)

    def _mark_new_work(self) -> None:
        self._polls.mark_new_work()
        self._session_polls.mark_new_work()

    def _offer(self) -> None:
        """Offer the remaining slots to polls that have not checked since."""
        waiting = self.partition.waiting
        others = waiting.num_slots - waiting.num_sessions + waiting.num_evaluations
        for polls, num_waiting in (
            (self._polls, others),
            (self._session_polls, waiting.num_sessions),
        ):
            if len(polls) and num_waiting and self.process.has_room:
                polls.offer(num_waiting)

    def tick(self) -> None:
        """React to changes without a command: disk space, the lease limit of a slow node."""
        self.turns.tick()
        self._mark_new_work()
        self.on_wake()

    async def _try_lease(self, body: LeaseRequest) -> LeaseAnswer:
        process = self.process
        is_leaving = self._is_ordered_to_leave(body.node_id)
        grants = self.partition.lease(
            body.node_id,
            body.boot_id,
            body.request_id,
            body.max_slots if process.has_room and not is_leaving else 0,
            self._live_now(body),
            process.clock(),
            self._pinned_now(body),
        )
        groups = dict.fromkeys(grant.group_id for grant in grants)
        tasks = tuple(self.partition.groups[group_id].task for group_id in groups)
        wanted = self._sent_versions.get(body.node_id)
        if grants:
            await process.make_all_durable()  # the first answer to a repeated request may be lost
            wanted = None
        finished = self._is_finished()  # then this is the last answer: name the last version
        return LeaseAnswer(
            tasks=tasks,
            grants=tuple(self.turns.with_num_recorded(body.node_id, grants)),
            orders=self.orders(body.node_id)
            if wanted is None or finished or is_leaving
            else NodeDirectives(wanted=wanted[0], pinned=wanted[1]),
        )

    def _pinned_now(self, body: LeaseRequest) -> tuple[LiveVersion, ...]:
        """Pinned versions by its latest report. An evaluation has one version, so a request that
        names another one is out of date."""
        node = self.partition.nodes.get(body.node_id)
        return body.pinned if node is None or not node.pinned else node.pinned

    def _live_now(self, body: LeaseRequest) -> tuple[LiveVersion, ...]:
        """Versions the node serves by its latest report: a heartbeat may overtake a held
        request."""
        node = self.partition.nodes.get(body.node_id)
        newest: dict[PolicyName, LiveVersion] = {}
        for version in (*body.live, *(node.live if node is not None else ())):
            known = newest.setdefault(version.policy, version)
            if (version.incarnation, version.number) > (known.incarnation, known.number):
                newest[version.policy] = version
        return tuple(newest.values())

    # --- deliveries ---------------------------------------------------------------------------

    async def deliver(self, body: DeliveryRequest) -> DeliveryAnswer:
        num_blob_bytes = self._require_room(body.deliveries)
        if not num_blob_bytes:
            return await self._deliver(body)
        who = (subject_of_node(body.node_id), "blobs of deliveries")
        await self._reading.enter(who, num_blob_bytes)
        try:
            return await self._deliver(body)
        finally:
            self._reading.leave(who, num_blob_bytes)

    async def _deliver(self, body: DeliveryRequest) -> DeliveryAnswer:
        results = [item.result for item in await self._read_and_take(body)]
        now = self.process.clock()
        results += [self.intake.release(body.node_id, row_id, now) for row_id in body.released]
        await self.process.make_durable()
        if any(result.status is DeliveryStatus.FENCED for result in results):
            await self.process.ledger.flush()  # its first copy may be committing right now
            results = await self._recheck_fenced(body.deliveries, results)
        return DeliveryAnswer(results=tuple(results), durability=self.process.ledger.durability)

    async def _read_and_take(self, body: DeliveryRequest) -> list[IntakeResult]:
        """Read and decode only what may be stored."""
        refused = self.intake.refuse_unread(body.node_id, body.deliveries)
        deliveries = [
            await self._fetched(delivery)
            for delivery, no in zip(body.deliveries, refused, strict=True)
            if no is None
        ]
        taken = self._take(body.node_id, deliveries, is_authoritative=self._catch_up is None)
        if any(item.is_unknown_version for item in taken):
            taken = await self._retry_unknown_versions(body.node_id, deliveries, taken)
        judged = iter(taken)
        return [no or next(judged) for no in refused]

    async def _recheck_fenced(
        self, deliveries: Sequence[Delivery], results: Sequence[DeliveryResult]
    ) -> list[DeliveryResult]:
        delivered = {delivery.row_id: delivery for delivery in deliveries}

        @cache  # one row may be named many times
        def digest_for(row_id: RowId) -> str:
            return digest_of(delivered[row_id]) if row_id in delivered else ""

        rechecked: list[DeliveryResult] = []
        for index, result in enumerate(results):
            if index % RECHECKS_PER_TURN == RECHECKS_PER_TURN - 1:
                await asyncio.sleep(0)  # each may read the ledger; let other calls run
            rechecked.append(self.intake.recheck_fenced(result, digest_for))
        return rechecked

    def _take(
        self, node_id: NodeId, deliveries: Sequence[Delivery], *, is_authoritative: bool
    ) -> list[IntakeResult]:
        now = self.process.clock()
        taken = self.intake.store_or_refuse(
            node_id, deliveries, now, is_authoritative=is_authoritative
        )
        for item in taken:
            self._count(item, now)
        return taken

    async def _retry_unknown_versions(
        self, node_id: NodeId, deliveries: Sequence[Delivery], taken: Sequence[IntakeResult]
    ) -> list[IntakeResult]:
        """Weights may reach a node before this partition learns of the version: catch up with the
        coordinator."""
        assert self._catch_up is not None, (
            "a partition in the coordinator's process knows all versions"
        )
        if not await self._catch_up():
            raise Busy(  # rows accepted so far are duplicates on the next try
                "the coordinator is unreachable, so the versions of these rows cannot be "
                "checked; try again, their leases stay valid",
                retry_after_s=1.0,
            )
        early = [d for d, item in zip(deliveries, taken, strict=True) if item.is_unknown_version]
        again = iter(self._take(node_id, early, is_authoritative=True))
        return [next(again) if item.is_unknown_version else item for item in taken]

    def _require_room(self, deliveries: Sequence[Delivery]) -> int:
        """Count blobs too: validation reads them into memory. Returns their bytes."""
        if not deliveries:
            return 0
        sizes = [self._rows.blobs.claim(d.blob) if d.blob else len(d.payload) for d in deliveries]
        if (sum(sizes) > MAX_CALL_BYTES and len(sizes) > 1) or max(sizes) > MAX_ROW_BYTES:
            raise TooLarge(
                f"these deliveries have {sum(sizes)} bytes; the limit per call is "
                f"{MAX_CALL_BYTES}, blobs included, and per trajectory {MAX_ROW_BYTES}: "
                "send fewer at a time"
            )
        self.process.require_room(sum(sizes))
        return sum(size for delivery, size in zip(deliveries, sizes, strict=True) if delivery.blob)

    async def _fetched(self, delivery: Delivery) -> Delivery:
        """The delivery with its payload read from the uploaded blob, off the event loop."""
        if not delivery.blob:
            return delivery
        read = self._rows.blobs.read
        payload = await asyncio.to_thread(read, delivery.blob)
        return replace(delivery, payload=memoryview(payload))

    def _count(self, item: IntakeResult, now: float) -> None:
        row, outcome = item.row, item.outcome
        if row is None or outcome is None:
            return
        if row.blob:
            self._rows.upload_quotas.release(subject_of_node(row.node_id), row.blob)
        self.turns.on_delivery(row, outcome)
        if row.space == EVAL:
            return  # not a part of training
        tokens = sum(row.summary.sampled.values())
        if outcome.has_reward:
            columns = (TURNS,) if row.summary.reward is None else (TURNS, REWARD)
            self._rows.row_window.add_rows(row.space, (row.row_id,), row.arrival, columns, now)
        else:
            self.failed_tokens += tokens
        self.trajectories += 1
        self.sampled_tokens += tokens
        node = self.partition.nodes.get(row.node_id)
        if node is not None:
            node.num_tokens += tokens
            self.untrusted_tokens += tokens if node.is_untrusted else 0
        self.tokens_seen.append((now, tokens))
        while self.tokens_seen and self.tokens_seen[0][0] < now - RATE_WINDOW_S:
            self.tokens_seen.popleft()

    def _tokens_per_s(self) -> float:
        now = self.process.clock()
        seen = [tokens for at, tokens in self.tokens_seen if at > now - RATE_WINDOW_S]
        span_s = min(RATE_WINDOW_S, max(1.0, now - self.process.started_at))
        return sum(seen) / span_s

    def figures(self) -> PartitionMetrics:
        return PartitionMetrics(
            num_waiting=self.partition.waiting.num_slots,
            num_open=len(self.partition.groups),
            num_nodes=len(self.partition.nodes),
            trajectories=self.trajectories,
            sampled_tokens=self.sampled_tokens,
            untrusted_tokens=self.untrusted_tokens,
            failed_tokens=self.failed_tokens,
            salvaged_tokens=self.turns.salvaged_tokens,
            tokens_per_s=self._tokens_per_s(),
        )
