# SPDX-License-Identifier: Apache-2.0
"""Lease requests that are held open, at a service in process whose clock never ticks: whoever is
answered was called by what happened, and nobody looks for whom nothing changed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.contract.dataflow_server import POLICY, small_config

from penstock.dataflow.core.leasing import Grant, LiveVersion, NodeState, RegisterRequest
from penstock.dataflow.service.build import build
from penstock.dataflow.service.coordinator import DataflowService
from penstock.dataflow.service.nodes.messages import (
    Heartbeat,
    LeaseAnswer,
    LeaseRequest,
)
from penstock.dataflow.service.process import IsDisconnected, never_disconnected
from penstock.dataflow.service.trainers.messages import (
    IncarnationRequest,
    PublishRequest,
)
from penstock.errors import Fenced
from penstock.types import NodeId

OLD = LiveVersion(policy=POLICY, incarnation=1, number=0)
OWNER = NodeId("owner")
SLOTS = 16


async def gone() -> bool:
    return True


@dataclass(slots=True)
class Scene:
    """A service all of whose slots one node holds."""

    service: DataflowService
    polls: dict[str, asyncio.Task[LeaseAnswer]] = field(
        default_factory=dict[str, asyncio.Task[LeaseAnswer]]
    )

    async def publish(self, number: int) -> None:
        body = PublishRequest(
            incarnation=1, number=number, manifest_digest=f"m{number}", weights_digest="w"
        )
        await self.service.trainers.publish(POLICY, body)

    async def join(self, name: str, state: NodeState = NodeState.LIVE, boot_id: str = "s") -> None:
        body = RegisterRequest(node_id=NodeId(name), boot_id=boot_id, capacity=64, policies=())
        await self.service.nodes.register(body)
        await self.beat(name, state)

    async def beat(self, name: str, state: NodeState = NodeState.LIVE) -> None:
        beat = Heartbeat(boot_id="s", state=state, live=(OLD,))
        await self.service.nodes.heartbeat(NodeId(name), beat)

    async def ask(
        self,
        name: str,
        num: int,
        wait_s: float,
        is_disconnected: IsDisconnected = never_disconnected,
    ) -> LeaseAnswer:
        body = LeaseRequest(
            request_id=f"{name} asks",
            node_id=NodeId(name),
            boot_id="s",
            max_slots=num,
            wait_s=wait_s,
            live=(OLD,),
        )
        return await self.service.nodes.lease(body, is_disconnected)

    async def hold(
        self, name: str, num: int, is_disconnected: IsDisconnected = never_disconnected
    ) -> None:
        """A poll that finds nothing yet."""
        self.polls[name] = asyncio.create_task(self.ask(name, num, 20.0, is_disconnected))
        await asyncio.sleep(0)
        assert not self.polls[name].done()

    async def answered(self, name: str) -> LeaseAnswer:
        return await asyncio.wait_for(self.polls.pop(name), 60)

    async def free_all(self) -> None:
        """The owner leaves, and what it held waits again."""
        await self.service.nodes.leave(OWNER, "s")


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncGenerator[Scene]:
    service = build(small_config(groups_per_batch=4, steps=9), tmp_path)
    found = Scene(service)
    life = IncarnationRequest(request_id="r", expected=0, number=0, seq=0)
    await service.trainers.incarnate(POLICY, life)
    await found.publish(0)
    await found.join(OWNER)
    held = (await found.ask(OWNER, 64, 0.0)).grants
    assert len(held) == SLOTS and not service.partition.waiting.num_slots
    yield found
    for poll in found.polls.values():
        poll.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await poll
    service.close()


async def test_work_that_comes_back_goes_to_those_who_wait(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of them take all of it; the other ninety-eight never look."""
    names = [f"n{index}" for index in range(100)]
    for name in names:
        await scene.join(name)
        await scene.hold(name, SLOTS // 2)
    looked: list[str] = []
    lease = scene.service.partition.lease

    def watched(node_id: NodeId, *rest: Any) -> list[Grant]:
        looked.append(node_id)
        return lease(node_id, *rest)

    monkeypatch.setattr(scene.service.partition, "lease", watched)
    await scene.free_all()
    for name in names[:2]:
        assert len((await scene.answered(name)).grants) == SLOTS // 2, "in order of waiting"
    for name in names[2:]:
        await scene.beat(name)
    assert looked == names[:2]


async def test_what_one_may_not_take_goes_to_the_next(scene: Scene) -> None:
    await scene.join("loading", NodeState.STARTING)
    await scene.join("gone")
    await scene.join("last")
    await scene.hold("loading", SLOTS)
    await scene.hold("gone", SLOTS, gone)
    await scene.hold("last", SLOTS)
    await scene.free_all()
    assert len((await scene.answered("last")).grants) == SLOTS
    assert not (await scene.answered("gone")).grants, "a grant would be held by nobody"
    assert not scene.polls["loading"].done()


async def test_a_request_that_came_twice_is_answered_twice(scene: Scene) -> None:
    await scene.join("a")
    await scene.hold("a", SLOTS)
    again = asyncio.create_task(scene.ask("a", SLOTS, 20.0))
    await asyncio.sleep(0)
    await scene.free_all()
    answers = [await scene.answered("a"), await asyncio.wait_for(again, 60)]
    first, second = ({(g.group_id, g.slot, g.epoch, g.seed) for g in a.grants} for a in answers)
    assert first == second and len(first) == SLOTS


async def test_a_node_that_comes_alive_gets_what_waits(scene: Scene) -> None:
    await scene.join("late", NodeState.STARTING)
    await scene.hold("late", SLOTS)
    await scene.free_all()
    await asyncio.sleep(0.05)
    assert not scene.polls["late"].done()
    await scene.beat("late")
    assert len((await scene.answered("late")).grants) == SLOTS


async def test_all_are_told_of_a_new_version(scene: Scene) -> None:
    for name in ("a", "b"):
        await scene.join(name)
        await scene.hold(name, 1)
    await scene.service.trainers.incarnate(
        POLICY, IncarnationRequest(request_id="again", expected=1, number=0, seq=0)
    )
    body = PublishRequest(incarnation=2, number=0, manifest_digest="other", weights_digest="w")
    await scene.service.trainers.publish(POLICY, body)
    for name in ("a", "b"):
        [wanted] = (await scene.answered(name)).orders.wanted
        assert wanted.incarnation == 2


async def test_a_new_life_ends_the_polls_of_the_old_one(scene: Scene) -> None:
    await scene.join("a")
    await scene.hold("a", 1)
    body = RegisterRequest(node_id=NodeId("a"), boot_id="new", capacity=64, policies=())
    await scene.service.nodes.register(body)
    with pytest.raises(Fenced):
        await scene.answered("a")


async def test_a_tick_lets_those_look_for_whom_nothing_happened(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room on the disk comes back without any command."""
    has_room = False
    monkeypatch.setattr(type(scene.service.process), "has_room", property(lambda _: has_room))
    await scene.free_all()
    await scene.join("a")
    await scene.hold("a", SLOTS)
    await asyncio.sleep(0.05)
    assert not scene.polls["a"].done()
    has_room = True
    await scene.service.tick()
    assert len((await scene.answered("a")).grants) == SLOTS
