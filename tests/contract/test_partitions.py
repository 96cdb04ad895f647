# SPDX-License-Identifier: Apache-2.0
"""Home and further partitions over real HTTP: joined, used, restarted, moved, drained, lost."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.contract.dataflow_server import (
    POLICY,
    FakeTrainer,
    RunningDataflow,
    dataflow,
    free_port,
    partition,
    small_config,
    trajectory,
)

from penstock.dataflow.client.dataflow import NodeClient
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
    DeliveryRequest,
    Heartbeat,
    LeaseRequest,
)
from penstock.dataflow.service.partitions import link_calls
from penstock.dataflow.service.partitions.coordinator_client import CoordinatorClient
from penstock.dataflow.service.partitions.messages import (
    LinkPull,
    LinkPullAnswer,
    PartitionBoot,
    PartitionJoin,
)
from penstock.errors import BadRequest, Fenced, Unreachable
from penstock.rollout.delivery_queue import AckLog, DeliveryQueue
from penstock.rollout.membership import Membership, NodeOrders
from penstock.types import NodeId, Trajectory
from penstock.wire.auth import Role
from penstock.wire.client import ServiceClient
from penstock.wire.codec import decode


class SpreadNode:
    """A node as the real one behaves: one client, all partitions."""

    def __init__(self, running: RunningDataflow) -> None:
        self.client = PartitionedNodeClient(running.url, running.node_token())
        self.node_id = NodeId("n0")
        self.boot_id = uuid.uuid4().hex
        self.live: tuple[LiveVersion, ...] = ()

    async def join(self) -> None:
        body = RegisterRequest(
            node_id=self.node_id, boot_id=self.boot_id, capacity=512, policies=()
        )
        await self.client.register(body)
        await self.beat()

    async def beat(self) -> None:
        for _ in range(2):  # the first learns what to serve, the second says that it does
            body = Heartbeat(boot_id=self.boot_id, state=NodeState.LIVE, live=self.live)
            answer = await self.client.heartbeat(self.node_id, body)
            self.live = tuple(
                LiveVersion(policy=v.policy, incarnation=v.incarnation, number=v.number)
                for v in answer.orders.wanted
            )

    async def lease(self) -> list[Grant]:
        request = LeaseRequest(
            request_id=uuid.uuid4().hex,
            node_id=self.node_id,
            boot_id=self.boot_id,
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
                node_id=self.node_id, boot_id=self.boot_id, deliveries=deliveries
            )
            answer = await self.client.deliver(body)
            assert {r.status for r in answer.results} <= {DeliveryStatus.STORED}
        return seen


CAPACITY = 512


class RealNode:
    """The parts of a rollout node that speak to the dataflow, without engines."""

    def __init__(self, running: RunningDataflow, folder: Path) -> None:
        self.client = PartitionedNodeClient(running.url, running.node_token())
        self.orders = NodeOrders()
        self.membership = Membership(
            self.client, self.orders, node_id=NodeId("n0"), capacity=CAPACITY
        )
        self.acks = folder / "acks.txt"
        self.delivery_queue = DeliveryQueue(self.client, self.membership, AckLog(self.acks))

    @contextlib.asynccontextmanager
    async def joined(self) -> AsyncGenerator[None]:
        await self.membership.join()
        self.membership.announce(self.live, is_ready=True)
        loops = [
            asyncio.create_task(self.membership.heartbeat_loop(0.2, lambda: 0)),
            asyncio.create_task(self.delivery_queue.deliver()),
        ]
        try:
            yield
        finally:
            for loop in loops:
                loop.cancel()
            await asyncio.wait(loops)
            await self.client.close()

    @property
    def live(self) -> tuple[LiveVersion, ...]:
        return tuple(
            LiveVersion(policy=v.policy, incarnation=v.incarnation, number=v.number)
            for v in self.orders.targets.values()
        )

    async def lease_from(self, *partitions: int, max_slots: int = CAPACITY) -> list[Grant]:
        """Until each of these partitions has given something."""
        grants: list[Grant] = []
        async with asyncio.timeout(60):
            while not partition_counts(grants).keys() >= set(partitions):
                request = LeaseRequest(
                    request_id=uuid.uuid4().hex,
                    node_id=self.membership.node_id,
                    boot_id=self.membership.boot_id,
                    max_slots=max_slots,
                    wait_s=0.2,
                    live=self.live,
                )
                grants += (await self.client.lease(request)).grants
        return grants

    def put(self, grants: Iterable[Grant]) -> None:
        for grant in grants:
            made = trajectory(grant, self.membership.node_id, self.live[0], float(grant.slot % 2))
            self.delivery_queue.put(decode(made.payload, Trajectory), grant.secret)


def partition_counts(grants: Iterable[Grant]) -> Counter[int]:
    return Counter(int(grant.group_id[1:].partition("-")[0]) for grant in grants)


class LateNews(CoordinatorClient):
    """A link on which home's news come late, or, when home is away, not at all."""

    is_late = False
    is_away = False

    async def pull(self, index: int, body: LinkPull) -> LinkPullAnswer:
        if not body.wait_s and LateNews.is_away:
            await asyncio.sleep(60)
        answer = await super().pull(index, replace(body, wait_s=min(0.2, body.wait_s)))
        is_lost = body.wait_s > 0 and LateNews.is_late
        return replace(answer, messages=()) if is_lost else answer


