# SPDX-License-Identifier: Apache-2.0
"""`penstock fork` from a checkpoint and from weights only: the same run but for the optimizer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import cast

import pytest
import torch
from tests.unit.cli.test_commands import run_main
from tests.unit.trainer.doubles import POLICY, random_batch, settings
from torch import Tensor

from penstock.config import RunConfig, identity, run_dir
from penstock.dataflow.ledger.tables import open_tables
from penstock.dataflow.records import CommitRecord, IncarnationRecord, VersionRecord
from penstock.fleet.run_folder import RunFolder
from penstock.trainer.batches import assemble
from penstock.trainer.checkpoint import Checkpoints, Cursor
from penstock.trainer.learner import Stats
from penstock.trainer.model_folders import init_model
from penstock.trainer.models import Models
from penstock.trainer.ranks.group import SingleRank
from penstock.trainer.service import make_checkpoints, restore_models
from penstock.trainer.snapshots import Snapshots
from penstock.trainer.state_shards import StateShard
from penstock.trainer.weight_shares import ShareBuffers
from penstock.weights.publish import StoredVersion

NUM_STEPS = 2


def train(models: Models, seq: int) -> Stats:
    sealed = random_batch(0, seq=seq)
    return models.step(assemble(sealed.manifest, sealed.rows, POLICY, models.vocab_size))


def restored(config: RunConfig, folder: RunFolder) -> tuple[Models, Checkpoints]:
    checkpoints = make_checkpoints(config, POLICY, folder.path)
    return restore_models(config, POLICY, checkpoints, SingleRank())[0], checkpoints


@pytest.fixture
def parent(tmp_path: Path) -> RunFolder:
    """A run with a reference, trained to number 2; versions 0 to 2, a checkpoint of the last."""
    init_model("builtin:tiny-qwen3", tmp_path / "model", seed=0)
    plain = settings(tmp_path / "model", "grpo")
    config = plain.model_copy(
        update={"algorithm": plain.algorithm.model_copy(update={"beta": 0.1})}
    )
    folder = RunFolder(tmp_path / "built")
    folder.write_config(config)
    folder.allocate_endpoints(tmp_path, ())
    models, checkpoints = restored(config, folder)
    snapshots = Snapshots(folder.weights, POLICY, checkpoints.last.folder)
    versions = [snapshots.put(snapshots.copy(models.weights()), 0)]
    for number in range(1, NUM_STEPS + 1):
        assert train(models, number).skipped is None
        versions.append(snapshots.put(snapshots.copy(models.weights()), number))
    checkpoints.save(
        Cursor(number=NUM_STEPS, seq=NUM_STEPS, incarnation=1),
        weights=ShareBuffers().copy(models.weights()),
        state=StateShard(tensors=models.state_tensors()),
        static=snapshots.static,
    )
    snapshots.close()
    write_ledger(folder.path / "ledger", versions)
    return folder


def write_ledger(folder: Path, versions: list[StoredVersion]) -> None:
    folder.mkdir()
    tables = open_tables(folder)
    life = IncarnationRecord(policy=POLICY, incarnation=1, number=0, seq=0, request_id="r", at=0.0)
    commits = [
        CommitRecord(
            consumer=POLICY, seq=n, incarnation=1, number=n, skipped="", stats="{}", at=0.0
        )
        for n in range(1, len(versions))
    ]
    published = [
        VersionRecord(
            policy=POLICY,
            incarnation=1,
            number=number,
            manifest_digest=stored.manifest_digest,
            weights_digest=stored.weights_digest,
            at=0.0,
        )
        for number, stored in enumerate(versions)
    ]
    tables.commit([life, *commits, *published])
    tables.close()


def test_a_fork_from_weights_only_has_the_same_reference_as_one_from_a_checkpoint(
    parent: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("fork", str(parent.path), "--at", str(NUM_STEPS))
    code, _, err = run_main(capsys, *words, "--name", "whole")
    assert code == 0 and "weights only" not in err
    kept = parent.checkpoints / f"step_{NUM_STEPS}"
    shutil.rmtree(kept)
    code, _, err = run_main(capsys, *words, "--name", "2")
    assert code == 0 and "policy: starting from weights only" in err
    whole, bare = (RunFolder(parent.path.parent / name) for name in ("whole", "2"))
    configs = [folder.read_config() for folder in (whole, bare)]
    assert identity(configs[0]) == {**identity(configs[1]), "name": identity(configs[0])["name"]}
    assert sorted(path.name for path in bare.path.iterdir()) == sorted(
        path.name for path in whole.path.iterdir()
    ), "nothing but number 0 and what tells about the run"
    first: list[dict[str, float]] = []
    weights: list[dict[str, Tensor]] = []
    for config, folder in zip(configs, (whole, bare), strict=True):
        models, checkpoints = restored(config, folder)
        assert checkpoints.last.cursor == Cursor(number=0, seq=0, incarnation=0)
        held = cast(dict[str, Tensor], models.weights())
        weights.append({name: value.clone() for name, value in held.items()})
        stats = train(models, NUM_STEPS + 1)
        first.append({name: stats.values[name] for name in ("loss", "grad_norm", "reference_kl")})
    assert all(torch.equal(weights[1][name], found) for name, found in weights[0].items())
    assert first[0] == first[1] and first[0]["reference_kl"] != 0


@pytest.mark.parametrize("name", ["out/x", "../x", ".x", ""])
def test_an_invalid_name_is_rejected_before_anything_is_created(
    parent: RunFolder, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    before = sorted(parent.path.parent.rglob("*"))
    code, _, err = run_main(capsys, "fork", str(parent.path), "--at", "2", f"--name={name}")
    assert code == 1 and "names the run folder" in err, err
    assert sorted(parent.path.parent.rglob("*")) == before


def test_a_damaged_checkpoint_is_named_in_the_message(
    parent: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    path = parent.checkpoints / f"step_{NUM_STEPS}" / "optimizer.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    fork = ("fork", str(parent.path), "--at")
    code, _, err = run_main(capsys, *fork, str(NUM_STEPS))
    assert code == 0 and f"fresh optimizer (checkpoint of step {NUM_STEPS} is unusable" in err
    assert "optimizer.safetensors is damaged" in err
    code, _, err = run_main(capsys, *fork, "9")
    assert code == 1 and f"step_{NUM_STEPS}: optimizer.safetensors is damaged" in err


@pytest.mark.parametrize("where", ["exp #1", "lr: 1e-3", "${HOME}x"])
def test_a_fork_is_created_next_to_its_parent_whatever_the_folder_is_called(
    parent: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    moved = RunFolder((tmp_path / where).absolute() / parent.path.name)
    moved.path.parent.mkdir()
    parent.path.rename(moved.path)
    code, _, err = run_main(capsys, "fork", str(moved.path), "--at", str(NUM_STEPS), "--name", "f")
    assert code == 0, err
    made = RunFolder(moved.path.parent / "f")
    assert run_dir(made.read_config()) == made.path
    words = ("fork", str(moved.path), "output_dir=elsewhere", "--at", str(NUM_STEPS))
    code, _, err = run_main(capsys, *words)
    assert code == 1 and "next to its parent" in err
