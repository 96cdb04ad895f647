# SPDX-License-Identifier: Apache-2.0
"""A bucket mirrors the store of a run, and a relay over it serves nodes while the weight server is
down."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
from tests.contract.test_weights_object_store import files, names
from tests.unit.weights.version_history import WEIGHTS, VersionHistory
from tests.unit.weights.weight_servers import POLICY

from penstock.config import demo_config
from penstock.errors import Unreachable
from penstock.fleet.ports import free_port
from penstock.fleet.run_folder import RunFolder
from penstock.types import PublishedVersion
from penstock.weights import retention
from penstock.weights.client import Puller
from penstock.weights.publish import delete_unreferenced
from penstock.weights.serving.mirror import ObjectMirror
from penstock.weights.serving.mirror_sync import MirrorSync
from penstock.weights.store import DirectoryStore
from penstock.wire.auth import Role, Signer
from penstock.wire.client import connect

ROOT = Path(__file__).parents[2]
READY_S = 60.0
_numbers = itertools.count()


@pytest.fixture
def url(s3_url: str) -> str:
    """An empty prefix of a bucket."""
    return f"{s3_url}/mirror-{next(_numbers)}"


@pytest.fixture
def made(tmp_path: Path) -> VersionHistory:
    history = VersionHistory(tmp_path / "run" / "weights")
    history.add_versions(3)
    return history


def test_the_bucket_follows_additions_and_deletions(
    tmp_path: Path, made: VersionHistory, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "run" / "weights"
    mirror_sync = MirrorSync(made.store, ObjectMirror(url))
    assert mirror_sync.sync_once()
    assert names(url) == files(root)
    made.add_versions(2)
    monkeypatch.setattr(retention, "GRACE_S", 0.0)
    in_use = [made.digest(number) for number in (1, 2, 3, 4)]
    delete_unreferenced(root, in_use, in_use[-2:], anchor_every=25)
    assert made.whole() == [1, 3, 4], "the second is kept as a delta"
    assert mirror_sync.sync_once()
    assert set(ObjectMirror(url).manifests()) == set(in_use)
    assert names(url) == files(root)


def test_a_restarted_sync_resumes_from_the_bucket(made: VersionHistory, url: str) -> None:
    MirrorSync(made.store, ObjectMirror(url)).sync_once()
    mirror = ObjectMirror(url)
    sent = [mirror.upload(made.store, digest) for digest in made.store.manifests()]
    assert sent == [0, 0, 0]
    made.add_versions()
    assert MirrorSync(made.store, ObjectMirror(url)).sync_once()
    assert made.digest(3) in set(mirror.manifests())


def test_versions_of_another_store_are_kept(
    tmp_path: Path, made: VersionHistory, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first machine is lost; a run restarts elsewhere with the same mirror."""
    MirrorSync(made.store, ObjectMirror(url)).sync_once()
    before = names(url)
    anew = VersionHistory(tmp_path / "anew" / "weights", policy="other")
    mirror_sync = MirrorSync(anew.store, ObjectMirror(url))
    assert mirror_sync.sync_once()
    assert names(url) == before
    anew.add_versions(4)
    assert mirror_sync.sync_once()
    monkeypatch.setattr(retention, "GRACE_S", 0.0)
    kept = [anew.digest(number) for number in (2, 3)]
    delete_unreferenced(tmp_path / "anew" / "weights", kept, kept, anchor_every=25)
    assert mirror_sync.sync_once()
    assert names(url) == before | files(tmp_path / "anew" / "weights")


def test_the_newest_version_is_uploaded_first(
    made: VersionHistory, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def upload(mirror: ObjectMirror, store: DirectoryStore, digest: str) -> int:
        order.append(digest)
        return 0

    monkeypatch.setattr(ObjectMirror, "upload", upload)
    MirrorSync(made.store, ObjectMirror(url)).sync_once()
    assert order == [made.digest(number) for number in (2, 1, 0)]


def test_a_version_damaged_on_disk_does_not_block_others(made: VersionHistory, url: str) -> None:
    path = made.store.blob_path(made.file(2).blob)
    path.chmod(0o644)
    path.write_bytes(bytes(path.stat().st_size))
    assert not MirrorSync(made.store, ObjectMirror(url)).sync_once()
    assert set(ObjectMirror(url).manifests()) == {made.digest(0), made.digest(1)}


# --- processes --------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path, url: str) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    config = demo_config(0)
    weights = config.weights.model_copy(update={"mirror": url})
    folder.path.mkdir(exist_ok=True)
    folder.write_config(config.model_copy(update={"weights": weights}))
    folder.allocate_endpoints(tmp_path, ())
    Signer.create(folder.keys, config.name)
    return folder


@contextmanager
def process(*words: str) -> Generator[None]:
    """`penstock` with these arguments; killed at the end, by pid."""
    started = subprocess.Popen(
        [sys.executable, "-m", "penstock.cli.main", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    try:
        yield
    finally:
        started.kill()
        started.wait()


async def ready(address: str) -> None:
    give_up_at = time.monotonic() + READY_S
    async with httpx2.AsyncClient(timeout=60) as http:
        while True:
            try:
                assert (await http.get(f"{address}/healthz")).status_code == 200
                return
            except httpx2.TransportError:
                assert time.monotonic() < give_up_at, f"{address} does not answer"
                await asyncio.sleep(0.05)


async def test_nodes_live_from_a_relay_over_the_mirror(
    tmp_path: Path, run: RunFolder, made: VersionHistory, url: str
) -> None:
    newest = made.digest(2)
    with process("weights", "serve", "--run-dir", str(run.path)):
        give_up_at = time.monotonic() + READY_S
        while len(set(ObjectMirror(url).manifests())) < 3:
            assert time.monotonic() < give_up_at, "nothing is mirrored"
            await asyncio.sleep(0.1)
    name, address = demo_config(0).name, f"http://127.0.0.1:{free_port()}"
    wanted = PublishedVersion(policy=POLICY, incarnation=1, number=2, manifest_digest=newest)
    words = ("relay", url, f"--public-key={run.public_key()}", "--port", address.rpartition(":")[2])
    (tmp_path / "token").write_text(run.token(name, Role.RELAY, ttl_s=600))
    with process(*words, "--token-file", str(tmp_path / "token")):
        await ready(address)
        shown = run.relay_token(name, Role.ROLLOUT, ttl_s=600)
        async with connect(address, shown) as near:
            folder = await Puller(tmp_path / "cache").pull([near], wanted)
    blob = made.store.blob_path(made.file(2).blob)
    assert (folder / WEIGHTS).read_bytes() == blob.read_bytes()
    with pytest.raises(Unreachable):
        async with connect(run.endpoints().weights, shown) as weight_server:
            await weight_server.request("GET", "/healthz", deadline_s=0.5, timeout_s=0.5)
