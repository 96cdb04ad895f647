# SPDX-License-Identifier: Apache-2.0
"""Versions and checkpoints of a policy that trains an adapter: the model once, that each time.

The trainer's own loop writes them, and the real puller fetches them over loopback.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from tests.unit.trainer.doubles import POLICY, MemoryDataflow, random_batch, settings
from tests.unit.trainer.test_replay import MemoryRecord
from tests.unit.weights.weight_servers import listening
from torch import Tensor

from penstock.config import LoraConfig, RunConfig
from penstock.dataflow.service.trainers.messages import PublishRequest
from penstock.observe.metrics import MetricsFile
from penstock.trainer.checkpoint import Checkpoints, Cursor
from penstock.trainer.loop import Trainer
from penstock.trainer.lora import attach_adapter, init_adapter
from penstock.trainer.model_folders import load_model, weight_files
from penstock.trainer.ranks.group import SingleRank
from penstock.trainer.replay import RecordedCommit
from penstock.trainer.service import make_checkpoints, replay_step, restore_models
from penstock.trainer.snapshots import Snapshots, unchanged_files
from penstock.trainer.state_shards import StateShard
from penstock.trainer.takeover import take_over
from penstock.trainer.weight_shares import ShareBuffers
from penstock.types import PublishedVersion
from penstock.weights.client import Puller
from penstock.weights.manifest import SnapshotManifest, parse_manifest
from penstock.weights.publish import put_snapshot
from penstock.weights.serving.origin import Origin
from penstock.weights.serving.server import build
from penstock.weights.store import DirectoryStore
from penstock.wire.auth import Audience, Role, Signer
from penstock.wire.client import connect

BATCHES = [random_batch(0, seq=seq) for seq in range(1, 7)]
LORA = {"rank": 2, "alpha": 4, "targets": ["q_proj", "v_proj"]}
FILE = "adapter_model.safetensors"
MODEL = "model.safetensors"


def config(model_folder: Path) -> RunConfig:
    return settings(model_folder, "rloo", lora=LORA, minibatches=2, checkpoint_every=3)


def run(dataflow: MemoryDataflow, run_dir: Path, chosen: RunConfig) -> dict[str, Tensor]:
    """One life of the trainer; all that its next step would depend on."""
    checkpoints = make_checkpoints(chosen, POLICY, run_dir)
    models, checkpoint = restore_models(chosen, POLICY, checkpoints, SingleRank())
    snapshots = Snapshots(run_dir / "weights", POLICY, checkpoint.folder)
    metrics = MetricsFile(run_dir / "metrics.jsonl")
    try:
        Trainer(
            policy=POLICY,
            models=models,
            dataflow=dataflow,
            snapshots=snapshots,
            checkpoints=checkpoints,
            incarnation=take_over(dataflow, POLICY, checkpoints).incarnation,
            metrics=metrics,
            publish_every_version=True,
        ).run()
    finally:
        metrics.close()
        snapshots.close()
    return {**cast(dict[str, Tensor], models.weights()), **models.state_tensors()}


@dataclass(frozen=True, slots=True)
class Straight:
    """A run without an interruption."""

    folder: Path
    state: dict[str, Tensor]
    published: list[PublishRequest]
    record: MemoryRecord


def manifest_of(run_dir: Path, published: PublishRequest) -> SnapshotManifest:
    store = DirectoryStore(run_dir / "weights")
    return parse_manifest(store.read_manifest(published.manifest_digest))


def store_bytes(run_dir: Path) -> int:
    files = (path for path in (run_dir / "weights").rglob("*") if path.is_file())
    return sum(path.stat().st_size for path in files)


def flip_last(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def straight(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Straight:
    folder, dataflow = tmp_path_factory.mktemp("straight"), MemoryDataflow(batches=BATCHES)
    state = run(dataflow, folder, config(model_folder))
    commits = {
        seq: RecordedCommit(number=body.number, skipped=body.skipped, stats=body.stats)
        for seq, body in dataflow.commits
    }
    record = MemoryRecord(batches=BATCHES, commits=commits)
    return Straight(folder, state, dataflow.published, record)


@pytest.mark.parametrize("moment", ["commit 2", "publish 4"])
def test_a_resumed_adapter_has_the_bits_of_one_trained_straight_on(
    model_folder: Path, tmp_path: Path, straight: Straight, moment: str
) -> None:
    dataflow = MemoryDataflow(batches=BATCHES, die_after=moment)
    with pytest.raises(KeyboardInterrupt):
        run(dataflow, tmp_path, config(model_folder))
    dataflow.die_after = ""
    resumed = run(dataflow, tmp_path, config(model_folder))
    assert f"incarnate {3 if moment == 'publish 4' else 0} " in " ".join(dataflow.calls[1:])
    assert resumed.keys() == straight.state.keys()
    assert all(torch.equal(straight.state[name], value) for name, value in resumed.items())
    assert dataflow.published[-1].manifest_digest == straight.published[-1].manifest_digest


def test_a_checkpoint_is_the_model_and_its_adapter_and_the_model_is_held_once(
    model_folder: Path, straight: Straight
) -> None:
    first, last = (straight.folder / "checkpoints" / name for name in ("step_3", "step_6"))
    assert (first / MODEL).samefile(last / MODEL)
    assert (last / MODEL).read_bytes() == (model_folder / MODEL).read_bytes()
    assert not (first / FILE).samefile(last / FILE)
    saved = load_file(last / FILE)
    assert all(torch.equal(straight.state[name], value) for name, value in saved.items())
    model = load_model(last)
    attach_adapter(model, last, LoraConfig.model_validate(LORA))


def test_a_damaged_file_of_a_checkpoint_is_found(model_folder: Path, tmp_path: Path) -> None:
    """A linked model, too, although its digest was taken only once."""
    run(MemoryDataflow(batches=BATCHES[:3]), tmp_path, config(model_folder))
    checkpoints = make_checkpoints(config(model_folder), POLICY, tmp_path)
    for name, whole in ((FILE, [0]), (MODEL, [])):
        flip_last(tmp_path / "checkpoints" / "step_3" / name)
        assert [found.cursor.number for found in checkpoints.scan()[0]] == whole


def test_a_model_in_several_files_keeps_them(model_folder: Path, tmp_path: Path) -> None:
    """And what a disk did to one of them is found in every checkpoint, also a later one."""
    folder = tmp_path / "sharded"
    shutil.copytree(model_folder, folder)
    (folder / MODEL).unlink()
    load_model(model_folder).save_pretrained(folder, max_shard_size="200KB")
    init_adapter(folder, LoraConfig.model_validate(LORA), seed=0)
    parts = {path.name for path in weight_files(folder)}
    assert len(parts) > 2 and f"{MODEL}.index.json" in parts
    checkpoints = Checkpoints(tmp_path / "checkpoints", policy=POLICY, every=1)

    def save(number: int) -> Path:
        cursor = Cursor(number=number, seq=number, incarnation=0)
        weights, static = ShareBuffers().copy(load_file(folder / FILE)), unchanged_files(folder)
        return checkpoints.save(
            cursor, weights=weights, state=StateShard(tensors={}), static=static
        ).folder

    saved = save(0)
    assert parts | {FILE} <= {path.name for path in saved.iterdir()}
    assert [found.folder for found in checkpoints.scan()[0]] == [saved]
    attach_adapter(load_model(saved), saved, LoraConfig.model_validate(LORA))
    flip_last(saved / max(parts - {f"{MODEL}.index.json"}))
    save(1)
    assert not checkpoints.scan()[0]


def test_a_policy_that_begins_with_an_adapter_goes_on_with_it(
    model_folder: Path, straight: Straight, tmp_path: Path
) -> None:
    """Its reference is still the model without any."""
    init = straight.folder / "checkpoints" / "step_6"
    chosen = config(init)
    models, checkpoint = restore_models(
        chosen, POLICY, make_checkpoints(chosen, POLICY, tmp_path), SingleRank()
    )
    held = cast(dict[str, Tensor], models.weights())
    assert all(torch.equal(straight.state[name], value) for name, value in held.items())
    assert (checkpoint.folder / MODEL).read_bytes() == (model_folder / MODEL).read_bytes()


def test_a_step_of_an_adapter_is_computed_again_bit_for_bit(
    model_folder: Path, straight: Straight, tmp_path: Path
) -> None:
    done = replay_step(
        config(model_folder),
        POLICY,
        straight.record,
        number=5,
        run_dir=straight.folder,
        scratch=tmp_path,
    )
    assert done is not None and (done.started_at.number, done.differences) == (3, [])
    assert done.stored.manifest_digest == straight.published[5].manifest_digest


# --- versions -------------------------------------------------------------------------------------


def test_a_version_adds_its_adapter_to_the_store_and_reads_the_model_no_more(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    put_blob = DirectoryStore.put_blob

    def put(store: DirectoryStore, source: Any, name: str) -> Any:
        read.append(name)
        return put_blob(store, source, name)

    monkeypatch.setattr(DirectoryStore, "put_blob", put)
    sizes: list[int] = []

    class Sized(MemoryDataflow):
        def publish(self, policy: Any, body: PublishRequest) -> None:
            super().publish(policy, body)
            sizes.append(store_bytes(tmp_path))

    dataflow = Sized(batches=BATCHES[:3])
    run(dataflow, tmp_path, config(model_folder))
    full = (model_folder / MODEL).stat().st_size
    added = [after - before for before, after in pairwise(sizes)]
    print("bytes added per version, of those of the model:", [round(n / full, 4) for n in added])
    assert len(added) == 3 and max(added) <= 0.05 * full, "manifest and delta counted"
    assert read.count(MODEL) == 1, "not even digested again"
    manifests = [manifest_of(tmp_path, published) for published in dataflow.published]
    blobs = [{file.name: file.blob for file in one.files} for one in manifests]
    assert len({one[MODEL] for one in blobs}) == 1
    assert len({one[FILE] for one in blobs}) == 4
    plain = put_snapshot(tmp_path / "other", model_folder, policy=POLICY, number=0)
    assert {one.base for one in manifests} == {plain.weights_digest}


def test_an_adapter_is_published_in_float32_whatever_its_model_is(
    model_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "half"
    shutil.copytree(model_folder, folder)
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(facts | {"dtype": "bfloat16"}))
    init_adapter(folder, LoraConfig.model_validate(LORA), seed=0)
    snapshots = Snapshots(tmp_path / "weights", POLICY, folder)
    tensors = load_file(folder / FILE)
    copied = snapshots.copy(tensors)
    snapshots.close()
    assert all(torch.equal(copied.tensors[name], value) for name, value in tensors.items())
    assert {tensor.dtype for tensor in copied.tensors.values()} == {torch.float32}


class Counted:
    """An app, and the bytes of all its answers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.num_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counting(message: Message) -> None:
            self.num_bytes += len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, counting)


