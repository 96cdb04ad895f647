# SPDX-License-Identifier: Apache-2.0
"""Real ledgers of a run with a second partition: the real services in this process, each over its
own folder, joined by their link without sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from tests.unit.audit.ledgers import FakeNode, Run, always_completed, small_config

from penstock.config import RunConfig
from penstock.dataflow.core.coordinator import PartitionState
from penstock.dataflow.ledger.sealed_batches import partition_folder
from penstock.dataflow.service.build import build_partition
from penstock.dataflow.service.messages import Ack
from penstock.dataflow.service.partitions.handlers import PartitionHandlers
from penstock.dataflow.service.partitions.messages import (
    LinkPull,
    LinkPullAnswer,
    LinkPush,
    LinkPushAnswer,
    PartitionJoin,
)
from penstock.dataflow.service.trainers.messages import CheckpointsRequest
from penstock.types import NodeId


class FakeLink:
    """The coordinator as a partition calls it. Once cut, no response arrives in any direction."""

    def __init__(self, side: PartitionHandlers) -> None:
        self._side = side
        self._cut = asyncio.Event()

    def cut(self) -> None:
        self._cut.set()

    async def join(self, index: int, body: PartitionJoin) -> Ack:
        return await self._side.join(index, body)

    async def push(self, index: int, body: LinkPush) -> LinkPushAnswer:
        await self._hang_if_cut()
        return await self._side.push(index, body)

    async def pull(self, index: int, body: LinkPull) -> LinkPullAnswer:
        answer = await self._side.pull(index, body)
        await self._hang_if_cut()
        return answer

    async def close(self) -> None: ...

    async def _hang_if_cut(self) -> None:
        if self._cut.is_set():
            await asyncio.Event().wait()


class PartitionedRun(Run):
    """Like Run, with partition 1 in addition to the coordinator's own, and a node for it."""

    def __init__(self, run_dir: Path, config: RunConfig) -> None:
        super().__init__(run_dir, config, choose=always_completed)
        self.line = FakeLink(self.service.partitions)
        folder = partition_folder(run_dir / "ledger", 1)
        self.partition_service = build_partition(
            config, folder, 1, self.line, url="http://127.0.0.1:1"
        )
        self.partition_node = FakeNode(
            self.partition_service, run_dir, NodeId("node-far"), always_completed
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.trainer.incarnate(0, 0)
        self._task = asyncio.create_task(self.partition_service.run())
        await self._until(lambda: 1 in self.service.coordinator.partition_states)
        for node in self.nodes:
            await node.join()
        await self.exchange()
        await self.partition_node.join()

    async def exchange(self) -> None:
        """Wait until both sides have all messages."""
        await self._until(
            lambda: (
                not self.service.router.links[1].unacknowledged(0)
                and self.partition_service.partition.groups.keys()
                == self.service.coordinator.open_by_partition[1]
            )
        )
        await self.partition_service.process.make_all_durable()
        await self.service.process.make_all_durable()

    async def _until(self, is_so: Callable[[], bool]) -> None:
        give_up_at = asyncio.get_running_loop().time() + 60
        while not is_so():
            assert asyncio.get_running_loop().time() < give_up_at, "the link is stalled"
            await asyncio.sleep(0.005)

    async def step(self, *, skipped: str = "", across_load: bool = False) -> bool:
        for _ in range(100):
            await self.exchange()
            if await self.trainer.batch() is not None:
                await self.trainer.commit(skipped=skipped)
                await self.exchange()
                for node in (*self.nodes, self.partition_node):
                    await node.load()
                return True
            delivered = sum([await node.work(7) for node in (*self.nodes, self.partition_node)])
            if not delivered and self.service.coordinator.is_finished:
                return False
        raise AssertionError("no batch after 100 rounds")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.partition_service.close()
        self.service.close()


async def synced_run(run_dir: Path) -> None:
    """Stopped in the middle of its work, with no messages in flight; some groups of both partitions
    are freed."""
    run = PartitionedRun(run_dir, small_config())
    await run.start()
    for _ in range(5):
        await run.step()
    retained = CheckpointsRequest(incarnation=1, retained=((4, 4), (5, 5)))
    await run.service.trainers.checkpoints("policy", retained)
    await run.partition_node.lease(2)
    await run.exchange()
    await run.stop()


async def disconnected_run(run_dir: Path) -> None:
    """The link was cut: the partition did not receive the coordinator's last commits and groups,
    and the coordinator did not judge groups that ended there."""
    run = PartitionedRun(run_dir, small_config())
    await run.start()
    for _ in range(2):
        await run.step()
    await run.exchange()
    run.line.cut()
    while await run.partition_node.work(7):
        pass
    run.service.coordinator.partition_states[0] = (
        PartitionState.DRAINING
    )  # so that what is issued now goes to partition 1
    while await run.trainer.batch() is None:
        assert sum([await node.work(7) for node in run.nodes]), "partition 0 has enough for a batch"
    await run.trainer.commit()
    await run.partition_service.process.make_all_durable()
    await run.service.process.make_all_durable()
    await run.stop()
