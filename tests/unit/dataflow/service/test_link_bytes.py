# SPDX-License-Identifier: Apache-2.0
"""What passes between the coordinator and its partitions depends on the work, not on how many
partitions share it. Both ends are the service's own; the network between them only counts, and time
jumps from one event to the next."""

from __future__ import annotations

import asyncio
import itertools
import selectors
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast

import msgspec
from tests.contract.dataflow_server import POLICY, small_config
from tests.sim.disk import PooledTables, borrow_tables

from penstock.config import RunConfig
from penstock.dataflow.core.leasing import LiveVersion, NodeState, RegisterRequest
from penstock.dataflow.core.messages import IncarnationStarted, Published
from penstock.dataflow.ledger.assemble import build_coordinator_core, build_partition_core
from penstock.dataflow.ledger.store import Ledger
from penstock.dataflow.records import CommandJournal, Deletion, Record, RowRecord, row_id
from penstock.dataflow.service.build import core_spec
from penstock.dataflow.service.operators.messages import PartitionMetrics
from penstock.dataflow.service.partitions.handlers import PartitionHandlers
from penstock.dataflow.service.partitions.link_calls import LinkCalls
from penstock.dataflow.service.partitions.messages import (
    LinkPull,
    LinkPullAnswer,
    LinkPush,
    LinkPushAnswer,
    PartitionBoot,
    PartitionJoin,
)
from penstock.dataflow.service.process import Process
from penstock.dataflow.sources import open_source
from penstock.types import NodeId, Outcome, OutcomeKind, RowSummary
from penstock.wire.codec import encode

T = TypeVar("T")

CALL_BYTES = 900
"""Heads of a request and its answer, token included."""
GROUPS_PER_S = 60.0
"""Of all partitions together."""
GROUP_SIZE = 8
STEPS, GROUPS = 4, 128
STATS = {f"gradient/figure-{number}": 1 / (number + 3) for number in range(40)}
DONE = Outcome(kind=OutcomeKind.COMPLETED)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Nothing comes from outside, so time jumps to the next timer."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_NoSockets(self._pass_time))

    def time(self) -> float:
        return self._now

    def _pass_time(self, seconds: float | None) -> None:
        assert seconds is not None, "everybody waits for ever"
        self._now += seconds


class _NoSockets(selectors.SelectSelector):
    def __init__(self, pass_time: Callable[[float | None], None]) -> None:
        super().__init__()
        self._pass_time = pass_time

    def select(self, timeout: float | None = None) -> list[Any]:
        self._pass_time(timeout)
        return []


class InstantLedger:
    """The ledger's tables on a disk that takes no time."""

    def __init__(self) -> None:
        self.tables: PooledTables = borrow_tables()

    def write(self, records: Sequence[Record | Deletion]) -> asyncio.Future[None]:
        self.tables.commit(list(records))
        return self.flush()

    def flush(self) -> asyncio.Future[None]:
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done


def open_process(on_command: Callable[[float], None], on_wake: Callable[[], None]) -> Process:
    clock = asyncio.get_running_loop().time
    ledger = cast(Ledger, InstantLedger())
    return Process(ledger, CommandJournal(), clock, on_command=on_command, on_wake=on_wake)


class Network:
    """Counts what it carries."""

    def __init__(self, handlers: PartitionHandlers) -> None:
        self._handlers = handlers
        self.num_bytes = self.num_calls = 0

    async def push(self, index: int, body: LinkPush) -> LinkPushAnswer:
        return await self._carry(body, self._handlers.push(index, body))

    async def pull(self, index: int, body: LinkPull) -> LinkPullAnswer:
        return await self._carry(body, self._handlers.pull(index, body))

    async def _carry(self, body: object, answering: Awaitable[T]) -> T:
        answer = await answering
        self.num_calls += 1
        self.num_bytes += CALL_BYTES + len(encode(body)) + len(encode(answer))
        return answer


