# SPDX-License-Identifier: Apache-2.0
"""Home and further partitions over real HTTP: joined, used, restarted, moved, drained, lost."""

from __future__ import annotations

import asyncio
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.contract.running import (
    POLICY,
    Running,
    SmallTrainer,
    dataflow,
    partition,
    small_config,
    trajectory,
)

from penstock.dataflow.home_client import HomeClient
from penstock.dataflow.link_protocol import PartitionJoin, PartitionLife
from penstock.dataflow.protocol import (
    DeliveryRequest,
    DeliveryStatus,
    Done,
    Grant,
    Heartbeat,
    LeaseRequest,
    LiveVersion,
    NodeState,
    Register,
)
from penstock.dataflow.spread_client import SpreadClient
from penstock.errors import Fenced
from penstock.types import NodeId
from penstock.wire.auth import Role
from penstock.wire.client import Caller


class SpreadNode:
    """A node as the real one behaves: one client, all partitions."""

    def __init__(self, running: Running) -> None:
        self.client = SpreadClient(running.url, running.token(Role.ROLLOUT))
        self.node_id = NodeId("n0")
        self.session = uuid.uuid4().hex
        self.live: tuple[LiveVersion, ...] = ()

    async def join(self) -> None:
        body = Register(node_id=self.node_id, session=self.session, capacity=512, policies=())
        await self.client.register(body)
        await self.beat()

    async def beat(self) -> None:
        for _ in range(2):  # the first learns what to serve, the second says that it does
            body = Heartbeat(session=self.session, state=NodeState.LIVE, live=self.live)
            answer = await self.client.heartbeat(self.node_id, body)
            self.live = tuple(
                LiveVersion(policy=v.policy, incarnation=v.incarnation, number=v.number)
                for v in answer.orders.wanted
            )

    async def lease(self) -> list[Grant]:
        request = LeaseRequest(
            request_id=uuid.uuid4().hex,
            node_id=self.node_id,
            session=self.session,
            max_slots=512,
            wait_s=0.2,
            live=self.live,
        )
        return list((await self.client.lease(request)).grants)

    async def work(self) -> set[int]:
        """Lease and deliver until there is nothing for a moment; which partitions gave work."""
        seen: set[int] = set()
        idle = 0
        while idle < 3:
            await self.beat()
            grants = await self.lease()
            idle = 0 if grants else idle + 1
            seen |= {int(grant.group_id[1:].partition("-")[0]) for grant in grants}
            deliveries = tuple(
                trajectory(grant, self.node_id, self.live[0], reward=float(grant.slot % 2))
                for grant in grants
            )
            body = DeliveryRequest(
                node_id=self.node_id, session=self.session, deliveries=deliveries
            )
            answer = await self.client.deliver(body)
            assert {r.status for r in answer.results} <= {DeliveryStatus.STORED}
        return seen


def eventually(check: Callable[[], bool], what: str) -> None:
    give_up_at = time.monotonic() + 20
    while not check():
        assert time.monotonic() < give_up_at, what
        time.sleep(0.05)


def admin(running: Running, path: str) -> None:
    caller = Caller(running.url, running.token(Role.ADMIN))
    try:
        caller.call("POST", path, None, Done)
    finally:
        caller.close()


CONFIG = small_config(groups_per_batch=4, num_generations=2, steps=6)


async def work(running: Running) -> set[int]:
    node = SpreadNode(running)
    await node.join()
    try:
        return await node.work()
    finally:
        await node.client.close()


def test_work_and_rows_go_through_every_partition(tmp_path: Path) -> None:
    with (
        dataflow(tmp_path, CONFIG) as running,
        partition(tmp_path / "p1", CONFIG, running, 1),
        partition(tmp_path / "p2", CONFIG, running, 2) as second,
    ):
        eventually(lambda: len(running.reader().status().partitions) == 2, "they join")
        trainer = SmallTrainer(running)
        assert asyncio.run(work(running)) == {0, 1, 2}
        assert trainer.step()
        rows = trainer.client.rows(POLICY, 1).rows
        assert len(rows) == 8 and all(row.payload for row in rows)
        assert {row.row_id[1] for row in rows} & {"1", "2"}, "rows of far partitions are in it"
        assert second.nodes.trajectories > 0


def test_partition_is_killed_and_comes_back_with_its_work(tmp_path: Path) -> None:
    with dataflow(tmp_path, CONFIG) as running:
        with partition(tmp_path / "p1", CONFIG, running, 1) as first:
            eventually(lambda: len(running.reader().status().partitions) == 1, "it joins")
            trainer = SmallTrainer(running)
            eventually(lambda: bool(first.partition.groups), "home issues groups to it")
            open_groups = set(first.partition.groups)
        with partition(tmp_path / "p1", CONFIG, running, 1) as again:
            assert set(again.partition.groups) == open_groups
            assert 1 in asyncio.run(work(running))
            eventually(lambda: not again.partition.groups, "its groups end")
            assert trainer.step()


def test_partition_moves_to_another_host_and_its_old_copy_is_fenced(tmp_path: Path) -> None:
    with dataflow(tmp_path, CONFIG) as running:
        with partition(tmp_path / "p1", CONFIG, running, 1) as first:
            eventually(lambda: len(running.reader().status().partitions) == 1, "it joins")
            SmallTrainer(running)
            eventually(lambda: bool(first.partition.groups), "home issues groups to it")
            old = PartitionLife(epoch=1, session="somebody else")
        shutil.copytree(tmp_path / "p1", tmp_path / "elsewhere")
        with partition(tmp_path / "elsewhere", CONFIG, running, 1):
            assert 1 in asyncio.run(work(running))

            async def wake_the_old_copy() -> None:
                client = HomeClient(running.url, running.token(Role.PARTITION))
                try:
                    await client.join(1, PartitionJoin(life=old, url="http://127.0.0.1:1"))
                finally:
                    await client.close()

            with pytest.raises(Fenced, match="two were started from one ledger folder"):
                asyncio.run(wake_the_old_copy())


def test_draining_partition_gets_no_new_group(tmp_path: Path) -> None:
    with (
        dataflow(tmp_path, CONFIG) as running,
        partition(tmp_path / "p1", CONFIG, running, 1) as far,
    ):
        eventually(lambda: len(running.reader().status().partitions) == 1, "it joins")
        admin(running, "/v1/partitions/1/drain")
        trainer = SmallTrainer(running)
        assert asyncio.run(work(running)) == {0}
        assert trainer.step() and not far.partition.groups
        eventually(
            lambda: running.reader().status().partitions[0].state == "gone", "empty, so gone"
        )


def test_lost_partition_ends_its_groups_and_its_rows(tmp_path: Path) -> None:
    with dataflow(tmp_path, CONFIG) as running:
        with partition(tmp_path / "p1", CONFIG, running, 1) as far:
            eventually(lambda: len(running.reader().status().partitions) == 1, "it joins")
            trainer = SmallTrainer(running)
            asyncio.run(work(running))
            eventually(lambda: not far.partition.groups, "its groups end")
            assert trainer.step()
            before = trainer.client.rows(POLICY, 1).rows
            assert all(row.payload for row in before)
        eventually(lambda: running.reader().status().policies[0].issued > 0, "more work is out")
        admin(running, "/v1/partitions/1/lose")
        after = trainer.client.rows(POLICY, 1).rows
        assert [row.row_id for row in after] == [row.row_id for row in before]
        gone = {row.row_id for row in after if row.payload is None}
        assert gone == {row.row_id for row in before if row.row_id.startswith("p1-")}
        asyncio.run(work(running))
        assert trainer.step(), "the run goes on without it"
