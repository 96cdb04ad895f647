# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.unit.trainer.doubles import die_at_sync, make_learner, random_batch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from penstock.errors import ConfigError, Fenced, StoreError
from penstock.trainer import checkpoint
from penstock.trainer.checkpoint import NUM_KEPT, Checkpoint, Checkpoints, Cursor
from penstock.trainer.checkpoint_manifest import (
    STATE,
    UnusableCheckpoint,
    read_checkpoint_manifest,
    write_checkpoint_manifest,
)
from penstock.trainer.learner import Learner
from penstock.trainer.model_folders import WEIGHTS, load_model, static_files
from penstock.trainer.signals.alarms import Cause, DivergenceStreak, NoSignalStreak
from penstock.trainer.signals.mismatch import Mismatch, NodeMismatches
from penstock.trainer.signals.monitor import MonitorState, from_json, to_json
from penstock.trainer.snapshots import weights_of
from penstock.trainer.state_shards import StateShard
from penstock.trainer.weight_shares import ShareBuffers

NewModel = Callable[[], PreTrainedModel]


def open_checkpoints(root: Path) -> Checkpoints:
    return Checkpoints(root, policy="policy", every=20)


def at(number: int, seq: int | None = None, *, incarnation: int = 1) -> Cursor:
    seq = number if seq is None else seq
    return Cursor(number=number, seq=seq, incarnation=incarnation)


def save(
    checkpoints: Checkpoints, learner: Learner, cursor: Cursor, model_folder: Path
) -> Checkpoint:
    return checkpoints.save(
        cursor,
        weights=ShareBuffers().copy(weights_of(learner.model)),
        state=StateShard(tensors=learner.state_tensors()),
        static=static_files(model_folder),
    )


def bits(learner: Learner) -> dict[str, Tensor]:
    state = {f"state.{name}": value for name, value in learner.state_tensors().items()}
    return {name: value.clone() for name, value in (weights_of(learner.model) | state).items()}


def files(root: Path) -> dict[str, bytes]:
    paths = [path for path in root.rglob("*") if path.is_file()]
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


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
    learner = make_learner(new_model(), minibatches=2)
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
    straight = make_learner(new_model(), minibatches=2)
    train(straight, 1, 2, 3, 4, 5, 6)

    first = make_learner(new_model(), minibatches=2)
    train(first, 1, 2, 3)
    save(open_checkpoints(tmp_path), first, at(3), model_folder)
    found = open_checkpoints(tmp_path).open_newest()
    assert found is not None and found.cursor == at(3)
    second = make_learner(load_model(found.folder), minibatches=2)
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
    learner = make_learner(new_model(), minibatches=2)
    save(open_checkpoints(tmp_path), learner, at(0), model_folder)
    older = bits(learner)
    train(learner, 1)
    interrupted = 0
    while True:
        die_at_sync(monkeypatch, interrupted)
        checkpoints = open_checkpoints(tmp_path)
        checkpoints.open_newest()
        try:
            save(checkpoints, learner, at(1), model_folder)
            break
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            monkeypatch.undo()
        found = open_checkpoints(tmp_path).open_newest()
        assert found is not None
        restored = make_learner(load_model(found.folder), minibatches=2)
        restored.restore(found.read_state())
        assert found.cursor.number in (0, 1)
        assert_same_bits(bits(restored), older if found.cursor == at(0) else bits(learner))
        if found.cursor.number == 1:
            break  # only the rename's own fsync was missing: complete, and visible
    assert interrupted >= len(static_files(model_folder)) + 3
    assert not list(tmp_path.glob(".partial-*"))


