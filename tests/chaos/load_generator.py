# SPDX-License-Identifier: Apache-2.0
"""Load on a dataflow service over real HTTP: four rollout nodes and one trainer that behave as
badly as real ones do.

Nodes repeat deliveries, send other bytes under an old id, die and come back with late results;
the trainer dies, restores an older checkpoint and lets its old life try to commit. Whatever the
service promises goes into the history, and whatever it must refuse is seen to be refused."""

from __future__ import annotations

import asyncio
import gc
import random
import uuid
import warnings
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Self

from blake3 import blake3
from tests.chaos.ack_log import AckLog
from tests.chaos.processes import Services

from penstock.dataflow.client.partitioned import PartitionedNodeClient
from penstock.dataflow.core.leasing import (
    DeliveryStatus,
    Grant,
    LiveVersion,
    NodeState,
    RegisterRequest,
)
from penstock.dataflow.service.messages import Ack
from penstock.dataflow.service.nodes.messages import (
    Delivery,
    DeliveryAnswer,
    DeliveryRequest,
    Heartbeat,
    LeaseRequest,
)
from penstock.dataflow.service.operators.messages import Status
from penstock.dataflow.service.trainers.messages import (
    BatchAnswer,
    BatchRequest,
    BatchRowsRequest,
    CheckpointsRequest,
    CommitRequest,
    IncarnationAnswer,
    IncarnationRequest,
    PolicyState,
    PublishRequest,
    RowsAnswer,
    RowsRequest,
)
from penstock.errors import Conflict, NotFound, StorageFull, Unreachable, WireError
from penstock.fleet.run_folder import RunFolder
from penstock.types import (
    FailureKind,
    FinishReason,
    NodeId,
    Outcome,
    OutcomeKind,
    PolicyName,
    PublishedVersion,
    RowId,
    RowPayload,
    SamplingSpec,
    Trajectory,
    Turn,
    VersionSpan,
    log_probs,
    token_ids,
)
from penstock.wire.auth import Role
from penstock.wire.client import AsyncServiceClient
from penstock.wire.codec import encode

POLICY = PolicyName("policy")
NUM_NODES = 4
CAPACITY = 12
MAX_TOKENS = 120
GOOD = (DeliveryStatus.STORED, DeliveryStatus.DUPLICATE)
PROGRESS_S = 240.0
HEARTBEAT_S = 0.75
TOKEN_S = 12 * 3600.0


def trajectory(
    grant: Grant, node_id: NodeId, live: LiveVersion, rng: random.Random, *, fails: bool = False
) -> Delivery:
    row_id = RowId(f"{grant.group_id}.{grant.slot}.{grant.epoch}")
    num = rng.randrange(1, MAX_TOKENS)
    span = VersionSpan(start=0, end=num, incarnation=live.incarnation, number=live.number)
    turn = Turn(
        policy=POLICY,
        parent=-1,
        prompt_ids=token_ids([1, 2]),
        sampled_ids=token_ids([rng.randrange(1000) for _ in range(num)]),
        logprobs=log_probs([-rng.random() for _ in range(num)]),
        spans=(span,),
        sampling=SamplingSpec(),
        finish=FinishReason.STOP,
    )
    failed = Outcome(kind=OutcomeKind.FAILED, reason=FailureKind.ENGINE)
    record = Trajectory(
        row_id=row_id,
        group_id=grant.group_id,
        slot=grant.slot,
        epoch=grant.epoch,
        attempt=grant.attempt,
        node_id=node_id,
        turns=(turn,),
        reward=None if fails else rng.random(),
        outcome=failed if fails else Outcome(kind=OutcomeKind.COMPLETED),
    )
    return Delivery(row_id=row_id, payload=memoryview(encode(record)), secret=grant.secret)


