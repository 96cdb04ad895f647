# SPDX-License-Identifier: Apache-2.0
"""Saving beside the training: a copy, complete before it is told, one at a time, never quietly
dead."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from penstock.errors import Fenced, StoreError
from penstock.trainer import background_worker
from penstock.trainer.checkpoint import Checkpoint, Checkpoints, Cursor
from penstock.trainer.checkpoint_manifest import STATE
from penstock.trainer.checkpoint_saver import Saver
from penstock.trainer.model_folders import WEIGHTS, static_files
from penstock.trainer.state_shards import StateShard
from penstock.trainer.weight_shares import ShareBuffers


class SlowCheckpoints(Checkpoints):
    """As the real ones, on a disk that can be stopped."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, policy="policy", every=1)
        self.may_write = threading.Event()
        self.may_write.set()
        self.began = threading.Event()

    def save(self, *args: object, **kwargs: object) -> Checkpoint:
        self.began.set()
        assert self.may_write.wait(60)
        return super().save(*args, **kwargs)  # pyright: ignore


class World:
    def __init__(self, root: Path, model_folder: Path) -> None:
        self.root = root
        self.checkpoints = SlowCheckpoints(root)
        self.told: list[tuple[tuple[int, int], ...]] = []
        self.is_replaced = False
        self.static = static_files(model_folder)
        self.save_now(0)
        self.saver = Saver(
            self.checkpoints, check_allowed=self.check_allowed, on_saved=self.on_saved
        )

    def check_allowed(self) -> None:
        if self.is_replaced:
            raise Fenced("replaced by 2")

    def on_saved(self) -> None:
        for number, _ in self.checkpoints.retained:
            assert (self.root / f"step_{number}" / STATE).is_file(), "told before it was complete"
        self.told.append(self.checkpoints.retained)

    def save_now(self, number: int) -> None:
        state = StateShard(tensors=tensors(number))
        weights = ShareBuffers().copy(tensors(number))
        self.checkpoints.save(cursor(number), weights=weights, state=state, static=self.static)

    def submit(self, number: int) -> dict[str, Tensor]:
        live = tensors(number)
        self.saver.submit(
            cursor(number), weights=live, state=live, static=self.static, monitor_state={}
        )
        return live


def cursor(number: int) -> Cursor:
    return Cursor(number=number, seq=number, incarnation=1)


def tensors(value: int) -> dict[str, Tensor]:
    return {"model.weight": torch.full((8, 8), float(value))}


def saved_value(root: Path, number: int) -> float:
    return float(load_file(root / f"step_{number}" / WEIGHTS)["model.weight"][0, 0])


@pytest.fixture
def world(tmp_path: Path, model_folder: Path) -> Iterator[World]:
    made = World(tmp_path, model_folder)
    yield made
    made.checkpoints.may_write.set()
    made.saver.close()


def test_the_step_goes_on_and_what_it_changes_is_not_what_is_saved(world: World) -> None:
    world.checkpoints.may_write.clear()
    live = world.submit(1)
    assert world.checkpoints.began.wait(60)
    live["model.weight"].fill_(9.0)  # the next step, while the disk is busy
    assert world.told == [], "nothing is told before it is on disk"
    world.checkpoints.may_write.set()
    world.saver.flush()
    assert world.told == [((0, 0), (1, 1))]
    assert saved_value(world.root, 1) == 1.0


def test_no_second_copy_is_made_while_one_is_being_written(world: World) -> None:
    assert world.saver.is_due(cursor(1))
    world.checkpoints.may_write.clear()
    world.submit(1)
    assert world.checkpoints.began.wait(60)
    assert not any(world.saver.is_due(cursor(number)) for number in range(2, 20))
    late = threading.Thread(target=world.submit, args=(5,))
    late.start()
    late.join(0.2)
    assert late.is_alive(), "whoever must save now waits for the disk instead of for memory"
    world.checkpoints.may_write.set()
    late.join(30)
    world.saver.flush()
    assert world.told[-1] == ((1, 1), (5, 5))


@pytest.mark.parametrize("ending", ["is_due", "hand_over", "finish"])
def test_a_replaced_trainer_writes_nothing_and_ends(world: World, ending: str) -> None:
    world.is_replaced = True
    world.submit(1)
    with pytest.raises(Fenced, match="replaced by 2"):
        if ending == "finish":
            world.saver.flush()
        while True:
            world.saver.is_due(cursor(2)) if ending == "is_due" else world.submit(2)
    assert {path.name for path in world.root.iterdir()} == {"step_0"}
    assert world.told == []


def test_a_full_disk_ends_the_trainer_and_leaves_the_older_checkpoint(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise StoreError("no space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    world.submit(1)
    with pytest.raises(StoreError, match="no space left"):
        world.saver.flush()
    monkeypatch.undo()
    reopened = Checkpoints(world.root, policy="policy", every=1)
    found = reopened.open_newest()
    assert found is not None and found.cursor == cursor(0)


def test_closing_waits_for_nobody(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_worker, "CLOSE_TIMEOUT_S", 0.05)
    world.checkpoints.may_write.clear()
    world.submit(1)
    assert world.checkpoints.began.wait(60)
    world.saver.close()
    assert world.told == []
