# SPDX-License-Identifier: Apache-2.0
"""A node with the tag `train` that never pauses: trainers wait for it once, and no more. Nodes that
say all the time that they paused: the event log has a line for each order, and no more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.contract.test_resource_sharing import OTHER, SHARED, Scene, make_scene

from penstock.dataflow.core.leasing import NodeState
from penstock.dataflow.service import resource_sharing
from penstock.types import NodeId


async def has_batch(scene: Scene, seq: int) -> bool:
    await scene.beat(SHARED)
    await scene.deliver(await scene.lease(SHARED, 4))
    return (await scene.ask(seq)).manifest is not None


async def test_a_node_delays_one_changeover_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trusted node names its tags itself. It could make trainers wait at every step."""
    scene = await make_scene(tmp_path)
    try:
        await scene.join(SHARED, "train")
        monkeypatch.setattr(resource_sharing, "PAUSE_GRACE_S", 0.0)  # the wait is over
        assert await has_batch(scene, 1)
        await scene.commit(1)
        monkeypatch.setattr(resource_sharing, "PAUSE_GRACE_S", 1e9)
        assert await has_batch(scene, 2)
        await scene.commit(2)
        scene.service.sharing.retag(SHARED, ["train"], ())  # an operator vouches for it
        assert not await has_batch(scene, 3)
    finally:
        scene.service.close()


async def flip(scene: Scene, node_id: NodeId, times: int = 50) -> None:
    for _ in range(times):
        await scene.beat(node_id, NodeState.PAUSED)
        await scene.beat(node_id)


async def test_a_node_without_an_order_to_pause_writes_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its heartbeats say what they like, hundreds a second: each wrote to the disk, and woke
    all polls."""
    scene, wakes = await make_scene(tmp_path), list[None]()
    try:
        for node_id, tags in ((OTHER, ()), (SHARED, ("train",))):
            await scene.join(node_id, *tags)
            monkeypatch.setattr(scene.service.process, "wake", lambda: wakes.append(None))
            wakes.clear()
            await flip(scene, node_id)
            assert scene.events == [] and len(wakes) < 5, "100 heartbeats"
    finally:
        scene.service.close()


async def test_an_order_is_answered_by_one_line(tmp_path: Path) -> None:
    """However often the node changes its mind before the next one."""
    scene = await make_scene(tmp_path)
    try:
        await scene.join(OTHER)
        expected: list[tuple[str, str]] = []
        for _ in range(3):
            scene.service.sharing.retag(OTHER, (), ["rollout"])
            assert (await scene.beat(OTHER)).pause
            await flip(scene, OTHER)
            await scene.beat(OTHER, NodeState.PAUSED)
            scene.service.sharing.retag(OTHER, ["rollout"], ())
            assert not (await scene.beat(OTHER, NodeState.PAUSED)).pause
            await scene.beat(OTHER)
            await flip(scene, OTHER)
            expected += [("interrupted", "tag_changed"), ("resumed", "tag_returned")]
            assert scene.triggers == expected
    finally:
        scene.service.close()


async def test_a_version_interrupts_a_node_once(tmp_path: Path) -> None:
    """Between versions that it says it loads, and those that do not exist, are no lines."""
    scene = await make_scene(tmp_path)
    try:
        await scene.join(OTHER)
        rows = await scene.lease(OTHER, 6)
        await scene.deliver(rows[:4])
        assert (await scene.ask(1)).manifest is not None
        old = scene.live
        await scene.commit(1)
        future = replace(old, number=99)
        for version in [scene.live, old, future, replace(future, number=100)] * 25:
            await scene.beat(OTHER, live=version)
        assert scene.triggers == [("interrupted", "new_weights")]
    finally:
        scene.service.close()
