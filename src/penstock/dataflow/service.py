# SPDX-License-Identifier: Apache-2.0
"""The dataflow service without HTTP: each command runs the core, makes its records durable, then
answers.

One event loop owns all state. A command's synchronous part decides; its answer leaves only after
the ledger's group commit. If storage fails the process ends, and its next life starts from what
is on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

import msgspec
import structlog

from penstock.dataflow.consumers import Consumer
from penstock.dataflow.groups import OpenGroup
from penstock.dataflow.home import Home
from penstock.dataflow.intake import Intake, Taken
from penstock.dataflow.ledger import Ledger
from penstock.dataflow.partition import Partition
from penstock.dataflow.protocol import (
    BatchAnswer,
    BatchRequest,
    CheckpointsRequest,
    CommitRequest,
    DeliveryAnswer,
    DeliveryRequest,
    DeliveryStatus,
    Heartbeat,
    IncarnationAnswer,
    IncarnationRequest,
    LeaseAnswer,
    LeaseRequest,
    LiveVersion,
    Orders,
    PolicyState,
    PublishRequest,
    Register,
    RowPayload,
    RowsAnswer,
)
from penstock.dataflow.records import (
    BatchRecord,
    CheckpointRecord,
    Record,
    Report,
    RowRecord,
)
from penstock.errors import BadRequest, Conflict, NotFound, StoreError
from penstock.types import (
    DropReason,
    GroupId,
    Manifest,
    NodeId,
    PolicyName,
    PublishedVersion,
    RowId,
    Task,
)
from penstock.wire.codec import decode

log = structlog.get_logger(__name__)

TICK_S = 0.5
STALL_S = 1.0
"""A tick later than this means that the whole process was held up, not that nodes were silent."""
MAX_DELIVERIES = 10_000
MAX_WAIT_S = 30.0
RATE_WINDOW_S = 10.0


IsGone = Callable[[], Awaitable[bool]]
"""Has the caller of this request hung up?"""


async def _stays() -> bool:
    """Callers in this process do not hang up."""
    return False


class Outbox:
    """The journal of the running command: what must be durable before its answer leaves."""

    def __init__(self) -> None:
        self._records: list[Record] = []

    def __call__(self, record: Record) -> None:
        self._records.append(record)

    def take(self) -> list[Record]:
        records, self._records = self._records, []
        return records


class Dataflow:
    """Home and one partition in one process, over one ledger."""

    def __init__(
        self,
        home: Home,
        partition: Partition,
        ledger: Ledger,
        outbox: Outbox,
        clock: Callable[[], float],
    ) -> None:
        self.home = home
        self.partition = partition
        self.ledger = ledger
        self.clock = clock
        self.started_at = clock()
        self.trajectories = 0
        self.sampled_tokens = 0
        self.tokens_seen: deque[tuple[float, int]] = deque()
        self.waiting_since: dict[tuple[str, str], float] = {}
        """(who, on what) to since when: lease and batch polls that are held open."""
        self.trainer_seen: dict[PolicyName, float] = {}
        self.source_trouble = ""
        """What a user's source raised when it was asked for the next task."""
        self._outbox = outbox
        self._intake = Intake(partition, ledger, self._is_published)
        self._told: dict[NodeId, tuple[PublishedVersion, ...]] = {}
        self._changed = asyncio.Event()

    def _hold_until(self, wait_s: float) -> float:
        if not 0 <= wait_s <= 3600:  # also when it is no number
            raise BadRequest(f"wait_s is {wait_s}; give 0 to 3600 seconds")
        return self.clock() + min(wait_s, MAX_WAIT_S)

    # --- the shape of every command -----------------------------------------------------------

    async def _settle(self, reports: Sequence[Report] = ()) -> None:
        """Let home judge what ended and start what has room; return when all of it is durable."""
        now = self.clock()
        for report in reports:
            self.home.report(report, now)
        if self.home.is_finished:
            for group_id in sorted(self.home.open):
                report = self.partition.drop(group_id, DropReason.REMAINDER, now)
                if report is not None:
                    self.home.report(report, now)
        else:
            self._issue(now)
        records = self._outbox.take()
        if records:
            durable = self.ledger.write(records)
            self._wake()
            await durable

    def _issue(self, now: float) -> None:
        """Start what has room. A user's source may raise: that stops new work, and nothing else."""
        try:
            for issue in self.home.issue(self.partition.index, now):
                self.partition.issue(issue)
        except Exception as error:
            if str(error) != self.source_trouble:
                log.exception("a source failed; no new work until it answers again")
            self.source_trouble = f"{type(error).__name__}: {error}"
        else:
            self.source_trouble = ""

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_for(self, change: asyncio.Event, give_up_at: float) -> None:
        """consumes: nothing · produces: nothing · waits for: a command after the caller looked
        woken by: `_wake()`"""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, give_up_at - self.clock())):
                await change.wait()

    async def run_timers(self) -> None:
        """consumes: time · produces: expired leases · waits for: the next tick"""
        await self._settle()
        while True:
            slept_at = self.clock()
            await asyncio.sleep(TICK_S)
            late_s = self.clock() - slept_at - TICK_S
            if late_s > STALL_S:
                log.warning("the service stood still; leases are prolonged", seconds=late_s)
                self.partition.forgive(late_s)
            await self.tick()

    async def tick(self) -> None:
        """Expire what is over, and look for work to start: a source may answer again."""
        await self._settle(self.partition.tick(self.clock()))

    # --- nodes --------------------------------------------------------------------------------

    def orders(self, node_id: NodeId) -> Orders:
        self._told[node_id] = self.home.wanted
        finished = self.home.is_finished
        return Orders(wanted=self.home.wanted, drain=finished, finished=finished)

    async def register(self, body: Register) -> Orders:
        await self._settle(self.partition.register(body, self.clock()))
        log.info("node registered", node=body.node_id, capacity=body.capacity)
        return self.orders(body.node_id)

    async def heartbeat(self, node_id: NodeId, body: Heartbeat) -> Orders:
        self.partition.heartbeat(
            node_id, body.session, self.clock(), state=body.state, live=body.live
        )
        self._wake()
        return self.orders(node_id)

    async def leave(self, node_id: NodeId, session: str) -> None:
        await self._settle(self.partition.leave(node_id, session, self.clock()))
        self._told.pop(node_id, None)
        log.info("node left", node=node_id)

    async def lease(self, body: LeaseRequest, is_gone: IsGone = _stays) -> LeaseAnswer:
        give_up_at = self._hold_until(body.wait_s)
        if not 0 < len(body.request_id) <= 128:
            raise BadRequest("request_id has 1 to 128 characters")
        self.partition.ask(body.node_id, body.session, body.request_id, self.clock())
        key = (body.node_id, "work")
        try:
            while True:
                change = self._changed
                answer = await self._try_lease(body)
                if answer.grants or answer.orders.drain:
                    return answer
                if self._told.get(body.node_id) != self.home.wanted:
                    return replace(answer, orders=self.orders(body.node_id))
                if self.clock() >= give_up_at:
                    return answer
                self.waiting_since.setdefault(key, self.clock())
                await self._wait_for(change, give_up_at)
                if await is_gone():  # a grant now would be held by nobody
                    return answer
        finally:
            self.waiting_since.pop(key, None)

    async def _try_lease(self, body: LeaseRequest) -> LeaseAnswer:
        live = self._live_now(body)

        def may_run(group: OpenGroup) -> bool:
            return self.home.may_run(group.due, live)

        grants = self.partition.lease(
            body.node_id, body.session, body.request_id, body.max_slots, may_run, self.clock()
        )
        tasks: dict[GroupId, int] = {}
        bodies: list[Task] = []
        for grant in grants:
            if grant.group_id not in tasks:
                tasks[grant.group_id] = len(bodies)
                bodies.append(self.partition.groups[grant.group_id].task)
        wanted = self._told.get(body.node_id)
        if grants:
            await self._settle()
            await self.ledger.flush()  # also for a repeated request, whose first answer may be lost
            wanted = None
        finished = self.home.is_finished
        return LeaseAnswer(
            tasks=tuple(bodies),
            grants=tuple(replace(grant, task=tasks[grant.group_id]) for grant in grants),
            orders=self.orders(body.node_id)
            if wanted is None
            else Orders(wanted=wanted, drain=finished, finished=finished),
        )

    def _live_now(self, body: LeaseRequest) -> tuple[LiveVersion, ...]:
        """What the node serves by its newest word: a heartbeat may overtake a held request."""
        node = self.partition.nodes.get(body.node_id)
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
        now = self.clock()
        taken = [self._intake.take(body.node_id, delivery, now) for delivery in body.deliveries]
        results = [item.result for item in taken]
        results += [self._intake.release(body.node_id, row_id, now) for row_id in body.released]
        for item in taken:
            self._count(item, now)
        await self._settle([report for item in taken for report in item.reports])
        if any(result.status is DeliveryStatus.FENCED for result in results):
            await self.ledger.flush()  # its first copy may be in the group that commits just now
            payloads = {delivery.row_id: delivery.payload for delivery in body.deliveries}
            results = [self._intake.look_again(result, payloads) for result in results]
        return DeliveryAnswer(results=tuple(results))

    def _is_published(self, policy: PolicyName, incarnation: int, number: int) -> bool:
        consumer = self.home.consumers.get(policy)
        return consumer is not None and consumer.lineage.has(incarnation, number)

    def _count(self, item: Taken, now: float) -> None:
        if not item.is_stored:
            return
        self.trajectories += 1
        self.sampled_tokens += item.tokens
        self.tokens_seen.append((now, item.tokens))
        while self.tokens_seen and self.tokens_seen[0][0] < now - RATE_WINDOW_S:
            self.tokens_seen.popleft()
        if item.is_failure:
            wasted = self.home.wasted_tokens
            wasted["failed"] = wasted.get("failed", 0) + item.tokens

    # --- trainers -----------------------------------------------------------------------------

    def policy_state(self, policy: str) -> PolicyState:
        consumer = self._seen(policy)
        lineage = consumer.lineage
        return PolicyState(
            policy=lineage.policy,
            incarnation=lineage.incarnation,
            number=lineage.number,
            seq=lineage.seq,
            published=lineage.published,
            steps=consumer.terms.steps,
        )

    def _seen(self, policy: str) -> Consumer:
        consumer = self.home.consumer(policy)
        self.trainer_seen[consumer.terms.policy] = self.clock()
        return consumer

    async def incarnate(self, policy: str, body: IncarnationRequest) -> IncarnationAnswer:
        consumer = self._seen(policy)
        now = self.clock()
        record = consumer.lineage.incarnate(
            expected=body.expected,
            number=body.number,
            seq=body.seq,
            request_id=body.request_id,
            now=now,
        )
        if record.incarnation != consumer.lineage.incarnation:
            self._outbox(record)
            consumer.lineage.apply_incarnation(record)
            self.home.moved(consumer, self._sealed_after(consumer), now)
            log.info("incarnation", policy=policy, incarnation=record.incarnation, at=record.number)
        await self._settle()
        await self.ledger.flush()
        return IncarnationAnswer(incarnation=record.incarnation, steps=consumer.terms.steps)

    def _sealed_after(self, consumer: Consumer) -> dict[int, int]:
        rows = self.ledger.tables.rows(
            "SELECT seq, num_groups FROM batches WHERE consumer = :policy AND seq > :seq",
            policy=consumer.terms.policy,
            seq=consumer.lineage.seq,
        )
        # A batch sealed a moment ago may not be committed to disk yet; memory knows it.
        return {int(seq): int(groups) for seq, groups in rows} | consumer.sealed

    async def batch(self, body: BatchRequest) -> BatchAnswer:
        consumer = self._seen(body.consumer)
        give_up_at = self._hold_until(body.wait_s)
        key = (f"trainer {body.consumer}", "batch")
        try:
            while True:
                change = self._changed
                consumer.lineage.require(body.incarnation)
                answer = await self._try_batch(consumer, body.seq)
                if answer.manifest or answer.end or self.clock() >= give_up_at:
                    return answer
                self.waiting_since.setdefault(key, self.clock())
                await self._wait_for(change, give_up_at)
        finally:
            self.waiting_since.pop(key, None)

    async def _try_batch(self, consumer: Consumer, seq: int) -> BatchAnswer:
        if seq <= consumer.last_sealed:
            return _serve(await self._sealed(consumer, seq))
        if self.home.has_ended(consumer):
            return BatchAnswer(manifest=None, end=True)
        record = self.home.seal(consumer, seq, self.clock())
        await self._settle()
        return BatchAnswer(manifest=None) if record is None else _serve(record)

    async def _sealed(self, consumer: Consumer, seq: int) -> BatchRecord:
        newest = consumer.newest_batch
        if newest is not None and newest.seq == seq:
            await self.ledger.flush()
            return newest
        where = "consumer = :policy AND seq = :seq"
        found = self.ledger.tables.read(BatchRecord, where, policy=consumer.terms.policy, seq=seq)
        if not found:
            raise NotFound(f"batch {consumer.terms.policy}.{seq} does not exist")
        return found[0]

    async def rows(self, policy: str, seq: int, rank: int, of: int) -> RowsAnswer:
        consumer = self._seen(policy)
        if not 0 <= rank < of:
            raise BadRequest(f"rank {rank} of {of}; ranks count from 0")
        if not 0 < seq <= consumer.last_sealed:
            raise NotFound(f"batch {policy}.{seq} is not sealed yet")
        record = await self._sealed(consumer, seq)
        manifest = decode(record.manifest, Manifest)
        row_ids = [row.row_id for row in manifest.rows][rank::of]
        return await asyncio.to_thread(self._read_rows, row_ids)

    def _read_rows(self, row_ids: list[RowId]) -> RowsAnswer:
        rows: dict[RowId, RowRecord] = {}
        for start in range(0, len(row_ids), 500):
            part = row_ids[start : start + 500]
            found = self.ledger.tables.read(RowRecord, "row_id IN :ids", ids=list[str](part))
            rows.update((row.row_id, row) for row in found)
        return RowsAnswer(rows=tuple(self._read_row(rows[row_id]) for row_id in row_ids))

    def _read_row(self, row: RowRecord) -> RowPayload:
        try:
            return RowPayload(row_id=row.row_id, payload=self.ledger.payload(row))
        except StoreError as error:  # contained to this record: every rank sees the same damage
            log.error("row is gone", row=row.row_id, reason=str(error))
            return RowPayload(row_id=row.row_id, payload=None)

    async def commit(self, policy: str, seq: int, body: CommitRequest) -> None:
        consumer = self._seen(policy)
        if seq > consumer.last_sealed:
            raise Conflict(f"batch {policy}.{seq} was never sealed")
        now = self.clock()
        record = consumer.lineage.commit(
            seq=seq,
            incarnation=body.incarnation,
            number=body.number,
            skipped=body.skipped,
            stats=msgspec.json.encode(_finite(body.stats)).decode(),
            now=now,
        )
        if seq > consumer.lineage.seq:
            self._outbox(record)
            consumer.lineage.apply_commit(record)
            self.home.moved(consumer, consumer.sealed, now)
        await self._settle()
        await self.ledger.flush()

    async def publish(self, policy: str, body: PublishRequest) -> None:
        consumer = self._seen(policy)
        record = consumer.lineage.publish(
            incarnation=body.incarnation,
            number=body.number,
            manifest_digest=body.manifest_digest,
            weights_digest=body.weights_digest,
            now=self.clock(),
        )
        if not consumer.lineage.has(record.incarnation, record.number):
            self._outbox(record)
            consumer.lineage.apply_version(record)
        await self._settle()
        await self.ledger.flush()

    async def checkpoints(self, policy: str, body: CheckpointsRequest) -> None:
        consumer = self._seen(policy)
        consumer.lineage.require(body.incarnation)
        retained = msgspec.json.encode(body.retained).decode()
        self._outbox(
            CheckpointRecord(
                policy=consumer.terms.policy,
                incarnation=body.incarnation,
                retained=retained,
                at=self.clock(),
            )
        )
        await self._settle()


def _serve(record: BatchRecord) -> BatchAnswer:
    return BatchAnswer(manifest=decode(record.manifest, Manifest), digest=record.digest)


def _finite(stats: Mapping[str, float]) -> dict[str, float]:
    """JSON has no word for NaN; what is not a number is left out."""
    return {name: value for name, value in stats.items() if math.isfinite(value)}


def steady_clock() -> Callable[[], float]:
    """Wall time at the start, then only forwards: a jump of the system clock moves no deadline."""
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()