@pytest.mark.parametrize("name", [WEIGHTS, "optimizer.safetensors", "config.json", STATE])
@pytest.mark.parametrize("how", ["flipped", "missing", "cut"])
def test_a_damaged_checkpoint_is_set_aside_and_the_older_one_counts(
    new_model: NewModel, model_folder: Path, tmp_path: Path, name: str, how: str
) -> None:
    learner = make_learner(new_model(), minibatches=2)
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
    found = reopened.open_newest()
    assert found is not None and found.cursor == at(0)
    assert reopened.retained == ((0, 0),)
    (aside,) = tmp_path.glob(".damaged-step_1-*")
    kept = files(aside)
    assert not newest.folder.exists() and "tokenizer.json" in kept
    again = save(reopened, learner, at(1), model_folder)
    assert open_checkpoints(tmp_path).open_newest() == again
    assert files(aside) == kept, "whatever is left of it, is left"


def test_no_bit_of_what_a_checkpoint_says_of_itself_changes_unnoticed(
    new_model: NewModel, model_folder: Path, tmp_path: Path
) -> None:
    learner = make_learner(new_model(), minibatches=2)
    checkpoints = Checkpoints(tmp_path, policy="policy", every=20, config={"rate": "0.002"})
    state = save(checkpoints, learner, at(5), model_folder).folder / STATE
    content = state.read_bytes()
    for bit in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        state.write_bytes(damaged)
        with pytest.raises(UnusableCheckpoint):
            read_checkpoint_manifest(state.parent)
    state.write_bytes(content)
    assert checkpoints.open_newest() == checkpoints.last


def test_a_checkpoint_without_its_own_digest_is_damaged(
    new_model: NewModel, model_folder: Path, tmp_path: Path
) -> None:
    learner = make_learner(new_model(), minibatches=2)
    state = save(open_checkpoints(tmp_path), learner, at(5), model_folder).folder / STATE
    bare = json.loads(state.read_bytes())
    del bare["digest"]
    state.write_text(json.dumps(bare))
    with pytest.raises(UnusableCheckpoint, match="does not start with its digest"):
        read_checkpoint_manifest(state.parent)


@pytest.mark.parametrize("how", ["unreadable", "damaged", "of another policy"])
def test_checkpoints_of_which_none_can_be_used_are_no_fresh_start(
    new_model: NewModel, model_folder: Path, tmp_path: Path, how: str
) -> None:
    learner = make_learner(new_model(), minibatches=2)
    checkpoints = open_checkpoints(tmp_path)
    saved = [save(checkpoints, learner, at(number), model_folder) for number in (5, 10)]
    for folder in (one.folder for one in saved):
        if how == "unreadable":
            (folder / STATE).rename(folder / "elsewhere")
            (folder / STATE).mkdir()  # reading it is an OSError, also for root
        elif how == "damaged":
            (folder / WEIGHTS).write_bytes(b"")
        else:
            write_checkpoint_manifest(
                folder, replace(read_checkpoint_manifest(folder), policy="judge")
            )
    before = files(tmp_path)
    with pytest.raises(StoreError, match=r"(?s)step_5: .*step_10: .*move these folders away"):
        open_checkpoints(tmp_path).open_newest()
    assert files(tmp_path) == before


def test_a_checkpoint_of_a_newer_format_is_refused_by_name(
    new_model: NewModel, model_folder: Path, tmp_path: Path
) -> None:
    learner = make_learner(new_model(), minibatches=2)
    checkpoints = open_checkpoints(tmp_path)
    save(checkpoints, learner, at(5), model_folder)
    state = save(checkpoints, learner, at(10), model_folder).folder / STATE
    state.write_text('{"format": 4, "policy": {"name": "policy"}}')
    before = files(tmp_path)
    with pytest.raises(StoreError, match=r"step_10 was written by a newer penstock.*format is 4"):
        open_checkpoints(tmp_path).open_newest()
    with pytest.raises(StoreError, match="newer penstock"):
        save(checkpoints, learner, at(11), model_folder)
    assert files(tmp_path) == before