class FaultyNode:
    """lease → deliver, and all that goes wrong on the way."""

    def __init__(
        self, name: str, client: PartitionedNodeClient, history: AckLog, rng: random.Random
    ) -> None:
        self.node_id = NodeId(name)
        self.client = client
        self._history = history
        self._rng = rng
        self._boot_id = ""
        self._live: LiveVersion | None = None
        self._old: list[Delivery] = []
        """Acknowledged lately; sent again now and then."""

    async def run(self) -> None:
        """consumes: leases · produces: rows in the history · waits for: the service, for ever"""
        while True:
            await self.register()
            held: list[Delivery] = []
            while self._rng.random() > 0.01:
                held = await self.work()
                await self.deliver(held)
                await self._inject_fault()
                await asyncio.sleep(self._rng.uniform(0.0, 0.02))
            held = await self.work()  # dies with work in its hands …
            await self.register()
            await self._expect(held, {DeliveryStatus.FENCED}, "a late result")  # … and is too late

    async def register(self) -> None:
        self._boot_id = uuid.uuid4().hex
        body = RegisterRequest(
            node_id=self.node_id, boot_id=self._boot_id, capacity=CAPACITY, policies=()
        )
        await self._follow((await self.client.register(body)).orders.wanted, is_new=True)

    async def _follow(self, wanted: tuple[PublishedVersion, ...], *, is_new: bool = False) -> None:
        live = None
        if wanted:
            first = wanted[0]
            live = LiveVersion(policy=POLICY, incarnation=first.incarnation, number=first.number)
        if live is not None and (is_new or live != self._live):
            self._live = live
            await self._beat(live)

    async def _beat(self, live: LiveVersion) -> None:
        body = Heartbeat(boot_id=self._boot_id, state=NodeState.LIVE, live=(live,))
        await self.client.heartbeat(self.node_id, body)

    async def beats(self) -> None:
        """consumes: time · produces: heartbeats of the life it leads now · waits for: the next"""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            if self._live is not None:
                with suppress(Conflict, NotFound):  # it registers anew at this moment
                    await self._beat(self._live)

    async def work(self, max_slots: int = 0) -> list[Delivery]:
        """Results of so many leases at most, or of as many as a node happens to have room for."""
        live = self._live
        body = LeaseRequest(
            request_id=uuid.uuid4().hex,
            node_id=self.node_id,
            boot_id=self._boot_id,
            max_slots=max_slots or self._rng.randrange(1, CAPACITY),
            wait_s=1.0,
            live=() if live is None else (live,),
        )
        answer = await self.client.lease(body)
        await self._follow(answer.orders.wanted)
        if live is None:
            return []
        rng = self._rng
        return [
            trajectory(grant, self.node_id, live, rng, fails=rng.random() < 0.02)
            for grant in answer.grants
        ]

    def request(self, deliveries: list[Delivery]) -> DeliveryRequest:
        return DeliveryRequest(
            node_id=self.node_id, boot_id=self._boot_id, deliveries=tuple(deliveries)
        )

    async def _send(self, deliveries: list[Delivery]) -> list[tuple[Delivery, DeliveryStatus, str]]:
        answer = await self.client.deliver(self.request(deliveries))
        results = zip(deliveries, answer.results, strict=True)
        return [(delivery, result.status, result.detail) for delivery, result in results]

    async def deliver(self, held: list[Delivery]) -> None:
        while held:
            count = self._rng.randrange(1, 5)
            part, held = held[:count], held[count:]
            for delivery, status, detail in await self._send(part):
                if status in GOOD:
                    self._history.delivered(delivery.row_id, blake3(delivery.payload).hexdigest())
                    self._old.append(delivery)
                elif status is not DeliveryStatus.FENCED:
                    said = f"{delivery.row_id} answered {status} {detail}"
                    self._history.duplicated.append(said)
        del self._old[:-8]

    async def _inject_fault(self) -> None:
        if self._old and self._rng.random() < 0.1:
            again = [self._rng.choice(self._old)]
            await self._expect(again, {DeliveryStatus.DUPLICATE}, "the same bytes again")
            other = replace(again[0], payload=memoryview(bytes(again[0].payload) + b"\0"))
            await self._expect([other], {DeliveryStatus.CONFLICT}, "other bytes")

    async def _expect(
        self, deliveries: list[Delivery], allowed: set[DeliveryStatus], what: str
    ) -> None:
        if not deliveries:
            return
        for delivery, status, _ in await self._send(deliveries):
            if status not in allowed:
                self._history.duplicated.append(f"{what} for {delivery.row_id}: {status}")


class Probe:
    """A node that holds one result back, to see what becomes of a delivery just now."""

    def __init__(self, folder: RunFolder, history: AckLog) -> None:
        run, self._url = folder.read_config().name, folder.endpoints().dataflow
        self._token = folder.token(run, Role.ROLLOUT, ttl_s=TOKEN_S, subject="probe")
        self._node = FaultyNode(
            "probe", PartitionedNodeClient(self._url, self._token), history, random.Random(0)
        )
        self._held: list[Delivery] = []

    async def __aenter__(self) -> Self:
        self._caller = AsyncServiceClient(self._url, self._token)
        self._beats = asyncio.create_task(self._node.beats())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._beats.cancel()
        await asyncio.wait([self._beats])
        await self._caller.close()
        await self._node.client.close()

    async def hold(self, num: int) -> None:
        """So many and no more: each may keep a group open, and the others must fill a batch."""
        await self._node.register()
        async with asyncio.timeout(PROGRESS_S):
            while len(self._held) < num:
                self._held += await self._node.work(num - len(self._held))

    async def refusal(self) -> float | None:
        """Send one result. Seconds after which to come back, 0 when that was not said; None: it
        was taken."""
        delivery = self._held[-1]
        body = self._node.request([delivery])
        path = "/v1/trajectories"
        try:
            await self._caller.call("POST", path, body, DeliveryAnswer, deadline_s=0.0)
        except Unreachable as error:
            if isinstance(error.__cause__, StorageFull):
                return error.__cause__.retry_after_s or 0.0
            raise
        self._held.pop()
        return None

    async def deliver(self) -> None:
        """When there is room again; the lease may have ended meanwhile."""
        await self._node.deliver(self._held)
        self._held = []