def eventually(check: Callable[[], bool], what: str) -> None:
    give_up_at = time.monotonic() + 60
    while not check():
        assert time.monotonic() < give_up_at, what
        time.sleep(0.05)


def admin(running: RunningDataflow, path: str) -> None:
    caller = ServiceClient(running.url, running.token(Role.ADMIN))
    try:
        caller.call("POST", path, None, Ack)
    finally:
        caller.close()


CONFIG = small_config(groups_per_batch=4, num_generations=2, steps=6)


async def work(running: RunningDataflow) -> set[int]:
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
        trainer = FakeTrainer(running)
        assert asyncio.run(work(running)) == {0, 1, 2}
        assert trainer.step()
        rows = trainer.client.rows(POLICY, 1).rows
        assert len(rows) == 8 and all(row.payload for row in rows)
        assert {row.row_id[1] for row in rows} & {"1", "2"}, "rows of far partitions are in it"
        assert trainer.client.rows(POLICY, 1, (6, 1)).rows == (rows[6], rows[1])
        for beyond in ((8,), (-1,), (2, 2)):
            with pytest.raises(BadRequest, match="between 0 and 7"):
                trainer.client.rows(POLICY, 1, beyond)
        assert second.nodes.trajectories > 0
        by_url = {one.index: one.url for one in running.reader().status().partitions}
        told = scrape(by_url[2], running.token(Role.READER))
        assert told["penstock_partition_trajectories_stored_total"] == [
            ({"partition": "2"}, second.nodes.trajectories)
        ]
        [(labels, tokens)] = told["penstock_node_tokens_total"]
        assert set(labels) == {"node"} and tokens == second.nodes.sampled_tokens > 0
        with httpx2.Client() as stranger:
            assert stranger.get(f"{by_url[2]}/metrics").status_code == 401