def test_a_removal_cut_short_leaves_nothing_that_looks_like_a_checkpoint(
    new_model: NewModel, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make_learner(new_model(), minibatches=2)
    checkpoints = open_checkpoints(tmp_path)
    for number in (0, 1):
        save(checkpoints, learner, at(number), model_folder)

    def dying(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", dying)
        save(checkpoints, learner, at(2), model_folder)
    reopened = open_checkpoints(tmp_path)
    assert reopened.open_newest() is not None and reopened.retained == ((1, 1), (2, 2))
    save(reopened, learner, at(3), model_folder)
    assert {path.name for path in tmp_path.iterdir()} == {"step_2", "step_3"}


@pytest.mark.parametrize("number", [5, 6, 10, 12])
def test_a_replaced_trainer_leaves_its_successors_checkpoints_alone(
    new_model: NewModel, model_folder: Path, tmp_path: Path, number: int
) -> None:
    learner = make_learner(new_model(), minibatches=2)
    replaced = open_checkpoints(tmp_path)
    save(replaced, learner, at(5), model_folder)
    successor = open_checkpoints(tmp_path)
    successor.open_newest()
    for later in (8, 10):
        save(successor, learner, at(later, incarnation=2), model_folder)
    before = files(tmp_path)
    with pytest.raises(Fenced, match="saved by incarnation 2 of policy"):
        save(replaced, learner, at(number, seq=20), model_folder)
    assert files(tmp_path) == before
    found = open_checkpoints(tmp_path).open_newest()
    assert found is not None and found.cursor == at(10, incarnation=2)


def test_a_checkpoint_of_another_config_is_refused_by_key_unless_that_is_accepted(
    new_model: NewModel, model_folder: Path, tmp_path: Path
) -> None:
    def opened(learning_rate: str, *, accepts_changes: bool = False) -> Checkpoints:
        config = {"seed": "0", "training.learning_rate": learning_rate}
        return Checkpoints(
            tmp_path, policy="policy", every=20, config=config, accepts_changes=accepts_changes
        )

    learner = make_learner(new_model(), minibatches=2)
    save(opened("0.1"), learner, at(1), model_folder)
    assert opened("0.1").open_newest() is not None
    before = files(tmp_path)
    with pytest.raises(ConfigError, match=r"(?s)training.learning_rate: 0.1 -> 0.2\n.*--accept"):
        opened("0.2").open_newest()
    assert files(tmp_path) == before
    accepted = opened("0.2", accepts_changes=True)
    assert accepted.open_newest() is not None
    save(accepted, learner, at(2), model_folder)
    assert opened("0.2").open_newest() is not None, "from here on it is the config of the run"


def test_only_the_last_are_kept(new_model: NewModel, model_folder: Path, tmp_path: Path) -> None:
    learner = make_learner(new_model(), minibatches=2)
    checkpoints = open_checkpoints(tmp_path)
    for number in range(4):
        save(checkpoints, learner, at(number, seq=number + 5), model_folder)
    assert checkpoints.retained == ((2, 7), (3, 8))
    assert len(list(tmp_path.iterdir())) == NUM_KEPT
    assert open_checkpoints(tmp_path).open_newest() == checkpoints.last


def test_skipped_batches_move_only_the_cursor(
    new_model: NewModel, model_folder: Path, tmp_path: Path
) -> None:
    learner = make_learner(new_model(), minibatches=2)
    checkpoints = open_checkpoints(tmp_path)
    first = save(checkpoints, learner, at(2), model_folder)
    before = files(tmp_path)
    moved = checkpoints.advance_cursor(at(2, seq=9), {})
    assert moved.folder == first.folder
    updated = files(tmp_path)
    assert [name for name in updated if updated[name] != before[name]] == [f"step_2/{STATE}"]
    found = open_checkpoints(tmp_path).open_newest()
    assert found == moved and found is not None and found.cursor.seq == 9
    assert checkpoints.retained == ((2, 9),)


def with_two_saved(
    new_model: NewModel, model_folder: Path, root: Path
) -> tuple[Learner, Checkpoints]:
    learner = make_learner(new_model(), minibatches=2)
    checkpoints = open_checkpoints(root)
    for number in (1, 2):
        save(checkpoints, learner, at(number), model_folder)
    return learner, checkpoints


def test_one_that_is_damaged_while_the_trainer_lives_costs_no_sound_one(
    new_model: NewModel, model_folder: Path, tmp_path: Path
) -> None:
    learner, checkpoints = with_two_saved(new_model, model_folder, tmp_path)
    flip_bit(checkpoints.last.folder / STATE)
    save(checkpoints, learner, at(3), model_folder)
    assert checkpoints.retained == ((1, 1), (3, 3))
    reopened = open_checkpoints(tmp_path)
    assert reopened.open_newest() == checkpoints.last and reopened.retained == checkpoints.retained
    assert len(list(tmp_path.glob(".damaged-step_2-*"))) == 1


def test_a_damaged_one_is_not_moved_and_the_next_life_goes_on_from_the_one_before(
    new_model: NewModel, model_folder: Path, tmp_path: Path
) -> None:
    _, checkpoints = with_two_saved(new_model, model_folder, tmp_path)
    flip_bit(checkpoints.last.folder / STATE)
    before = files(tmp_path)
    with pytest.raises(
        StoreError, match=r"(?s)newest .*step_2, was damaged.*Start the trainer again"
    ):
        checkpoints.advance_cursor(at(2, seq=5), {})
    assert files(tmp_path) == before
    found = open_checkpoints(tmp_path).open_newest()
    assert found is not None and found.cursor == at(1)


def test_an_older_one_that_is_damaged_does_not_keep_the_newest_from_moving(
    new_model: NewModel, model_folder: Path, tmp_path: Path
) -> None:
    _, checkpoints = with_two_saved(new_model, model_folder, tmp_path)
    flip_bit(checkpoints.read_step(1).folder / STATE)
    checkpoints.advance_cursor(at(2, seq=5), {})
    assert checkpoints.retained == ((2, 5),)


def test_one_that_is_let_go_while_another_run_copies_it_is_named_with_those_left(
    new_model: NewModel, model_folder: Path, tmp_path: Path
) -> None:
    learner = make_learner(new_model(), minibatches=2)
    checkpoints = open_checkpoints(tmp_path / "parent")
    first = save(checkpoints, learner, at(1), model_folder)
    for number in (2, 3):
        save(checkpoints, learner, at(number), model_folder)
    with pytest.raises(StoreError, match=r"step_1 was pruned .*choose one .*: step_2, step_3$"):
        open_checkpoints(tmp_path / "fork").fork_from(first)


def test_one_that_is_let_go_while_it_is_looked_at_is_not_damaged(
    new_model: NewModel, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make_learner(new_model(), minibatches=2)
    checkpoints = open_checkpoints(tmp_path)
    for number in (1, 2):
        save(checkpoints, learner, at(number), model_folder)
    real = checkpoint.digest

    def prunes_first(path: Path) -> str:
        if path.parent.name == "step_1" and path.parent.exists():
            shutil.rmtree(path.parent)
        return real(path)

    monkeypatch.setattr(checkpoint, "digest", prunes_first)
    complete, unusable = open_checkpoints(tmp_path).scan()
    assert ([found.cursor for found in complete], unusable) == ([at(2)], {})


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_what_is_remembered_of_batches_is_part_of_the_checkpoint(
    new_model: NewModel, model_folder: Path, tmp_path: Path
) -> None:
    learner = make_learner(new_model(), minibatches=2)
    gap = Mismatch(num_tokens=100, sum_abs=1 / 3, sum_k3=0.1, max_abs=0.2)
    mismatches = NodeMismatches(reported=frozenset({"c"})).updated(
        {("a", 0): gap, ("a", 1): gap, ("b", 0): gap + gap}, 2
    )
    monitor_state = MonitorState(
        mismatches=mismatches,
        no_signal=NoSignalStreak().updated(Cause.EQUAL_REWARDS).updated(Cause.GAP),
        divergence=DivergenceStreak().updated(0.7, 1.0),
    )
    checkpoints = open_checkpoints(tmp_path)
    weights = ShareBuffers().copy(weights_of(learner.model))
    state = StateShard(tensors=learner.state_tensors())
    static = static_files(model_folder)
    checkpoints.save(
        at(2), weights=weights, state=state, static=static, monitor_state=to_json(monitor_state)
    )
    assert from_json(read_checkpoint_manifest(tmp_path / "step_2").monitor_state) == monitor_state
    lost = gap + Mismatch(num_tokens=1, sum_abs=math.inf, sum_k3=math.nan, max_abs=math.inf)
    later = replace(
        monitor_state,
        mismatches=mismatches.updated({("b", 0): lost}, 3),
        divergence=DivergenceStreak().updated(math.inf, 1.0),
    )
    checkpoints.advance_cursor(at(2, seq=3), to_json(later))
    found = from_json(read_checkpoint_manifest(tmp_path / "step_2").monitor_state)
    assert (found.mismatches.nodes.keys(), found.mismatches.reported) == ({"a"}, {"c"})
    assert (found.no_signal, found.divergence.num_batches) == (monitor_state.no_signal, 1)
    checkpoints.advance_cursor(
        at(2, seq=4), {"idle": {"counts": {"a cause of another version": 1}}}
    )
    assert from_json(read_checkpoint_manifest(tmp_path / "step_2").monitor_state) == MonitorState()


def test_an_interruption_while_one_takes_the_place_of_its_own_number_loses_neither(
    new_model: NewModel, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only checkpoint there is: number 0, after batches of which only a critic has learned."""
    learner = make_learner(new_model(), minibatches=2)
    save(open_checkpoints(tmp_path), learner, at(0), model_folder)
    older = bits(learner)
    train(learner, 1)
    seqs: list[int] = []
    for died_at in range(100):
        die_at_rename(monkeypatch, died_at)
        checkpoints = open_checkpoints(tmp_path)
        checkpoints.open_newest()
        try:
            save(checkpoints, learner, at(0, seq=1), model_folder)
            break
        except KeyboardInterrupt:
            pass
        finally:
            monkeypatch.undo()
        found = open_checkpoints(tmp_path).open_newest()
        assert found is not None and found.cursor.number == 0
        restored = make_learner(load_model(found.folder), minibatches=2)
        restored.restore(found.read_state())
        assert_same_bits(bits(restored), bits(learner) if found.cursor.seq else older)
        seqs.append(found.cursor.seq)
    assert seqs == sorted(seqs) and set(seqs) == {0, 1}
    reopened = open_checkpoints(tmp_path)
    assert reopened.open_newest() is not None and reopened.retained == ((0, 1),)
    assert {path.name for path in tmp_path.iterdir()} == {"step_0"}


def die_at_rename(monkeypatch: pytest.MonkeyPatch, num_before: int) -> None:
    """From now on so many renames succeed, and the process dies at the next."""
    real, left = Path.rename, num_before

    def dying(path: Path, target: Path) -> Path:
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        return real(path, target)

    monkeypatch.setattr(Path, "rename", dying)


def test_what_a_replaced_trainer_wrote_ahead_is_removed(
    new_model: NewModel, model_folder: Path, tmp_path: Path
) -> None:
    learner = make_learner(new_model(), minibatches=2)
    mine = open_checkpoints(tmp_path)
    save(mine, learner, at(1), model_folder)
    other = open_checkpoints(tmp_path)
    other.open_newest()
    save(other, learner, at(5), model_folder)
    save(mine, learner, at(3), model_folder)
    found = open_checkpoints(tmp_path).open_newest()
    assert found is not None and found.cursor == at(3)


def test_due_every_so_many_versions(
    new_model: NewModel, model_folder: Path, tmp_path: Path
) -> None:
    checkpoints = open_checkpoints(tmp_path)
    save(checkpoints, make_learner(new_model(), minibatches=2), at(0), model_folder)
    assert next(n for n in range(50) if checkpoints.is_due(at(n))) == 20