async def read_batch(
    caller: AsyncServiceClient, partition_callers: PartitionCallers, seq: int
) -> list[RowPayload]:
    """Rows of a batch: home's own, and the others directly from their partitions."""
    path = f"/v1/batches/{POLICY}.{seq}/rows"
    answer = await caller.call("POST", path, BatchRowsRequest(), RowsAnswer)
    rows = [row for row in answer.rows if not row.at]
    for url in sorted({row.at for row in answer.rows if row.at}):
        body = RowsRequest(row_ids=tuple(row.row_id for row in answer.rows if row.at == url))
        rows += (await partition_callers(url).call("POST", "/v1/rows", body, RowsAnswer)).rows
    return rows


class PartitionCallers:
    """Callers of the partitions, made as they are needed."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._callers: dict[str, AsyncServiceClient] = {}

    def __call__(self, url: str) -> AsyncServiceClient:
        if url not in self._callers:
            self._callers[url] = AsyncServiceClient(url, self._token)
        return self._callers[url]

    async def close(self) -> None:
        for caller in self._callers.values():
            await caller.close()


class RewindingTrainer:
    """batch → rows → commit → publish; its weights are the list of rows it was trained on."""

    def __init__(
        self,
        caller: AsyncServiceClient,
        partition_callers: PartitionCallers,
        history: AckLog,
        rng: random.Random,
    ) -> None:
        self._caller = caller
        self._far = partition_callers
        self._history = history
        self._rng = rng
        self.incarnation = 0
        self.number = self.seq = 0
        self.trained: dict[int, tuple[str, ...]] = {}
        """Rows by seq, along the surviving lineage: what the weights are made of."""
        self._checkpoints: list[tuple[int, int, dict[int, tuple[str, ...]]]] = [(0, 0, {})]
        self.gate = asyncio.Lock()
        """Whoever holds it makes the steps."""

    async def run(self) -> None:
        """consumes: sealed batches · produces: commits in the history · waits for: a batch"""
        while True:
            async with self.gate:
                await self._restart_from_checkpoint()
            while self._rng.random() > 0.03:
                async with self.gate:
                    await self.step()

    async def state(self) -> PolicyState:
        return await self._caller.call("GET", f"/v1/policies/{POLICY}", None, PolicyState)

    async def wait_ready(self, num_groups: int) -> None:
        """So many groups wait to be sealed. Batches that a rewind brought back are trained first:
        they count against what may start."""
        async with asyncio.timeout(PROGRESS_S):
            while True:
                status = await self._caller.call("GET", "/v1/status", None, Status)
                if status.policies[0].ready >= num_groups:
                    return
                if status.policies[0].sealed:
                    await self.step()
                else:
                    await asyncio.sleep(0.05)

    async def _restart_from_checkpoint(self) -> None:
        """Restore a checkpoint; what was trained after it is forgotten, and served again."""
        state, old = await self.state(), self.incarnation
        self.require(state)
        index = self._rng.randrange(len(self._checkpoints))
        self.number, self.seq, trained = self._checkpoints[index]
        self.trained = dict(trained)
        del self._checkpoints[index + 1 :]
        body = IncarnationRequest(
            request_id=uuid.uuid4().hex,
            expected=state.incarnation,
            number=self.number,
            seq=self.seq,
        )
        path = f"/v1/policies/{POLICY}/incarnations"
        answer = await self._caller.call("POST", path, body, IncarnationAnswer)
        self.incarnation = answer.incarnation
        await self._publish()
        await self._retain()
        if old:
            await self._fenced_trainer_returns(old)

    def require(self, state: PolicyState) -> None:
        """The ledger stands exactly where it last told this trainer it stands."""
        found = (state.incarnation, state.number, state.seq)
        if found != (self.incarnation, self.number, self.seq):
            acked = (self.incarnation, self.number, self.seq)
            self._history.lost.append(f"trainer promised {acked}, the ledger is at {found}")

    async def _fenced_trainer_returns(self, old: int) -> None:
        body = CommitRequest(incarnation=old, number=self.number + 1)
        try:
            await self._commit(self.seq + 1, body)
        except Conflict:  # fenced; or its batch is not even sealed yet
            return
        said = f"a replaced trainer committed batch {self.seq + 1}"
        self._history.trained_twice.append(said)

    async def step(self) -> None:
        seq = self.seq + 1
        body = BatchRequest(consumer=POLICY, seq=seq, incarnation=self.incarnation, wait_s=2.0)
        answer = await self._caller.call("POST", "/v1/batches", body, BatchAnswer)
        if answer.manifest is None:
            return
        self._history.sealed(seq, answer.digest)
        if blake3(encode(answer.manifest)).hexdigest() != answer.digest:
            self._history.lost.append(f"manifest {seq} is not what its digest says")
        await self._read_rows(seq, {row.row_id: row.digest for row in answer.manifest.rows})
        self.trained[seq] = tuple(row.row_id for row in answer.manifest.rows)
        commit = CommitRequest(incarnation=self.incarnation, number=self.number + 1)
        await self._commit(seq, commit)
        self.seq, self.number = seq, self.number + 1
        self._history.committed(seq, self.incarnation, self.number)
        await self._publish()
        await self._keep()

    async def _commit(self, seq: int, body: CommitRequest) -> None:
        await self._caller.call("POST", f"/v1/batches/{POLICY}.{seq}/commit", body, Ack)

    async def _read_rows(self, seq: int, due: dict[RowId, str]) -> None:
        served = {row.row_id: row.payload for row in await read_batch(self._caller, self._far, seq)}
        for row_id, digest in due.items():
            payload = served.get(row_id)
            if payload is None or blake3(payload).hexdigest() != digest:
                self._history.lost.append(f"{row_id} of batch {seq} was not served as sealed")

    async def _publish(self) -> None:
        body = PublishRequest(
            incarnation=self.incarnation,
            number=self.number,
            manifest_digest="0" * 64,
            weights_digest=blake3(repr(sorted(self.trained.items())).encode()).hexdigest(),
        )
        path = f"/v1/policies/{POLICY}/versions"
        await self._caller.call("POST", path, body, Ack)

    async def _keep(self) -> None:
        """A checkpoint now and then; the last three could be restored."""
        if self._rng.random() < 0.2:
            self._checkpoints.append((self.number, self.seq, dict(self.trained)))
            del self._checkpoints[:-3]
            await self._retain()

    async def _retain(self) -> None:
        """The first one too, which is no file: a service that hears of none lets go of batches."""
        retained = tuple((number, seq) for number, seq, _ in self._checkpoints)
        body = CheckpointsRequest(incarnation=self.incarnation, retained=retained)
        await self._caller.call("PUT", f"/v1/policies/{POLICY}/checkpoints", body, Ack)

    def twice(self) -> list[str]:
        times = Counter(row_id for rows in self.trained.values() for row_id in rows)
        return [f"{row_id} was trained {n} times" for row_id, n in times.items() if n > 1]


@asynccontextmanager
async def dropped_connections() -> AsyncGenerator[None]:
    """Cancelled while it closes the connections of a service that just died, the HTTP library drops
    the rest of them unclosed. They are collected here, and not as the failure of a later test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        await asyncio.sleep(0)  # what was cancelled holds them until then
        gc.collect()