async def test_a_node_with_the_version_before_fetches_the_adapter_alone(
    model_folder: Path, tmp_path: Path
) -> None:
    dataflow = MemoryDataflow(batches=BATCHES[:2])
    run(dataflow, tmp_path, config(model_folder))
    signer = Signer.create(tmp_path / "keys", "run")
    token = signer.mint(Role.ROLLOUT, [Audience.WEIGHTS], ttl_s=3600)
    origin = Origin(DirectoryStore(tmp_path / "weights"))
    app = Counted(build(origin, signer.verifier(Audience.WEIGHTS)))
    puller, moved, folder = Puller(tmp_path / "cache"), list[int](), tmp_path
    async with listening(cast(Starlette, app)) as url, connect(url, token) as caller:
        for published in dataflow.published:
            wanted = PublishedVersion(
                policy=POLICY,
                incarnation=1,
                number=published.number,
                manifest_digest=published.manifest_digest,
            )
            before = app.num_bytes
            folder = await puller.pull([caller], wanted)
            moved.append(app.num_bytes - before)
            assert (folder / MODEL).read_bytes() == (model_folder / MODEL).read_bytes()
    full = (model_folder / MODEL).stat().st_size
    print("bytes moved per version, of those of the model:", [round(n / full, 4) for n in moved])
    assert moved[0] > full, "with everything"
    assert max(moved[1:]) <= 0.05 * full, "manifest and requests counted"
    newest = load_file(folder / FILE)
    saved = load_file(tmp_path / "checkpoints" / "step_2" / FILE)
    assert all(torch.equal(newest[name], value) for name, value in saved.items())
    assert os.stat(folder / MODEL).st_nlink > 2, "one file in the cache for all versions"