def scrape(url: str, token: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """What Prometheus reads there."""
    with httpx2.Client(headers={"authorization": f"Bearer {token}"}, timeout=60) as http:
        answer = http.get(f"{url}/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_partition_is_killed_and_comes_back_with_its_work(tmp_path: Path) -> None:
    with dataflow(tmp_path, CONFIG) as running:
        with partition(tmp_path / "p1", CONFIG, running, 1) as first:
            eventually(lambda: len(running.reader().status().partitions) == 1, "it joins")
            trainer = FakeTrainer(running)
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
            FakeTrainer(running)
            eventually(lambda: bool(first.partition.groups), "home issues groups to it")
            old = PartitionBoot(epoch=1, boot_id="somebody else")
        shutil.copytree(tmp_path / "p1", tmp_path / "elsewhere")
        with partition(tmp_path / "elsewhere", CONFIG, running, 1):
            assert 1 in asyncio.run(work(running))

            async def wake_the_old_copy() -> None:
                client = CoordinatorClient(running.url, running.token(Role.ADMIN))
                try:
                    await client.join(1, PartitionJoin(boot=old, url="http://127.0.0.1:1"))
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
        trainer = FakeTrainer(running)
        assert asyncio.run(work(running)) == {0}
        assert trainer.step() and not far.partition.groups
        eventually(
            lambda: running.reader().status().partitions[0].state == "gone", "empty, so gone"
        )


def test_lost_partition_ends_its_groups_and_its_rows(tmp_path: Path) -> None:
    with dataflow(tmp_path, CONFIG) as running:
        with partition(tmp_path / "p1", CONFIG, running, 1) as far:
            eventually(lambda: len(running.reader().status().partitions) == 1, "it joins")
            trainer = FakeTrainer(running)
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


def test_groups_that_waited_when_their_partition_was_lost_are_in_no_batch(tmp_path: Path) -> None:
    with dataflow(tmp_path, CONFIG) as running:
        with partition(tmp_path / "p1", CONFIG, running, 1) as far:
            eventually(lambda: len(running.reader().status().partitions) == 1, "it joins")
            trainer = FakeTrainer(running)
            asyncio.run(work(running))
            eventually(lambda: running.reader().status().policies[0].ready == 8, "all wait")
            assert far.nodes.trajectories > 0
        admin(running, "/v1/partitions/1/lose")
        assert running.reader().status().wasted_tokens["partition_lost"] > 0
        asyncio.run(work(running))
        assert trainer.step()
        rows = trainer.client.rows(POLICY, 1).rows
        assert len(rows) == 8 and all(row.payload for row in rows)


def test_a_partition_goes_on_while_home_is_away(tmp_path: Path) -> None:
    """What it has is leased and taken, and home gets all of it when it is back."""
    coordinator, port = contextlib.ExitStack(), free_port()
    running = coordinator.enter_context(dataflow(tmp_path, CONFIG, port))
    with coordinator, partition(tmp_path / "p1", CONFIG, running, 1) as far:
        eventually(lambda: len(running.reader().status().partitions) == 1, "it joins")
        FakeTrainer(running)
        eventually(lambda: bool(far.partition.groups), "home issues groups to it")
        groups = set(far.partition.groups)

        async def work_without_home() -> None:
            node = RealNode(running, tmp_path)
            async with node.joined():
                await asyncio.to_thread(coordinator.close)
                grants = await node.lease_from(1, max_slots=1)
                grants += await node.lease_from(1)  # another one is asked first each time
                assert partition_counts(grants).keys() == {1}
                node.put(grants)
                async with asyncio.timeout(60):
                    await node.delivery_queue.wait_until_at_most(0)
                assert len(node.acks.read_text().split()) == len(grants) == 2 * len(groups)

        asyncio.run(work_without_home())
        assert not far.partition.groups, "they have ended, and home does not know"
        with dataflow(tmp_path, CONFIG, port) as back:
            eventually(
                lambda: back.reader().status().policies[0].ready >= len(groups), "home knows all"
            )
            asyncio.run(work(back))
            trainer = FakeTrainer(back)
            assert trainer.step()
            rows = trainer.client.rows(POLICY, 1).rows
            assert any(row.row_id.startswith("p1-") and row.payload for row in rows)


def test_a_partition_that_is_away_holds_up_nobody(tmp_path: Path) -> None:
    """Leases and results of the others go on; its own results wait with the node, and reach it
    where it comes back."""
    with (
        dataflow(tmp_path, CONFIG) as running,
        partition(tmp_path / "p2", CONFIG, running, 2),
        contextlib.ExitStack() as first,
    ):
        far = first.enter_context(partition(tmp_path / "p1", CONFIG, running, 1))
        eventually(lambda: len(running.reader().status().partitions) == 2, "they join")
        trainer = FakeTrainer(running)
        eventually(lambda: bool(far.partition.groups), "home issues groups to it")

        async def work_without_it() -> None:
            node = RealNode(running, tmp_path)
            async with node.joined():
                early = await node.lease_from(0, 1, 2)
                num_away = partition_counts(early)[1]
                await asyncio.to_thread(first.close)
                node.put(early)
                async with asyncio.timeout(60):
                    await node.delivery_queue.wait_until_at_most(num_away)
                assert {name[:2] for name in node.acks.read_text().split()} == {"p0", "p2"}
                assert await asyncio.to_thread(trainer.step), "no group of it is needed"
                later = await node.lease_from(0, 2)
                assert 1 not in partition_counts(later)
                node.put(later)
                async with asyncio.timeout(60):
                    await node.delivery_queue.wait_until_at_most(num_away)
                with partition(tmp_path / "p1", CONFIG, running, 1) as back:
                    async with asyncio.timeout(60):
                        await node.delivery_queue.wait_until_at_most(0)
                    assert back.nodes.trajectories == num_away
                acknowledged = node.acks.read_text().split()
                assert len(acknowledged) == len(set(acknowledged)) == len(early) + len(later)

        asyncio.run(work_without_it())


def test_a_version_that_a_partition_has_not_heard_of_costs_no_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node may load weights before the news of them reaches a partition."""
    monkeypatch.setattr(link_calls, "CATCH_UP_S", 0.3)
    with (
        dataflow(tmp_path, CONFIG) as running,
        partition(tmp_path / "p1", CONFIG, running, 1, LateNews) as far,
    ):
        eventually(lambda: len(running.reader().status().partitions) == 1, "it joins")
        FakeTrainer(running)
        eventually(lambda: bool(far.partition.groups), "home issues groups to it")

        async def deliver(version: LiveVersion, grant: Grant) -> DeliveryStatus:
            made = trajectory(grant, NodeId("n0"), version)
            body = DeliveryRequest(node_id=NodeId("n0"), boot_id="s", deliveries=(made,))
            url = running.reader().status().partitions[0].url
            client = NodeClient(url, running.node_token())
            try:
                return (await client.deliver(body, deadline_s=2.0)).results[0].status
            finally:
                await client.close()

        async def outpace_the_news() -> None:
            node = RealNode(running, tmp_path)
            async with node.joined():
                leased = await node.lease_from(1)
                grants = [grant for grant in leased if grant.group_id.startswith("p1-")]
                LateNews.is_late = True
                await asyncio.to_thread(FakeTrainer, running)  # publishes 2.0
                new = LiveVersion(policy=POLICY, incarnation=2, number=0)
                assert not far.host.gate.is_published(POLICY, 2, 0)
                LateNews.is_away = True
                with pytest.raises(Unreachable, match="the coordinator is unreachable"):
                    await deliver(new, grants[0])
                LateNews.is_away = False
                assert await deliver(new, grants[0]) is DeliveryStatus.STORED
                assert far.host.gate.is_published(POLICY, 2, 0)
                LateNews.is_late = False
                never = LiveVersion(policy=POLICY, incarnation=9, number=0)
                assert await deliver(never, grants[1]) is DeliveryStatus.INVALID

        asyncio.run(outpace_the_news())


def test_a_life_that_began_while_a_partition_was_away_is_not_fenced_by_it(tmp_path: Path) -> None:
    """It still knows the last life; home alone says which is the current one."""
    port = free_port()

    async def two_lives(running: RunningDataflow, first: contextlib.ExitStack) -> None:
        old, new = SpreadNode(running), SpreadNode(running)
        await old.join()
        await asyncio.to_thread(first.close)
        await new.join()
        with partition(tmp_path / "p1", CONFIG, running, 1, port=port) as back:
            known = back.partition.nodes
            assert known[new.node_id].record.boot_id == old.boot_id
            await new.lease()  # nothing there for it yet, and no error
            await new.beat()
            assert known[new.node_id].record.boot_id == new.boot_id
            assert 1 in await new.work()
            with pytest.raises(Fenced):
                await old.beat()
            assert known[new.node_id].record.boot_id == new.boot_id
        for node in (old, new):
            await node.client.close()

    with dataflow(tmp_path, CONFIG) as running, contextlib.ExitStack() as first:
        first.enter_context(partition(tmp_path / "p1", CONFIG, running, 1, port=port))
        eventually(lambda: len(running.reader().status().partitions) == 1, "it joins")
        FakeTrainer(running)
        asyncio.run(two_lives(running, first))
