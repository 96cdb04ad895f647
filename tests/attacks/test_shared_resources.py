# SPDX-License-Identifier: Apache-2.0
"""A node with the tag `train` that never pauses: trainers wait for it once, and no more."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.contract.test_resource_sharing import SHARED, Scene, make_scene

from penstock.dataflow.service import resource_sharing


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
