# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from tests.unit.trainer.doubles import random_batch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from penstock.trainer.checkpoint import NUM_KEPT, STATE, Checkpoint, Checkpoints, Cursor
from penstock.trainer.learner import Learner, UpdateSpec
from penstock.trainer.losses import LossSpec
from penstock.trainer.models import WEIGHTS, load_model, static_files
from penstock.trainer.snapshots import weights_of

NewModel = Callable[[], PreTrainedModel]
LOSS = LossSpec(epsilon=0.2, epsilon_high=0.2, entropy_coef=0.01)
UPDATES = UpdateSpec(learning_rate=2e-3, minibatches=2)


def open_checkpoints(root: Path) -> Checkpoints:
    return Checkpoints(root, policy="policy", config_digest="same", every=20)


def at(number: int, seq: int | None = None) -> Cursor:
    return Cursor(number=number, seq=number if seq is None else seq, incarnation=1)


def save(
    checkpoints: Checkpoints, learner: Learner, cursor: Cursor, model_folder: Path
) -> Checkpoint:
    return checkpoints.save(
        cursor,
        weights=weights_of(learner.model),
        state=learner.state_tensors(),
        static=static_files(model_folder),
    )


def bits(learner: Learner) -> dict[str, Tensor]:
    state = {f"state.{name}": value for name, value in learner.state_tensors().items()}
    return {name: value.clone() for name, value in (weights_of(learner.model) | state).items()}


