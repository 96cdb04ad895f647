# SPDX-License-Identifier: Apache-2.0
"""The contract over real HTTP: idempotent, fenced, durable before the answer."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
from tests.contract.dataflow_server import (
    POLICY,
    FakeTrainer,
    RunningDataflow,
    dataflow,
    small_config,
    trajectory,
)

from penstock.dataflow.client.dataflow import NodeClient
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
    LeaseAnswer,
    LeaseRequest,
)
from penstock.dataflow.service.trainers.messages import BatchRequest, CommitRequest
from penstock.errors import BadRequest, Fenced, Forbidden, NotFound, Unreachable
from penstock.types import NodeId, PublishedVersion, RowId
from penstock.wire.auth import Role
from penstock.wire.client import AsyncServiceClient, ServiceClient, connect
from penstock.wire.codec import encode


class SmallNode:
    def __init__(self, running: RunningDataflow, name: str = "n0") -> None:
        self.client = NodeClient(running.url, running.node_token(name))
        self.node_id = NodeId(name)
        self.boot_id = uuid.uuid4().hex
        self.secret = ""
        self.live = LiveVersion(policy=POLICY, incarnation=1, number=0)

    async def join(self) -> None:
        body = RegisterRequest(node_id=self.node_id, boot_id=self.boot_id, capacity=64, policies=())
        registered = await self.client.register(body)
        self.secret = registered.secret
        self.take(registered.orders.wanted)
        await self.beat()

    async def beat(self) -> None:
        body = Heartbeat(boot_id=self.boot_id, state=NodeState.LIVE, live=(self.live,))
        self.take((await self.client.heartbeat(self.node_id, body)).orders.wanted)

    def take(self, wanted: tuple[PublishedVersion, ...]) -> None:
        for version in wanted:
            self.live = LiveVersion(
                policy=POLICY, incarnation=version.incarnation, number=version.number
            )

    def request(self, num: int = 64, wait_s: float = 2.0) -> LeaseRequest:
        return LeaseRequest(
            request_id=uuid.uuid4().hex,
            node_id=self.node_id,
            boot_id=self.boot_id,
            max_slots=num,
            wait_s=wait_s,
            live=(self.live,),
        )

    async def deliver(self, *grants: Grant, reward: float = 0.5) -> list[DeliveryStatus]:
        deliveries = tuple(trajectory(g, self.node_id, self.live, reward) for g in grants)
        body = DeliveryRequest(node_id=self.node_id, boot_id=self.boot_id, deliveries=deliveries)
        return [result.status for result in (await self.client.deliver(body)).results]


async def test_a_whole_small_run(tmp_path: Path) -> None:
    with dataflow(tmp_path, small_config(steps=4)) as running:
        trainer = await asyncio.to_thread(FakeTrainer, running)
        node = SmallNode(running)
        await node.join()

        async def work() -> int:
            rows = 0
            while True:
                answer = await node.client.lease(node.request())
                node.take(answer.orders.wanted)
                if answer.orders.drain:
                    return rows
                rows += len(await node.deliver(*answer.grants)) if answer.grants else 0
                await node.beat()

        def train() -> None:
            while trainer.step():
                pass

        rows, _ = await asyncio.gather(work(), asyncio.to_thread(train))
        assert rows == 4 * 2 * 2
        status = await asyncio.to_thread(running.reader().status)
        assert status.finished and status.policies[0].number == 4 and not status.wasted_tokens
        await node.client.close()


async def test_deliveries_are_idempotent_across_a_restart(tmp_path: Path) -> None:
    config = small_config()
    with dataflow(tmp_path, config) as running:
        await asyncio.to_thread(FakeTrainer, running)
        node = SmallNode(running)
        await node.join()
        request = node.request(2)
        grants = (await node.client.lease(request)).grants
        assert (await node.client.lease(request)).grants == grants, "a lost answer loses nothing"
        assert await node.deliver(*grants) == ["stored", "stored"]
        assert await node.deliver(*grants) == ["duplicate", "duplicate"]
        assert await node.deliver(*grants, reward=0.75) == ["conflict", "conflict"]
        held = (await node.client.lease(node.request(1))).grants
        await node.client.close()
    with dataflow(tmp_path, config) as running:
        node.client = NodeClient(running.url, running.node_token())
        assert await node.deliver(*grants) == ["duplicate", "duplicate"]
        assert await node.deliver(*held) == ["stored"], "its lease survived the restart"
        other = SmallNode(running, "n1")
        await other.join()
        assert await other.deliver(*held) == ["fenced"], "not its lease"
        await node.client.close()
        await other.client.close()


async def test_a_batch_is_sealed_once_and_served_byte_for_byte(tmp_path: Path) -> None:
    config = small_config()
    with dataflow(tmp_path, config) as running:
        trainer = await asyncio.to_thread(FakeTrainer, running)
        node = SmallNode(running)
        await node.join()
        await node.deliver(*(await node.client.lease(node.request())).grants)
        request = BatchRequest(consumer=POLICY, seq=1, incarnation=trainer.incarnation)
        first = await asyncio.to_thread(trainer.client.batch, request)
        rows = await asyncio.to_thread(trainer.client.rows, POLICY, 1)
        halves = [
            await asyncio.to_thread(trainer.client.rows, POLICY, 1, at) for at in ((0, 2), (1, 3))
        ]
        assert first.manifest is not None and len(rows.rows) == 4
        assert [r.row_id for r in rows.rows] == [r.row_id for r in first.manifest.rows]
        assert [r for h in halves for r in h.rows] == [*rows.rows[::2], *rows.rows[1::2]]
        await node.client.close()
    with dataflow(tmp_path, config) as running:
        successor = await asyncio.to_thread(FakeTrainer, running)
        request = BatchRequest(consumer=POLICY, seq=1, incarnation=successor.incarnation)
        again = await asyncio.to_thread(successor.client.batch, request)
        assert encode(again.manifest) == encode(first.manifest) and again.digest == first.digest
        assert await asyncio.to_thread(successor.client.rows, POLICY, 1) == rows
        with pytest.raises(Fenced):
            old = BatchRequest(consumer=POLICY, seq=1, incarnation=1)
            await asyncio.to_thread(successor.client.batch, old)


async def test_what_a_trainer_computes_of_a_row_is_known_over_a_restart(tmp_path: Path) -> None:
    """One row of each group came before it, the other after."""
    config = small_config()
    with dataflow(tmp_path, config) as running:
        await asyncio.to_thread(FakeTrainer, running)
        node = SmallNode(running)
        await node.join()
        grants = (await node.client.lease(node.request())).grants
        assert set(await node.deliver(*grants[::2])) == {"stored"}
        await node.client.close()
    with dataflow(tmp_path, config) as running:
        node.client = NodeClient(running.url, running.node_token())
        assert set(await node.deliver(*grants[1::2])) == {"stored"}
        trainer = await asyncio.to_thread(FakeTrainer, running)
        request = BatchRequest(consumer=POLICY, seq=1, incarnation=trainer.incarnation)
        manifest = (await asyncio.to_thread(trainer.client.batch, request)).manifest
        assert manifest is not None
        assert [row.sampled for row in manifest.rows] == [{POLICY: 2}] * 4
        assert [row.compute_cost for row in manifest.rows] == [{POLICY: (4, 16)}] * 4
        await node.client.close()


async def test_a_heartbeat_overtakes_a_held_request(tmp_path: Path) -> None:
    """A node that goes live on a newer version while its request is held gets work at once."""
    with dataflow(tmp_path, small_config()) as running:
        trainer = await asyncio.to_thread(FakeTrainer, running)
        node = SmallNode(running)
        await node.join()
        await node.deliver(*(await node.client.lease(node.request())).grants)
        assert await asyncio.to_thread(trainer.step)
        await node.client.lease(node.request(wait_s=0))  # told of version 1, still serves 0
        held = asyncio.create_task(node.client.lease(node.request(wait_s=20)))
        await asyncio.sleep(0.3)
        assert not held.done()
        node.live = LiveVersion(policy=POLICY, incarnation=1, number=1)
        await node.beat()
        assert (await asyncio.wait_for(held, 60)).grants
        await node.client.close()


async def let_it_arrive() -> None:
    """In pieces: a stall ends one of them early, not the whole wait."""
    for _ in range(40):
        await asyncio.sleep(0.01)


async def test_a_request_nobody_waits_for_is_granted_nothing(tmp_path: Path) -> None:
    """Its connection broke unnoticed and the node asked anew: the old call must not take slots."""
    with dataflow(tmp_path, small_config()) as running:
        node = SmallNode(running)
        await node.join()
        old = asyncio.create_task(node.client.lease(node.request(4, wait_s=20)))
        await let_it_arrive()
        new = asyncio.create_task(node.client.lease(node.request(4, wait_s=20)))
        await let_it_arrive()
        await asyncio.to_thread(FakeTrainer, running)
        await node.beat()
        answers = [await asyncio.wait_for(call, 60) for call in (old, new)]
        if not answers[1].grants:  # woken by the new version, not by work
            answers[1] = await node.client.lease(node.request(4))
        assert not answers[0].grants and len(answers[1].grants) == 4
        await node.client.close()


async def test_a_handed_back_slot_is_leased_again_at_once(tmp_path: Path) -> None:
    with dataflow(tmp_path, small_config()) as running:
        await asyncio.to_thread(FakeTrainer, running)
        one, two = SmallNode(running, "one"), SmallNode(running, "two")
        await one.join()
        await two.join()
        grants = (await one.client.lease(one.request())).grants
        assert not (await two.client.lease(two.request(wait_s=0))).grants
        await one.client.leave(one.node_id, one.boot_id)
        taken = (await two.client.lease(two.request())).grants
        assert {(g.group_id, g.slot) for g in taken} == {(g.group_id, g.slot) for g in grants}
        assert all(g.epoch == 2 and g.attempt == 1 for g in taken)
        await one.client.close()
        await two.client.close()


async def test_a_record_that_breaks_the_contract_frees_its_slot(tmp_path: Path) -> None:
    with dataflow(tmp_path, small_config()) as running:
        await asyncio.to_thread(FakeTrainer, running)
        node = SmallNode(running)
        await node.join()
        [grant] = (await node.client.lease(node.request(1))).grants
        assert await node.deliver(grant, reward=float("nan")) == ["invalid"]
        [again] = (await node.client.lease(node.request(1))).grants
        assert (again.group_id, again.slot) == (grant.group_id, grant.slot)
        assert (again.epoch, again.attempt) == (2, 2)
        await node.client.close()


async def test_nobody_works_for_a_caller_who_hung_up(tmp_path: Path) -> None:
    with dataflow(tmp_path, small_config()) as running:
        node = SmallNode(running)
        await node.join()
        caller = AsyncServiceClient(running.url, running.node_token())
        body = encode(replace(node.request(4, wait_s=20), secret=node.secret))
        with pytest.raises(Unreachable):
            await caller.request("POST", "/v1/leases", body, deadline_s=0.3, timeout_s=0.2)
        await caller.close()
        await asyncio.to_thread(FakeTrainer, running)
        await node.beat()
        await asyncio.sleep(0.5)
        status = await asyncio.to_thread(running.reader().status)
        assert [node.num_leases for node in status.nodes] == [0]
        await node.client.close()


async def test_numbers_that_are_none_are_refused_or_left_out(tmp_path: Path) -> None:
    with dataflow(tmp_path, small_config()) as running:
        trainer = await asyncio.to_thread(FakeTrainer, running)
        node = SmallNode(running)
        await node.join()
        async with connect(running.url, running.node_token()) as caller:
            for wait_s in (float("nan"), float("inf"), -1.0):
                body = replace(node.request(wait_s=wait_s), secret=node.secret)
                with pytest.raises(BadRequest, match="wait_s"):
                    await caller.call("POST", "/v1/leases", body, LeaseAnswer)
        await node.deliver(*(await node.client.lease(node.request())).grants)
        request = BatchRequest(consumer=POLICY, seq=1, incarnation=1)
        assert (await asyncio.to_thread(trainer.client.batch, request)).manifest
        stats = {"loss": float("nan"), "reward": 1.0}
        commit = CommitRequest(incarnation=1, number=1, stats=stats)
        await asyncio.to_thread(trainer.client.commit, POLICY, 1, commit)
        status = await asyncio.to_thread(running.reader().status)
        assert status.policies[0].stats == {"reward": 1.0}
        many = DeliveryRequest(
            node_id=node.node_id,
            boot_id=node.boot_id,
            deliveries=(),
            released={RowId(f"p0-1.{n}.1"): "" for n in range(10_001)},
        )
        with pytest.raises(BadRequest, match="length <= 10000"):
            await node.client.deliver(many)
        await node.client.close()


async def test_an_operator_drains_one_process_of_a_node(tmp_path: Path) -> None:
    with dataflow(tmp_path, small_config()) as running:
        await asyncio.to_thread(FakeTrainer, running)
        node, other = SmallNode(running), SmallNode(running, "n1")
        await node.join()
        await other.join()
        held = (await node.client.lease(node.request(1))).grants

        def drain(role: Role, name: str = "n0") -> None:
            token = running.token(role, subject="alice")
            with contextlib.closing(ServiceClient(running.url, token)) as client:
                client.call("POST", f"/v1/nodes/{name}/drain?why=slow", None, Ack, deadline_s=60.0)

        for role in (Role.READER, Role.ROLLOUT, Role.TRAINER):
            with pytest.raises(Forbidden):
                await asyncio.to_thread(drain, role)
        with pytest.raises(NotFound, match="no node ghost"):
            await asyncio.to_thread(drain, Role.ADMIN, "ghost")
        await asyncio.to_thread(drain, Role.ADMIN)
        answer = await node.client.lease(node.request(1))
        assert answer.orders.drain and not answer.orders.finished and not answer.grants
        assert await node.deliver(*held) == ["stored"], "what it has finished counts"
        assert not (await other.client.lease(other.request(1))).orders.drain
        node.boot_id = uuid.uuid4().hex
        await node.join()
        assert (await node.client.lease(node.request(1))).grants, "another process is not meant"
        await node.client.close()
        await other.client.close()
