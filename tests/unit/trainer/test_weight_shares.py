# SPDX-License-Identifier: Apache-2.0
"""Shares of a weights file: what several ranks write is the file that one process writes."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.unit.trainer.doubles import POLICY
from torch import Tensor

import penstock
from penstock.trainer import background_worker, weight_shares
from penstock.trainer.model_folders import WEIGHTS
from penstock.trainer.publisher import Publisher, ShareWriter
from penstock.trainer.ranks.regions import TensorRegion
from penstock.trainer.snapshots import Snapshots
from penstock.trainer.weight_shares import ShareBuffers, WeightShare, write_share
from penstock.weights import publish
from penstock.weights.manifest import parse_manifest
from penstock.weights.publish import StoredVersion, incoming_path
from penstock.weights.store import DirectoryStore

SOURCE = str(Path(penstock.__file__).parents[1])
SHAPES: dict[str, tuple[int, ...]] = {
    "cut.rows": (5, 6),
    "cut.columns": (3, 8),
    "cut.both": (4, 3, 6),
    "vector": (7,),
    "number": (),
}


def whole(seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


def regions(shape: tuple[int, ...], cuts: tuple[int, ...]) -> list[TensorRegion]:
    """A tensor cut into so many pieces in each dimension; the last pieces may be smaller."""
    spans: list[list[tuple[int, int]]] = []
    for size, cut in zip(shape, cuts, strict=True):
        each = -(-size // cut)
        spans.append([(at, min(each, size - at)) for at in range(0, size, each)])
    return [
        TensorRegion(
            offset=tuple(at for at, _ in found),
            shape=tuple(size for _, size in found),
            full_shape=shape,
        )
        for found in itertools.product(*spans)
    ]


CUTS = {"cut.rows": (2, 1), "cut.columns": (1, 2), "cut.both": (2, 1, 2), "vector": (4,)}


def shares(weights: dict[str, Tensor], num_ranks: int) -> list[WeightShare]:
    """Regions dealt to ranks; the ones of a tensor that is not cut are rank 0's."""
    layout = ShareBuffers().copy(weights).layout
    dealt: list[dict[str, TensorRegion]] = [{} for _ in range(num_ranks)]
    for name, tensor in weights.items():
        cuts = CUTS.get(name, (1,) * tensor.ndim)
        found = regions(tuple(tensor.shape), cuts)
        for index, region in enumerate(found[:num_ranks]):
            dealt[index][name] = region
    return [
        WeightShare(
            layout=layout,
            regions=own,
            tensors={
                name: weights[name][
                    region.slices_in(TensorRegion.full(region.full_shape))
                ].contiguous()
                for name, region in own.items()
            },
        )
        for own in dealt
    ]


def expected_bytes(weights: dict[str, Tensor], folder: Path) -> bytes:
    save_file(weights, folder / "expected", metadata={"format": "pt"})
    return (folder / "expected").read_bytes()


def test_the_shares_of_all_ranks_are_the_file_of_one_process(tmp_path: Path) -> None:
    weights = whole(0)
    first, *others = shares(weights, 4)
    path = tmp_path / "file"
    threads = [
        threading.Thread(
            target=weight_shares.write_share_of_rank,
            args=(path, share),
            kwargs={"rank": rank, "is_cancelled": lambda: False},
        )
        for rank, share in enumerate(others, start=1)
    ]
    for thread in threads:
        thread.start()
    write_share(path, first, num_ranks=4)
    for thread in threads:
        thread.join()
    assert path.read_bytes() == expected_bytes(weights, tmp_path)
    assert {found.name for found in tmp_path.iterdir()} == {"file", "expected"}, "no receipts"


def test_one_rank_writes_what_safetensors_writes(tmp_path: Path) -> None:
    weights = {**whole(1), "count": torch.tensor([1, 2, 3])}
    write_share(tmp_path / "file", ShareBuffers().copy(weights))
    assert (tmp_path / "file").read_bytes() == expected_bytes(weights, tmp_path)
    write_share(tmp_path / "half", ShareBuffers(torch.bfloat16).copy(weights))
    found = load_file(tmp_path / "half")
    assert found["count"].dtype == torch.int64
    assert all(found[name].equal(weights[name].bfloat16()) for name in SHAPES)


def test_memory_is_used_again_only_after_its_release() -> None:
    buffers = ShareBuffers(torch.bfloat16)
    first, second = buffers.copy(whole(0)), buffers.copy(whole(1))
    assert first.tensors["vector"].data_ptr() != second.tensors["vector"].data_ptr()
    assert first.tensors["vector"].equal(whole(0)["vector"].bfloat16())
    buffers.release(first)
    third = buffers.copy(whole(2))
    assert third.tensors["vector"].data_ptr() == first.tensors["vector"].data_ptr()