def assert_same_bits(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


def train(learner: Learner, *seqs: int) -> None:
    for seq in seqs:
        assert learner.step(random_batch(0, seq=seq).assembled()).skipped is None


def test_a_checkpoint_is_an_ordinary_model_folder(
    new_model: NewModel, model_folder: Path, tmp_path: Path
) -> None:
    learner = Learner(new_model(), LOSS, UPDATES)
    train(learner, 1)
    saved = save(open_checkpoints(tmp_path), learner, at(1), model_folder)
    assert saved.folder == tmp_path / "step_1"
    loaded = AutoModelForCausalLM.from_pretrained(saved.folder)
    assert_same_bits(weights_of(learner.model), weights_of(loaded))
    names = {path.name for path in static_files(model_folder)}
    assert names < {path.name for path in saved.folder.iterdir()}


def test_resumed_training_has_the_same_bits_as_training_straight_on(
    new_model: NewModel, model_folder: Path, tmp_path: Path
) -> None:
    straight = Learner(new_model(), LOSS, UPDATES)
    train(straight, 1, 2, 3, 4, 5, 6)

    first = Learner(new_model(), LOSS, UPDATES)
    train(first, 1, 2, 3)
    save(open_checkpoints(tmp_path), first, at(3), model_folder)
    found = open_checkpoints(tmp_path).newest()
    assert found is not None and found.cursor == at(3)
    second = Learner(load_model(found.folder), LOSS, UPDATES)
    second.restore(found.read_state())
    assert_same_bits(bits(first), bits(second))
    train(second, 4, 5, 6)
    assert_same_bits(bits(straight), bits(second))


def test_an_interruption_at_any_moment_leaves_the_older_checkpoint_whole(
    new_model: NewModel,
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every file and folder is fsynced on its way, so dying at each fsync visits every state."""
    learner = Learner(new_model(), LOSS, UPDATES)
    save(open_checkpoints(tmp_path), learner, at(0), model_folder)
    older = bits(learner)
    train(learner, 1)
    real = os.fsync
    interrupted = 0
    while True:
        left = interrupted

        def dying(descriptor: int) -> None:
            nonlocal left
            if left == 0:
                raise KeyboardInterrupt
            left -= 1
            real(descriptor)

        monkeypatch.setattr(os, "fsync", dying)
        checkpoints = open_checkpoints(tmp_path)
        checkpoints.newest()
        try:
            save(checkpoints, learner, at(1), model_folder)
            break
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            monkeypatch.setattr(os, "fsync", real)
        found = open_checkpoints(tmp_path).newest()
        assert found is not None
        restored = Learner(load_model(found.folder), LOSS, UPDATES)
        restored.restore(found.read_state())
        assert found.cursor.number in (0, 1)
        assert_same_bits(bits(restored), older if found.cursor == at(0) else bits(learner))
        if found.cursor.number == 1:
            break  # only the rename's own fsync was missing: complete, and visible
    assert interrupted >= len(static_files(model_folder)) + 3
    assert not list(tmp_path.glob(".writing-*"))


@pytest.mark.parametrize("name", [WEIGHTS, "optimizer.safetensors", "config.json", STATE])
@pytest.mark.parametrize("how", ["flipped", "missing", "cut"])
def test_a_damaged_checkpoint_is_passed_over(
    new_model: NewModel, model_folder: Path, tmp_path: Path, name: str, how: str
) -> None:
    learner = Learner(new_model(), LOSS, UPDATES)
    checkpoints = open_checkpoints(tmp_path)
    save(checkpoints, learner, at(0), model_folder)
    train(learner, 1)
    newest = save(checkpoints, learner, at(1), model_folder)
    path = newest.folder / name
    data = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
    else:
        data[len(data) // 2] ^= 0x80
        path.write_bytes(data if how == "flipped" else data[:-1] if name != STATE else data[:-9])
    reopened = open_checkpoints(tmp_path)
    found = reopened.newest()
    assert found is not None and found.cursor == at(0)
    assert reopened.retained == ((0, 0),)
    again = save(reopened, learner, at(1), model_folder)
    assert open_checkpoints(tmp_path).newest() == again, "the damaged one was replaced"


def test_only_the_last_are_kept(new_model: NewModel, model_folder: Path, tmp_path: Path) -> None:
    learner = Learner(new_model(), LOSS, UPDATES)
    checkpoints = open_checkpoints(tmp_path)
    for number in range(4):
        save(checkpoints, learner, at(number, seq=number + 5), model_folder)
    assert checkpoints.retained == ((2, 7), (3, 8))
    assert len(list(tmp_path.iterdir())) == NUM_KEPT
    assert open_checkpoints(tmp_path).newest() == checkpoints.last


def test_skipped_batches_move_only_the_cursor(
    new_model: NewModel, model_folder: Path, tmp_path: Path
) -> None:
    learner = Learner(new_model(), LOSS, UPDATES)
    checkpoints = open_checkpoints(tmp_path)
    first = save(checkpoints, learner, at(2), model_folder)
    moved = save(checkpoints, learner, at(2, seq=9), model_folder)
    assert moved.folder == first.folder
    found = open_checkpoints(tmp_path).newest()
    assert found == moved and found is not None and found.cursor.seq == 9
    assert checkpoints.retained == ((2, 9),)


def test_what_a_replaced_trainer_wrote_ahead_is_removed(
    new_model: NewModel, model_folder: Path, tmp_path: Path
) -> None:
    learner = Learner(new_model(), LOSS, UPDATES)
    mine = open_checkpoints(tmp_path)
    save(mine, learner, at(1), model_folder)
    other = open_checkpoints(tmp_path)
    other.newest()
    save(other, learner, at(5), model_folder)
    save(mine, learner, at(3), model_folder)
    found = open_checkpoints(tmp_path).newest()
    assert found is not None and found.cursor == at(3)


def test_a_checkpoint_of_another_policy_does_not_count(
    new_model: NewModel, model_folder: Path, tmp_path: Path
) -> None:
    learner = Learner(new_model(), LOSS, UPDATES)
    save(open_checkpoints(tmp_path), learner, at(1), model_folder)
    assert Checkpoints(tmp_path, policy="judge", config_digest="same", every=1).newest() is None


def test_due_every_so_many_versions(
    new_model: NewModel, model_folder: Path, tmp_path: Path
) -> None:
    checkpoints = open_checkpoints(tmp_path)
    save(checkpoints, Learner(new_model(), LOSS, UPDATES), at(0), model_folder)
    assert next(n for n in range(50) if checkpoints.is_due(at(n))) == 20
