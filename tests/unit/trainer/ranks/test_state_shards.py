# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of several ranks: each writes its share, all of them or none count, and any number of
ranks goes on from them.

The ranks are processes with gloo between them, forked once for this file.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.unit.trainer.doubles import die_at_sync
from tests.unit.trainer.rank_jobs import forked
from tests.unit.trainer.shard_jobs import EVERY, NUM_STEPS, lived, opened
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock.errors import StoreError
from penstock.trainer import checkpoint_saver, loop
from penstock.trainer.checkpoint import Checkpoint, Checkpoints, Cursor
from penstock.trainer.checkpoint_manifest import (
    STATE,
    read_checkpoint_manifest,
    write_checkpoint_manifest,
)
from penstock.trainer.checkpoint_saver import Saver, ShardSaver
from penstock.trainer.model_folders import WEIGHTS, static_files
from penstock.trainer.models import Models
from penstock.trainer.publisher import ShareWriter
from penstock.trainer.ranks.group import SingleRank
from penstock.trainer.ranks.regions import TensorRegion
from penstock.trainer.ranks.worker_loop import RankOrder, worker_loop
from penstock.trainer.state_shards import StateShard, open_state, state_names, write_shard
from penstock.trainer.weight_shares import ShareBuffers
from penstock.types import PolicyName

LAST = f"step_{NUM_STEPS}"
SHARES = state_names(2)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("shares")
    shutil.copytree(model_folder, folder / "model")
    return folder


@pytest.fixture(scope="module")
def alone(work: Path) -> list[list[float]]:
    return lived(work, "alone", SingleRank())


@pytest.fixture(scope="module")
def ranks(work: Path, alone: list[list[float]]) -> list[dict[str, Any]]:
    with pytest.raises(subprocess.CalledProcessError):  # its last life ends with a kill
        forked("pair", 2, work, "tests.unit.trainer.shard_jobs")
    return [json.loads((work / f"pair.{rank}.json").read_text()) for rank in range(2)]


def checkpoint(work: Path, name: str) -> Path:
    return work / name / "checkpoints" / LAST


def told(folder: Path) -> dict[str, Any]:
    return json.loads((folder / STATE).read_text())


def test_each_rank_writes_its_own_share_and_nothing_passes_between_them(
    ranks: list[dict[str, Any]], work: Path
) -> None:
    folder = checkpoint(work, "straight")
    assert {*SHARES, WEIGHTS} <= {*told(folder)["files"]}
    assert told(folder)["num_ranks"] == 2
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    for rank in ranks:
        assert rank["state"]["saving"] == rank["state"]["restoring"] == 0
        assert rank["state"]["publishing"] == 0
        assert rank["state"]["gathering"] > 0, "the counter counts"
    sizes = [rank["state"]["kept"] for rank in ranks]
    assert max(sizes) / sum(sizes) < 0.55
    AutoModelForCausalLM.from_pretrained(folder)


def test_the_shares_of_all_ranks_make_the_state_of_one(
    ranks: list[dict[str, Any]], work: Path
) -> None:
    whole = load_file(checkpoint(work, "alone") / "optimizer.safetensors")
    found = open_state([checkpoint(work, "straight") / name for name in SHARES])
    assert found.keys() == whole.keys()
    assert any(name.startswith("critic/weights/") for name in whole)
    updates = {float(whole[name]) for name in whole if name.endswith(".step")}
    assert updates == {2.0 * NUM_STEPS, 2.0 * NUM_STEPS + 2}, "the critic has learned once more"
    for name, tensor in whole.items():
        assert found[name].shape == tensor.shape and found[name].dtype == tensor.dtype
        if tensor.is_floating_point():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=2e-4, msg=name)


def test_two_ranks_go_on_bit_for_bit(ranks: list[dict[str, Any]], work: Path) -> None:
    assert len(ranks[0]["straight"]) == NUM_STEPS + 1
    assert told(checkpoint(work, "straight"))["cursor"]["seq"] == NUM_STEPS + 1
    assert ranks[0]["resumed"] == ranks[0]["straight"][EVERY:]
    ended, straight = (told(checkpoint(work, name))["files"] for name in ("resumed", "straight"))
    assert ended == straight, "weights, moments, critic and random state"