class Home:
    """The coordinator and a trainer."""

    def __init__(self, config: RunConfig) -> None:
        self.process = open_process(self._drive, lambda: self.handlers.on_wake())
        source = open_source("train", "penstock.tasks.reverse")
        tables, now = self.process.ledger.tables, self.process.clock()
        core = build_coordinator_core(
            core_spec(config), [source], tables, self.process.journal, now, has_partition=False
        )
        self._router, self._sealing, self.coordinator = core.router, core.sealing, core.coordinator
        self.handlers = PartitionHandlers(self.process, self.coordinator, self._router)

    def _drive(self, now: float) -> None:
        self._router.run(now)
        self.coordinator.issue(now)
        self._router.run(now)

    async def begin(self) -> None:
        lineage = self.coordinator.consumers[POLICY].lineage
        record = lineage.incarnate(expected=0, number=0, seq=0, request_id="r", now=0.0)
        self.process.journal(record)
        lineage.apply_incarnation(record)
        self.coordinator.broadcast(IncarnationStarted(record=record))
        await self._publish()

    async def _publish(self) -> None:
        lineage = self.coordinator.consumers[POLICY].lineage
        record = lineage.publish(
            incarnation=1,
            number=lineage.number,
            manifest_digest=f"{lineage.number:064}",
            weights_digest=f"{lineage.number:064}",
            now=self.process.clock(),
        )
        self.process.journal(record)
        lineage.apply_version(record)
        self.coordinator.broadcast(Published(record=record))
        await self.process.make_durable()

    async def train(self) -> None:
        consumer = self.coordinator.consumers[POLICY]
        for seq in itertools.count(1):
            while (batch := self._sealing.seal(consumer, seq, self.process.clock())) is None:
                await self.process.wait_for(self.process.changed, self.process.clock() + 60.0)
            await self.process.make_durable()
            await asyncio.sleep(0.2)
            now, lineage = self.process.clock(), consumer.lineage
            record = lineage.commit(
                seq=batch.seq,
                incarnation=1,
                number=lineage.number + 1,
                skipped="",
                stats=msgspec.json.encode(STATS).decode(),
                now=now,
            )
            self.process.journal(record)
            lineage.apply_commit(record)
            self.coordinator.committed(record)
            self.coordinator.cursor_moved(consumer, consumer.sealed, now)
            await self._publish()
            if seq == STEPS:
                return


class FarPartition:
    """A partition in another process, and a node that works for it."""

    def __init__(self, index: int, config: RunConfig, home: Home, network: Network) -> None:
        self.process = open_process(self._drive, lambda: self._calls.on_wake())
        core = build_partition_core(
            index, core_spec(config), self.process.ledger.tables, self.process.journal, 0.0
        )
        self._router, self._host, self._home = core.router, core.host, home
        self._boot = PartitionBoot(epoch=1, boot_id="b")
        self._calls = LinkCalls(
            self.process, core.link, core.host, network, boot=self._boot, figures=PartitionMetrics
        )
        self._node_id = NodeId(f"n{index}")

    def _drive(self, now: float) -> None:
        self._router.run(now)

    async def run(self) -> None:
        index = self._host.partition.index
        joining = PartitionJoin(boot=self._boot, url="http://127.0.0.1:1")
        await self._home.handlers.join(index, joining)
        body = RegisterRequest(node_id=self._node_id, boot_id="b", capacity=64, policies=())
        self._host.partition.register(body, self.process.clock())
        await self._calls.run()

    async def work(self) -> None:
        """One group, if there is one."""
        partition, now = self._host.partition, self.process.clock()
        if not partition.target_versions:
            return
        [wanted] = partition.target_versions
        live = (LiveVersion(policy=POLICY, incarnation=wanted.incarnation, number=wanted.number),)
        partition.heartbeat(self._node_id, "b", now, state=NodeState.LIVE, live=live)
        request_id = f"{now}"
        partition.ask(self._node_id, "b", request_id, now)
        grants = partition.lease(self._node_id, "b", request_id, GROUP_SIZE, live, now)
        for grant in grants:
            row = RowRecord(
                summary=RowSummary(
                    row_id=row_id(grant.group_id, grant.slot, grant.epoch),
                    digest="d" * 64,
                    outcome=DONE.kind,
                    reward=0.5,
                    sampled={POLICY: 3},
                    versions={POLICY: ((wanted.incarnation, wanted.number),)},
                ),
                group_id=grant.group_id,
                slot=grant.slot,
                epoch=grant.epoch,
                node_id=self._node_id,
                segment=1,
                offset=0,
                length=1,
                delivered_at=now,
            )
            partition.deliver(row, DONE, now)
        await self.process.make_durable()


async def bytes_per_trajectory(num_partitions: int) -> float:
    """Between home and partitions elsewhere, while all of them do the same work together."""
    config = small_config(groups_per_batch=GROUPS, num_generations=GROUP_SIZE, steps=1000)
    home = Home(config)
    network = Network(home.handlers)
    elsewhere = [FarPartition(index, config, home, network) for index in range(1, num_partitions)]
    links = [asyncio.create_task(one.run()) for one in elsewhere]
    await asyncio.sleep(1.0)
    await home.begin()

    async def work() -> None:
        for one in itertools.cycle(elsewhere):
            await one.work()
            await asyncio.sleep(1 / GROUPS_PER_S)

    working = asyncio.create_task(work())
    before = network.num_bytes
    await home.train()
    for task in (working, *links):
        task.cancel()
    await asyncio.gather(working, *links, return_exceptions=True)
    return (network.num_bytes - before) / (STEPS * GROUPS * GROUP_SIZE)


def test_bytes_at_the_coordinator_do_not_grow_with_partitions() -> None:
    found: list[float] = []
    for num_partitions in (2, 8):
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            found.append(runner.run(bytes_per_trajectory(num_partitions)))
    assert found[1] <= 1.05 * found[0], found