class Load:
    """All clients of one run, in the background of a campaign."""

    def __init__(self, folder: RunFolder, services: Services, history: AckLog, seed: int) -> None:
        run, url = folder.read_config().name, folder.endpoints().dataflow
        self.history = history
        self._services = services
        self._clients = [
            PartitionedNodeClient(
                url, folder.token(run, Role.ROLLOUT, ttl_s=TOKEN_S, subject=f"n{i}")
            )
            for i in range(NUM_NODES)
        ]
        token = folder.token(run, Role.TRAINER, ttl_s=TOKEN_S)
        self._caller, self._far = AsyncServiceClient(url, token), PartitionCallers(token)
        rng = random.Random(f"{seed}/trainer")
        self.trainer = RewindingTrainer(self._caller, self._far, history, rng)
        self.nodes = [
            FaultyNode(f"n{i}", client, history, random.Random(f"{seed}/{i}"))
            for i, client in enumerate(self._clients)
        ]
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        loops = [self.trainer.run(), *(node.run() for node in self.nodes)]
        loops += [node.beats() for node in self.nodes]
        self._tasks = [asyncio.create_task(loop) for loop in loops]
        return self

    async def __aexit__(self, *_: object) -> None:
        async with dropped_connections():
            for task in self._tasks:
                task.cancel()
            for task in self._tasks:
                with suppress(asyncio.CancelledError, WireError):
                    await task
            for client in (*self._clients, self._caller, self._far):
                await client.close()

    async def progress(self, num: int) -> None:
        """Wait for so many further promises."""
        due = self.history.promises.num + num
        async with asyncio.timeout(PROGRESS_S):
            while self.history.promises.num < due:
                self._services.require_alive()
                for task in self._tasks:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.002)
