# SPDX-License-Identifier: Apache-2.0
"""Nodes whose resource also trains, at a service in process: who pauses when and why, what a
trainer waits for, and that each interruption and resumption is recorded with its trigger."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.contract.dataflow_server import POLICY, dataflow, small_config, trajectory

from penstock.dataflow.core.leasing import DeliveryStatus, LiveVersion, NodeState, RegisterRequest
from penstock.dataflow.service.build import build
from penstock.dataflow.service.coordinator import DataflowService
from penstock.dataflow.service.nodes.messages import (
    DeliveryRequest,
    Heartbeat,
    LeaseRequest,
    NodeDirectives,
    RegisterAnswer,
)
from penstock.dataflow.service.operators.messages import NodeTags
from penstock.dataflow.service.trainers.messages import (
    BatchAnswer,
    BatchRequest,
    CommitRequest,
    IncarnationRequest,
    PublishRequest,
)
from penstock.errors import BadRequest, Forbidden, NotFound
from penstock.types import NodeId
from penstock.wire.auth import Role
from penstock.wire.client import ServiceClient

SHARED, OTHER = NodeId("shared"), NodeId("other")


@dataclass(slots=True)
class Scene:
    service: DataflowService
    events: list[Mapping[str, str | float]] = field(default_factory=list[Mapping[str, str | float]])
    number: int = 0
    requests: int = 0

    @property
    def live(self) -> LiveVersion:
        return LiveVersion(policy=POLICY, incarnation=1, number=self.number)

    @property
    def triggers(self) -> list[tuple[str, str]]:
        return [(str(one["event"]), str(one["trigger"])) for one in self.events]

    async def publish(self) -> None:
        body = PublishRequest(
            incarnation=1,
            number=self.number,
            manifest_digest=f"m{self.number}",
            weights_digest="w",
        )
        await self.service.trainers.publish(POLICY, body)

    async def join(self, node_id: NodeId, *tags: str) -> None:
        body = RegisterRequest(node_id=node_id, boot_id="b", capacity=64, policies=(), tags=tags)
        await self.service.nodes.register(body)
        await self.beat(node_id)

    async def beat(
        self, node_id: NodeId, state: NodeState = NodeState.LIVE, live: LiveVersion | None = None
    ) -> NodeDirectives:
        body = Heartbeat(boot_id="b", state=state, live=(live or self.live,))
        return await self.service.nodes.heartbeat(node_id, body)

    async def lease(self, node_id: NodeId, num: int) -> Sequence[DeliveryRequest]:
        """One delivery per grant."""
        self.requests += 1
        body = LeaseRequest(
            request_id=f"r{self.requests}",
            node_id=node_id,
            boot_id="b",
            max_slots=num,
            wait_s=0.0,
            live=(self.live,),
        )
        found = (await self.service.nodes.lease(body)).grants
        return [
            DeliveryRequest(
                node_id=node_id,
                boot_id="b",
                deliveries=(trajectory(one, node_id, self.live, reward=float(one.slot)),),
            )
            for one in found
        ]

    async def deliver(self, rows: Sequence[DeliveryRequest]) -> None:
        for row in rows:
            answer = await self.service.nodes.deliver(row)
            assert answer.results[0].status is DeliveryStatus.STORED

    async def ask(self, seq: int, wait_s: float = 0.0) -> BatchAnswer:
        body = BatchRequest(consumer=POLICY, seq=seq, incarnation=1, wait_s=wait_s)
        return await self.service.trainers.batch(body)

    async def commit(self, seq: int) -> None:
        self.number += 1
        body = CommitRequest(incarnation=1, number=self.number, skipped="", stats={})
        await self.service.trainers.commit(POLICY, seq, body)
        await self.publish()


async def make_scene(tmp_path: Path, **sharing: float) -> Scene:
    config = small_config(groups_per_batch=2, num_generations=2, steps=9)
    dataflow = config.dataflow.model_copy(
        update={"sharing": config.dataflow.sharing.model_copy(update=sharing)}
    )
    service = build(config.model_copy(update={"dataflow": dataflow}), tmp_path)
    found = Scene(service)
    service.sharing.record = found.events.append
    life = IncarnationRequest(request_id="r", expected=0, number=0, seq=0)
    await service.trainers.incarnate(POLICY, life)
    await found.publish()
    return found


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncGenerator[Scene]:
    found = await make_scene(tmp_path)
    yield found
    found.service.close()


async def test_a_trainer_gets_its_batch_when_its_resource_has_paused(scene: Scene) -> None:
    await scene.join(SHARED, "train")
    assert (await scene.beat(SHARED)).is_shared
    rows = await scene.lease(SHARED, 6)
    assert (await scene.ask(1)).manifest is None
    assert not (await scene.beat(SHARED)).pause
    await scene.deliver(rows[:4])
    waiting = asyncio.create_task(scene.ask(1, wait_s=60.0))
    pause = (await scene.beat(SHARED)).pause
    while not pause:
        await asyncio.sleep(0.02)
        pause = (await scene.beat(SHARED)).pause
    assert pause == "samples"
    assert not waiting.done(), "the node still generates"
    await scene.beat(SHARED, NodeState.PAUSED)
    answer = await asyncio.wait_for(waiting, 60)
    assert answer.manifest is not None
    assert await scene.lease(SHARED, 8) == [], "a paused node gets no work"
    assert (await scene.beat(SHARED, NodeState.PAUSED)).pause == "samples"
    await scene.commit(1)
    assert (await scene.ask(2)).manifest is None
    assert not (await scene.beat(SHARED, NodeState.PAUSED)).pause
    await scene.beat(SHARED)
    await scene.deliver(rows[4:])  # what it held across the pause
    assert scene.triggers[:2] == [("interrupted", "samples"), ("resumed", "tag_returned")]
    assert all(one["num_leases"] == 2 and float(one["seconds"]) >= 0 for one in scene.events[:2])


async def test_one_batch_is_enough_after_the_timeout(tmp_path: Path) -> None:
    scene = await make_scene(tmp_path, batches=2, timeout_s=0.2)
    await scene.join(SHARED, "train")
    assert (await scene.ask(1)).manifest is None  # the visit begins
    await scene.deliver(await scene.lease(SHARED, 4))
    while not (pause := (await scene.beat(SHARED)).pause):
        await scene.ask(1)
        await asyncio.sleep(0.02)
    assert pause == "timeout"
    await scene.beat(SHARED, NodeState.PAUSED)
    assert (await scene.ask(1)).manifest is not None
    assert scene.triggers == [("interrupted", "timeout")]
    scene.service.close()


async def test_other_nodes_go_on_and_new_ones_are_recorded(scene: Scene) -> None:
    await scene.join(SHARED, "train")
    await scene.join(OTHER)
    assert not (await scene.beat(OTHER)).is_shared
    await scene.deliver(await scene.lease(OTHER, 4))
    assert (await scene.ask(1)).manifest is None
    assert (await scene.beat(SHARED)).pause == "samples"
    await scene.beat(SHARED, NodeState.PAUSED)
    assert not (await scene.beat(OTHER)).pause
    await scene.join(NodeId("late"))
    assert scene.triggers == [("interrupted", "samples"), ("resumed", "resource_added")]


async def test_a_node_without_the_tag_rollout_pauses_until_it_is_given_back(scene: Scene) -> None:
    await scene.join(OTHER)
    rows = await scene.lease(OTHER, 4)
    sharing = scene.service.sharing
    assert sharing.retag(OTHER, ["train"], ["rollout"]) == ["train"]
    assert (await scene.beat(OTHER)).pause == "tag_changed"
    await scene.beat(OTHER, NodeState.PAUSED)
    assert sharing.retag(OTHER, ["rollout"], ["train"]) == ["rollout"]
    assert not (await scene.beat(OTHER, NodeState.PAUSED)).pause
    await scene.beat(OTHER)
    await scene.deliver(rows)
    assert scene.triggers == [("interrupted", "tag_changed"), ("resumed", "tag_returned")]
    assert (await scene.ask(1)).manifest is not None, "it shares its resource no longer"
    with pytest.raises(BadRequest, match="added and removed"):
        sharing.retag(OTHER, ["train"], ["train"])
    with pytest.raises(NotFound, match="not in this run"):
        sharing.retag(NodeId("nobody"), ["train"], [])


async def test_new_weights_in_the_middle_of_answers_are_recorded(scene: Scene) -> None:
    await scene.join(OTHER)
    rows = await scene.lease(OTHER, 6)
    await scene.deliver(rows[:4])
    assert (await scene.ask(1)).manifest is not None
    await scene.commit(1)
    await scene.beat(OTHER)
    assert scene.triggers == [("interrupted", "new_weights")]


async def test_the_tags_of_an_operator_survive_a_restart_of_the_service(
    scene: Scene, tmp_path: Path
) -> None:
    await scene.join(OTHER)
    scene.service.sharing.retag(OTHER, ["train"], ["rollout"])
    await scene.service.process.make_durable()
    scene.service.close()
    again = build(small_config(groups_per_batch=2, num_generations=2, steps=9), tmp_path)
    beat = Heartbeat(boot_id="b", state=NodeState.LIVE, live=(scene.live,))
    assert (await again.nodes.heartbeat(OTHER, beat)).pause == "tag_changed"
    scene.service = again


def test_an_operator_changes_tags_over_http_and_a_node_may_not(tmp_path: Path) -> None:
    config = small_config(groups_per_batch=2, num_generations=2, steps=9)
    with dataflow(tmp_path, config) as running:
        node = ServiceClient(running.url, running.node_token("n0"))
        register = RegisterRequest(node_id=NodeId("n0"), boot_id="b", capacity=4, policies=())
        assert not node.call("POST", "/v1/nodes", register, RegisterAnswer).orders.pause
        admin = ServiceClient(running.url, running.token(Role.ADMIN))
        path = "/v1/nodes/n0/tags?add=train&remove=rollout&why=a%20test"
        assert admin.call("PUT", path, None, NodeTags).tags == ("train",)
        assert (
            node.call("POST", "/v1/nodes", register, RegisterAnswer).orders.pause == "tag_changed"
        )
        with pytest.raises(Forbidden):
            node.call("PUT", path, None, NodeTags)
        with pytest.raises(BadRequest, match="is not valid"):
            admin.call("PUT", "/v1/nodes/n0/tags?add=a%20b", None, NodeTags)
        node.close()
        admin.close()