def test_two_ranks_compute_a_step_again_bit_for_bit(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["replayed"] == {"begun_at": EVERY, "differences": [], "is_equal": True}
    assert ranks[1]["replayed"] == {}, "the first one tells"


def test_one_process_goes_on_from_what_two_ranks_saved(
    ranks: list[dict[str, Any]], work: Path
) -> None:
    shutil.copytree(
        work / "straight" / "checkpoints" / f"step_{EVERY}",
        work / "narrowed" / "checkpoints" / f"step_{EVERY}",
    )
    narrowed = lived(work, "narrowed", SingleRank())
    np.testing.assert_allclose(narrowed, ranks[0]["straight"][EVERY:], rtol=0, atol=1e-6)
    assert told(checkpoint(work, "narrowed"))["num_ranks"] == 1


def test_two_ranks_go_on_from_what_one_process_saved(
    ranks: list[dict[str, Any]], work: Path, alone: list[list[float]]
) -> None:
    np.testing.assert_allclose(ranks[0]["widened"], alone[EVERY:], rtol=0, atol=1e-6)
    assert told(checkpoint(work, "widened"))["num_ranks"] == 2


def test_a_model_cut_inside_its_matrices_is_put_together_too(ranks: list[dict[str, Any]]) -> None:
    check_put_together([rank["inside"] for rank in ranks])


@pytest.mark.slow
def test_a_model_cut_both_ways_is_put_together_too(work: Path) -> None:
    check_put_together(forked("square", 4, work, "tests.unit.trainer.shard_jobs"))


def check_put_together(found: list[dict[str, Any]]) -> None:
    assert all(rank["is_given_back"] and rank["parts"] > 10 for rank in found)
    assert found[0]["is_equal"] and found[0]["names"] > 20


def test_a_rank_killed_between_its_file_and_its_word_leaves_the_checkpoint_before(
    ranks: list[dict[str, Any]], work: Path
) -> None:
    assert (work / "survived").exists(), "the first rank did not wait for ever"
    root = work / "killed" / "checkpoints"
    (partial,) = root.glob(".partial-*")
    assert (partial / SHARES[1]).exists(), "killed too early for this test"
    found = opened(work, "killed").open_newest()
    assert found is not None and found.cursor.number == EVERY
    lived(work, "killed", SingleRank())
    assert {path.name for path in root.iterdir()} == {f"step_{EVERY}", LAST}


@pytest.mark.parametrize("how", ["missing", "cut", "flipped", "swapped", "older", "unnamed"])
def test_a_damaged_share_is_refused_and_the_checkpoint_before_counts(
    ranks: list[dict[str, Any]], work: Path, tmp_path: Path, how: str
) -> None:
    shutil.copytree(work / "straight" / "checkpoints", tmp_path / "checkpoints")
    root = tmp_path / "checkpoints"
    first, second = (root / LAST / name for name in SHARES)
    match how:
        case "missing":
            second.unlink()
        case "cut":
            os.truncate(second, second.stat().st_size - 1)
        case "flipped":
            content = bytearray(second.read_bytes())
            content[-1] ^= 1
            second.write_bytes(content)
        case "swapped":
            content, other = first.read_bytes(), second.read_bytes()
            first.write_bytes(other)
            second.write_bytes(content)
        case "older":
            shutil.copyfile(root / f"step_{EVERY}" / second.name, second)
        case _:
            state = read_checkpoint_manifest(root / LAST)
            others = {name: one for name, one in state.files.items() if name != second.name}
            write_checkpoint_manifest(root / LAST, replace(state, files=others))
    found = reopened(root).open_newest()
    assert found is not None and found.cursor.number == EVERY
    assert list(root.glob(f".damaged-{LAST}-*"))
    (found.folder / SHARES[0]).unlink()
    with pytest.raises(StoreError, match=rf"(?s){SHARES[0]}.*move these folders away"):
        reopened(root).open_newest()


def test_the_other_ranks_hear_of_a_slow_disk(
    work: Path, alone: list[list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them may be the reason, and ends when it hears the next word."""
    save = Checkpoints.save

    def slow(*args: Any, **kwargs: Any) -> Checkpoint:
        time.sleep(0.3)
        return save(*args, **kwargs)

    monkeypatch.setattr(Checkpoints, "save", slow)
    monkeypatch.setattr(loop, "KEEPALIVE_S", 0.02)
    between = Path("checkpoints", f"step_{EVERY}")
    shutil.copytree(work / "alone" / between, work / "heard" / between)
    ranks = Heard()
    assert lived(work, "heard", ranks) == alone[EVERY:]
    last = ranks.words[ranks.words.index(RankOrder.STATE) + 1 :]
    assert last[-1] is RankOrder.EXIT
    assert last.count(RankOrder.WAIT) >= 3


class Heard(SingleRank):
    """A first rank, and what it said."""

    def __init__(self) -> None:
        self.words: list[RankOrder] = []

    def broadcast_from_rank0(self, numbers: Sequence[int]) -> list[int]:
        self.words.append(RankOrder(numbers[0]))
        return super().broadcast_from_rank0(numbers)


def reopened(root: Path) -> Checkpoints:
    return Checkpoints(root, policy="policy", every=1, accepts_changes=True)


# --- one process that plays both ranks ------------------------------------------------------------


def at(number: int) -> Cursor:
    return Cursor(number=number, seq=number, incarnation=1)


def halves(value: float) -> list[StateShard]:
    """A tensor of three rows over two ranks, and one that each rank has for itself."""
    regions = [
        TensorRegion(offset=(0, 0), shape=(2, 4), full_shape=(3, 4)),
        TensorRegion(offset=(2, 0), shape=(1, 4), full_shape=(3, 4)),
    ]
    return [
        StateShard(
            tensors={"m": torch.full(region.shape, value + rank), "own": torch.tensor(rank)},
            regions={"m": region},
        )
        for rank, region in enumerate(regions)
    ]


class Pair:
    def __init__(self, root: Path, model_folder: Path) -> None:
        self.root = root
        self.static = static_files(model_folder)
        self.checkpoints = Checkpoints(root, policy="policy", every=1)

    def save(self, number: int, *, token: int) -> Checkpoint:
        first, second = halves(float(number))
        write_shard(self.root / f".partial-{token:016x}", 1, 2, second)
        return self.checkpoints.save(
            at(number),
            weights=ShareBuffers().copy({"w": torch.full((2,), float(number))}),
            state=first,
            static=self.static,
            num_ranks=2,
            token=token,
        )


@pytest.fixture
def two(tmp_path: Path, model_folder: Path) -> Pair:
    return Pair(tmp_path, model_folder)


def test_any_part_is_read_from_the_files_that_hold_it(two: Pair) -> None:
    state = two.save(5, token=1).read_state()
    expected = torch.tensor([[5.0] * 4, [5.0] * 4, [6.0] * 4])
    assert state["m"].equal(expected)
    middle = TensorRegion(offset=(1, 1), shape=(2, 2), full_shape=(3, 4))
    assert state.part("m", middle).equal(expected[1:3, 1:3])
    assert state.part("m", TensorRegion(offset=(3, 0), shape=(0, 4), full_shape=(3, 4))).shape == (
        0,
        4,
    )
    assert [int(state.for_rank(rank)["own"]) for rank in (0, 1, 2)] == [0, 1, 0]


def test_shares_with_a_gap_are_no_tensor(tmp_path: Path) -> None:
    first, second = halves(1.0)
    paths = [tmp_path / name for name in SHARES]
    write_shard(tmp_path, 0, 2, first)
    write_shard(tmp_path, 1, 2, StateShard(tensors={"own": second.tensors["own"]}, regions={}))
    state = open_state(paths)
    assert state.part("m", first.regions["m"]).equal(first.tensors["m"])
    with pytest.raises(StoreError, match=r"m is incomplete in .*hold 8 of 12 elements"):
        state["m"]


def test_an_interruption_at_any_moment_leaves_a_whole_checkpoint(
    two: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file and folder is synced on its way, so dying at each sync visits every state."""
    two.save(1, token=1)
    numbers: list[int] = []
    while 2 not in numbers:
        die_at_sync(monkeypatch, len(numbers))
        try:
            two.save(2, token=10 + len(numbers))
        except KeyboardInterrupt:
            pass
        finally:
            monkeypatch.undo()
        two.checkpoints = Checkpoints(two.root, policy="policy", every=1)
        found = two.checkpoints.open_newest()
        assert found is not None
        numbers.append(found.cursor.number)
        value = float(found.cursor.number)
        state = found.read_state()
        assert state["m"].equal(torch.tensor([[value] * 4, [value] * 4, [value + 1] * 4]))
        assert load_file(found.folder / WEIGHTS)["w"][0] == value
    assert len(numbers) > len(two.static) + 6
    two.save(3, token=99)
    assert not list(two.root.glob(".*"))


def test_every_file_is_synced_before_it_counts(two: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync
    synced: set[int] = set()

    def noting(descriptor: int) -> None:
        real(descriptor)
        if not (two.root / "step_1").exists():
            synced.add(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", noting)
    folder = two.save(1, token=1).folder
    assert {*SHARES, WEIGHTS, STATE} <= {path.name for path in folder.iterdir()}
    assert [path.name for path in folder.iterdir() if path.stat().st_ino not in synced] == []


def test_the_step_goes_on_while_another_rank_writes_and_only_then_it_counts(two: Pair) -> None:
    two.save(0, token=1)
    seen: list[tuple[tuple[int, int], ...]] = []
    saver = Saver(
        two.checkpoints,
        check_allowed=lambda: None,
        on_saved=lambda: seen.append(two.checkpoints.retained),
        num_ranks=2,
    )
    live = {"own": torch.tensor(7)}
    weights = {"w": torch.ones(2)}
    saver.submit(at(1), weights=weights, state=live, static=two.static, token=2, monitor_state={})
    live["own"].fill_(9)
    assert not saver.flush(timeout_s=0.3)
    assert not saver.is_due(at(5)) and seen == [] and not (two.root / "step_1").exists()
    other = ShardSaver(two.root, rank=1, num_ranks=2)
    other.submit(2, {"own": torch.tensor(8)})
    assert saver.flush(timeout_s=60)
    assert seen == [((0, 0), (1, 1))]
    state = two.checkpoints.last.read_state()
    assert [int(state.for_rank(rank)["own"]) for rank in (0, 1)] == [7, 8]
    saver.close()
    other.close()


def test_a_folder_that_vanishes_ends_the_wait(two: Pair) -> None:
    two.save(0, token=1)
    saver = Saver(two.checkpoints, check_allowed=lambda: None, on_saved=lambda: None, num_ranks=2)
    saver.submit(at(1), weights={}, state={}, static=two.static, token=2, monitor_state={})
    assert not saver.flush(timeout_s=0.3)
    shutil.rmtree(two.root / f".partial-{2:016x}")
    with pytest.raises(StoreError, match="vanished while a checkpoint was written"):
        saver.flush(timeout_s=60)
    saver.close()


class Scripted(SingleRank):
    """A first rank that says these words."""

    def __init__(self, *orders: RankOrder) -> None:
        self.orders = list(orders)

    def broadcast_from_rank0(self, numbers: Sequence[int]) -> list[int]:
        return [self.orders.pop(0), 0, 0]


class Stateful(Models):
    def __init__(self) -> None:
        pass

    def state_tensors(self) -> dict[str, Tensor]:
        return {"own": torch.tensor(1)}


def test_a_rank_that_cannot_write_its_share_ends_at_the_next_word(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint_saver, "write_shard", full)
    words = [RankOrder.STATE, *[RankOrder.WAIT] * 100_000]
    dataflow: Any = None
    writer = ShareWriter(tmp_path / "weights", model_folder, rank=1)
    with pytest.raises(OSError, match="no space left"):
        worker_loop(PolicyName("policy"), Stateful(), dataflow, Scripted(*words), tmp_path, writer)