class TwoRanks:
    """Rank 0's publisher, and a rank whose weights are not sharded: it writes an empty share."""

    def __init__(self, root: Path, model_folder: Path) -> None:
        self.store = DirectoryStore(root / "weights")
        self.root = root / "weights"
        self.announced: list[tuple[int, StoredVersion]] = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.asked = threading.Event()
        self.snapshots = Snapshots(self.root, POLICY, model_folder)
        self.publisher = Publisher(self.snapshots, self.announce, lambda: ([], []), num_ranks=2)
        self.writer = ShareWriter(self.root, model_folder, rank=1)

    def announce(self, number: int, stored: StoredVersion) -> None:
        self.asked.set()
        assert self.may_answer.wait(60)
        self.announced.append((number, stored))

    def publish(self, number: int, *, by_all: bool = True) -> None:
        token = number + 1
        dropped = self.publisher.drop_waiting()
        if by_all:
            self.writer.submit(token, {}, dropped=dropped)
        self.publisher.submit(whole(number), number, token=token)

    def weights(self, stored: StoredVersion) -> Path:
        manifest = parse_manifest(self.store.read_manifest(stored.manifest_digest))
        return self.store.blob_path(next(f.blob for f in manifest.files if f.name == WEIGHTS))

    def close(self) -> None:
        self.may_answer.set()
        self.writer.close()
        self.publisher.close()
        self.snapshots.close()


@pytest.fixture
def two(tmp_path: Path, model_folder: Path):
    made = TwoRanks(tmp_path, model_folder)
    yield made
    made.close()


def test_a_version_is_announced_only_when_every_rank_has_written(two: TwoRanks) -> None:
    two.publish(0, by_all=False)
    assert weight_shares.await_file(incoming_path(two.root, 1), lambda: False)
    assert not two.publisher.flush(timeout_s=0.2) and two.announced == []
    assert not list(two.store.manifests()) and not list(two.store.blobs())
    two.writer.submit(1, {})
    assert two.publisher.flush(timeout_s=60)
    assert [number for number, _ in two.announced] == [0]
    assert not list((two.root / "incoming").iterdir())


def test_all_ranks_drop_the_same_versions(two: TwoRanks) -> None:
    two.may_answer.clear()
    two.publish(0)
    assert two.asked.wait(60)
    for number in range(1, 5):
        two.publish(number)
    two.may_answer.set()
    assert two.publisher.flush(timeout_s=60) and two.writer.flush(timeout_s=60)
    assert [number for number, _ in two.announced] == [0, 4]
    assert load_file(two.weights(two.announced[1][1]))["vector"].equal(whole(4)["vector"])
    assert not list((two.root / "incoming").iterdir())


def test_a_checkpoint_gets_the_file_of_the_version(two: TwoRanks) -> None:
    two.may_answer.clear()
    two.publish(0)
    assert two.asked.wait(60)
    two.publish(1)
    early, late = two.publisher.keep(1), two.publisher.is_keeping
    assert late and not early.done()
    two.may_answer.set()
    assert two.publisher.flush(timeout_s=60) and not two.publisher.is_keeping
    again = two.publisher.keep(1)
    found = two.weights(two.announced[1][1])
    assert again.result(0).path.samefile(found)
    assert early.result(0).digest == again.result(0).digest == found.name


def test_a_version_is_stored_with_its_delta_in_one_pass(
    two: TwoRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a second pass")

    two.publish(0)
    assert two.publisher.flush(timeout_s=60)
    monkeypatch.setattr(publish, "scan", forbidden)
    monkeypatch.setattr(publish, "file_digest", forbidden)
    two.publish(1)
    assert two.publisher.flush(timeout_s=60)
    first, second = (two.weights(stored).name for _, stored in two.announced)
    assert [entry.base for entry in two.store.deltas_to(second)] == [first]


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
import penstock
from penstock.trainer import background_worker, weight_shares
left = int(sys.argv[2])
real = os.pwrite
def deadly(*args):
    global left
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    return real(*args)
os.pwrite = deadly
weights = {"a": torch.ones(4, 4), "b": torch.ones(4, 4)}
share = weight_shares.ShareBuffers().copy(weights)
weight_shares.write_share_of_rank(Path(sys.argv[1]), share, rank=1, is_cancelled=lambda: False)
"""


def test_a_rank_killed_while_it_writes_its_share_leaves_no_version(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_worker, "CLOSE_TIMEOUT_S", 0.05)
    two = TwoRanks(tmp_path, model_folder)
    path = incoming_path(two.root, 1)
    two.publisher.submit({"a": torch.zeros(4, 4), "b": torch.zeros(4, 4)}, 0, token=1)
    command = [sys.executable, "-c", KILLED, str(path), "1"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": SOURCE}, check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.exists(), "rank 0 still waits; its supervisor ends it"
    assert not two.publisher.flush(timeout_s=0.1) and two.announced == []
    assert not list(two.store.manifests()) and not list(two.store.blobs())
    path.with_name(f"{path.name}.written-by-rank-1").touch()  # ends the thread of this test
    assert two.publisher.flush(timeout_s=60)
    two.close()
