# SPDX-License-Identifier: Apache-2.0
"""No name that a caller or a weight server chooses leads out of the folder that it belongs to."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from starlette.requests import Request
from tests.attacks.in_process import dataflow_door, weights_door
from tests.contract.test_weights_deltas import versions
from tests.unit.weights.weight_servers import running_weight_server, tampering_server

from penstock.bounds import is_digest, is_safe_name
from penstock.config import demo_config
from penstock.dataflow.ledger.blobs import BlobStore
from penstock.dataflow.sources.harbor import HarborSpec, read_tasks
from penstock.errors import BadRequest, ConfigError, WeightsError
from penstock.fleet.run_folder import RunFolder
from penstock.runs.join import local_node_options, node_state_dir
from penstock.trainer.checkpoint_manifest import (
    CheckpointManifest,
    Cursor,
    UnusableCheckpoint,
    read_checkpoint_manifest,
    write_checkpoint_manifest,
)
from penstock.types import PublishedVersion
from penstock.weights.client import Puller
from penstock.weights.deltas.chain import DeltaChain, DeltaEntry, is_valid_chain
from penstock.weights.manifest import FileEntry
from penstock.weights.pulling.cache import BlobCache
from penstock.weights.store import DirectoryStore
from penstock.wire.auth import Role
from penstock.wire.codec import decode, encode

SECRET = b"the owner's private key"
DIGEST = "0" * 64
NAMES = ("etc/passwd", "keys/signing.key", "x", "secret", "..", ".ssh/id_ed25519", "con", "~/x")
CLIMBS = (
    "../{}",
    "../../../../../../{}",
    "/{}",
    "//{}",
    "./../{}",
    "a/../../{}",
    "..\\{}",
    "..%2f{}",
    "%2e%2e/{}",
    "%2e%2e%2f{}",
    "..%252f{}",
    "..;/{}",
    "....//{}",
    "\uff0e\uff0e/{}",
    "\u2025/{}",
    "..\u2215{}",
    "{}\0.json",
    "{}\n",
    " {}",
    "file:///{}",
    ".{}",
    "{}/",
    "{}%00",
    "\u202e{}",
)
LONG = ("a" * 129, "a" * 4096, "0" * 63, "0" * 65, "0" * 64 + "\n", "A" * 64, "g" * 64, "")
VECTORS = tuple(climb.format(name) for climb in CLIMBS for name in NAMES) + LONG


def fingerprint(folder: Path) -> str:
    """Names, kinds and contents of everything below a folder."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        found.update(str(path).encode(errors="surrogateescape"))
        found.update(path.read_bytes() if path.is_file() else b"")
    return found.hexdigest()


def files(folder: Path) -> set[Path]:
    return {*folder.rglob("*")}


def test_there_are_200_vectors() -> None:
    assert len(set(VECTORS)) >= 200


# --- finding 1: a hostile relay -------------------------------------------------------------------


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    path = home / "id_ed25519"
    path.write_bytes(SECRET)
    return path


async def pull_through(tmp_path: Path, blob: str, data: bytes) -> Path:
    """The node has version 0; a relay answers version 1 with a delta that it names itself."""
    first, second = versions(tmp_path, 2)

    async def tamper(request: Request, answer: bytes) -> bytes:
        if request.path_params["kind"] != "deltas":
            return answer
        chain = decode(answer, DeltaChain)
        steps = [
            {"base": s.base, "target": s.target, "blob": blob, "bytes": len(data)}
            for s in chain.steps
        ]
        return encode({"steps": steps})

    puller = Puller(tmp_path / "cache", transfer="delta")
    async with (
        running_weight_server(tmp_path) as origin,
        tampering_server(tmp_path / "store", tamper) as relay,
    ):
        await puller.pull([origin], first)
        return await puller.pull([relay, origin], second)


@pytest.mark.finding(1)
async def test_a_relay_cannot_delete_a_file_of_the_node(tmp_path: Path, victim: Path) -> None:
    """A relay that names an absolute path as a delta's blob: the file stays, the version comes."""
    before = fingerprint(victim.parent)
    folder = await pull_through(tmp_path, str(victim), b"ATTACKER!!")
    assert fingerprint(victim.parent) == before
    assert folder / "model.safetensors" in files(folder)


@pytest.mark.finding(1)
async def test_a_relay_cannot_leave_bytes_in_a_folder_of_the_node(
    tmp_path: Path, victim: Path
) -> None:
    """A relay that names a new file by a relative path: nothing appears outside of the cache."""
    await pull_through(tmp_path, "../../home/bashrc", b"echo owned" * 100)
    assert files(victim.parent) == {victim}


@pytest.mark.finding(1)
@pytest.mark.parametrize("field", ["base", "target", "blob"])
def test_every_name_of_a_delta_is_a_digest(field: str) -> None:
    """All 200 names are refused in each field of a step, whoever asks: decoder and chain."""
    sound: dict[str, Any] = {"base": "0" * 64, "target": "1" * 64, "blob": "2" * 64, "bytes": 10}
    assert decode(encode({"steps": [sound]}), DeltaChain).steps[0].blob == "2" * 64
    for name in VECTORS:
        with pytest.raises(BadRequest):
            decode(encode({"steps": [sound | {field: name}]}), DeltaChain)
        changed: dict[str, Any] = sound | {field: name}
        step = DeltaEntry(**changed)
        assert not is_valid_chain(step.target, [step], {step.base}, below=1000), name


@pytest.mark.finding(1)
def test_the_cache_of_blobs_asserts_digests(tmp_path: Path, victim: Path) -> None:
    """Whatever reaches the cache: it checks, renames and links digests only."""
    cache = BlobCache(tmp_path / "cache")
    before = fingerprint(victim.parent)
    for name in (str(victim), *VECTORS):
        with pytest.raises(WeightsError, match="not a BLAKE3 digest"):
            cache.check(FileEntry(name="x.json", blob=name, bytes=1))
    assert fingerprint(victim.parent) == before


@pytest.mark.finding(1)
async def test_a_manifest_named_by_a_path_is_not_fetched(tmp_path: Path, victim: Path) -> None:
    """A version whose manifest is a path is refused before any request."""
    target = PublishedVersion(
        policy=versions(tmp_path, 1)[0].policy,
        incarnation=1,
        number=0,
        manifest_digest=f"../../{victim}",
    )
    async with running_weight_server(tmp_path) as origin:
        with pytest.raises(WeightsError, match="not a BLAKE3 digest"):
            await Puller(tmp_path / "cache").pull([origin], target)


async def test_a_link_planted_in_the_cache_is_not_followed(tmp_path: Path, victim: Path) -> None:
    """User code of the node's uid plants links where blobs arrive: their targets stay."""
    (version,) = versions(tmp_path, 1)
    plant_links(tmp_path, victim)
    before = fingerprint(victim.parent)
    async with running_weight_server(tmp_path) as origin:
        with pytest.raises(WeightsError):
            await Puller(tmp_path / "cache").pull([origin], version)
    assert fingerprint(victim.parent) == before


def plant_links(tmp_path: Path, target: Path) -> None:
    """Where each blob of the store will arrive in a node's cache."""
    blobs = tmp_path / "cache" / "blobs"
    blobs.mkdir(parents=True)
    for path in (tmp_path / "store" / "blobs").iterdir():
        (blobs / f"{path.name}.partial").symlink_to(target)


# --- stores ---------------------------------------------------------------------------------------


def test_the_store_of_weights_opens_digests_only(tmp_path: Path) -> None:
    """200 names at each way into the store of weights: a ValueError, and no file outside."""
    store = DirectoryStore(tmp_path / "store")
    store.prepare()
    before = fingerprint(tmp_path)
    for name in VECTORS:
        for attack in (store.blob_path, store.open_blob, store.read_manifest, store.has_blob):
            with pytest.raises(ValueError, match="not a BLAKE3 digest"):
                attack(name)
        for delete in (store.delete_blob, store.delete_manifest, store.mark_read):
            with pytest.raises(ValueError, match="not a BLAKE3 digest"):
                delete(name)
    assert fingerprint(tmp_path) == before


def test_the_store_of_blobs_opens_digests_only(tmp_path: Path) -> None:
    """200 names at the ledger's blobs: a BadRequest, and no file outside."""
    blobs = BlobStore(tmp_path / "blobs")
    before = fingerprint(tmp_path)
    for name in VECTORS:
        for attack in (blobs.path, blobs.held, blobs.read, blobs.claim):
            with pytest.raises(BadRequest):
                attack(name)
        with pytest.raises(BadRequest):
            blobs.begin(name, 0, 10)
    assert fingerprint(tmp_path) == before


def test_a_link_in_the_place_of_a_blob_is_not_served(tmp_path: Path, victim: Path) -> None:
    """A link in the store of weights, even under a digest, is not opened."""
    store = DirectoryStore(tmp_path / "store")
    store.prepare()
    (tmp_path / "store" / "blobs" / DIGEST).symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        store.open_blob(DIGEST)


def test_a_link_in_the_place_of_an_upload_is_not_written(tmp_path: Path, victim: Path) -> None:
    """An upload to a partial blob that is a link does not reach the link's target."""
    blobs = BlobStore(tmp_path / "blobs")
    (tmp_path / "blobs" / "partial" / DIGEST).symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        os.close(blobs.begin(DIGEST, 0, 10))
    assert victim.read_bytes() == SECRET


# --- doors ----------------------------------------------------------------------------------------


async def test_200_names_at_the_blobs_of_the_dataflow(tmp_path: Path) -> None:
    """C3: as a path parameter, every name is answered with 4xx, and nothing is written."""
    async with dataflow_door(tmp_path) as door:
        before = files(tmp_path)
        for name in VECTORS:
            path = f"/v1/blobs/{quote(name, safe='')}"
            found = await door.call("GET", path)
            put = await door.call("PUT", f"{path}?offset=0&size=4", content=b"evil")
            assert {found.status_code, put.status_code} <= {400, 404, 405}, name
        assert files(tmp_path) == before


async def test_200_names_of_nodes_readers_and_spaces(tmp_path: Path) -> None:
    """C3: as the name of a node, a reader or a space, every name is answered with 4xx."""
    async with dataflow_door(tmp_path) as door:
        for name in (v for v in VECTORS if not is_safe_name(v)):
            node: dict[str, Any] = {"node_id": name, "boot_id": "b", "capacity": 1, "policies": []}
            assert (await door.call("POST", "/v1/nodes", body=node)).status_code == 400, name
            quoted = quote(name, safe="")
            reader = await door.call("PUT", f"/v1/readers/{quoted}", body={"reads": ["turns"]})
            assert reader.status_code in (400, 404, 405), name
            space = await door.call("PUT", f"/v1/spaces/{quoted}", body={"quota_bytes": 1})
            assert space.status_code in (400, 404, 405), name


async def test_200_names_at_the_weight_server(tmp_path: Path) -> None:
    """C3: manifests, blobs and deltas by any name but a digest are answered with 4xx."""
    async with weights_door(tmp_path) as door:
        for name in VECTORS:
            quoted = quote(name, safe="")
            for kind in ("manifests", "blobs", "deltas"):
                answer = await door.call("GET", f"/v1/{kind}/{quoted}?bytes=10&from={DIGEST}")
                assert answer.status_code in (400, 404), name
            bases = await door.call("GET", f"/v1/deltas/{DIGEST}?bytes=10&from={quoted}")
            assert bases.status_code == 400 or not name


async def test_a_delivery_cannot_name_a_file_as_its_blob(tmp_path: Path) -> None:
    """A delivery whose claim-check is a path is refused before anything is read. Without the
    secret of a lease it is fenced."""
    async with dataflow_door(tmp_path) as door:
        for name in (v for v in VECTORS if v):
            delivery = {"row_id": "p0-1.0.1", "payload": b"", "blob": name}
            body = {"node_id": "n", "boot_id": "b", "deliveries": [delivery]}
            answer = await door.call("POST", "/v1/trajectories", body=body)
            is_fenced = answer.status_code == 200 and b'"fenced"' in answer.content
            assert answer.status_code == 400 or is_fenced, name


async def test_a_version_cannot_be_published_under_a_path(tmp_path: Path) -> None:
    """A trainer that publishes a path as a manifest is refused: nodes would open it."""
    async with dataflow_door(tmp_path) as door:
        for name in VECTORS:
            body = {"incarnation": 1, "number": 0, "manifest_digest": name, "weights_digest": "w"}
            answer = await door.call(
                "POST", "/v1/policies/policy/versions", Role.TRAINER, body=body
            )
            assert answer.status_code == 400, name


async def test_a_column_cannot_name_a_file_as_its_blob(tmp_path: Path) -> None:
    """A stage's value by claim-check is a digest, never a path."""
    async with dataflow_door(tmp_path) as door:
        for name in VECTORS:
            row = {"key": "k", "columns": {"c": {"digest": name, "size": 1}}}
            answer = await door.call(
                "POST", "/v1/spaces/mine/rows", Role.STAGE, body={"rows": [row]}
            )
            assert answer.status_code == 400, name


def test_a_node_named_by_a_path_gets_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of a node may come with the token of a run that is not its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = RunFolder(tmp_path / "run")
    folder.write_config(demo_config(0))
    before = files(tmp_path)
    for name in (v for v in VECTORS if not is_safe_name(v)):
        with pytest.raises(ConfigError, match="not a name for a node"):
            node_state_dir(name)
        with pytest.raises(ConfigError, match="not a name for a node"):
            local_node_options(folder, demo_config(0), "policy", name)
    assert files(tmp_path) - before <= {folder.acks}
    made = node_state_dir("node-0.gpu1")
    assert made.stat().st_mode & 0o7777 == 0o700  # weights and logs, on a machine with other users


@pytest.mark.parametrize("name", ["../../victim", "/etc/passwd", "..", ".", "", "a/b", "a\0b"])
def test_a_checkpoint_of_others_names_files_of_its_folder_only(name: str, tmp_path: Path) -> None:
    """A fork copies the files that the other run's checkpoint names, to the same names."""
    cursor = Cursor(number=1, seq=1, incarnation=1)
    files = {"model.safetensors": "0" * 64}
    write_checkpoint_manifest(tmp_path, CheckpointManifest(policy="p", cursor=cursor, files=files))
    assert read_checkpoint_manifest(tmp_path).files == files
    files[name] = "0" * 64
    write_checkpoint_manifest(tmp_path, CheckpointManifest(policy="p", cursor=cursor, files=files))
    with pytest.raises(UnusableCheckpoint, match="not the name of a file in its folder"):
        read_checkpoint_manifest(tmp_path)


def test_safe_names_and_digests_are_exact() -> None:
    """The two types that become paths accept nothing else, not even a trailing newline."""
    assert [v for v in VECTORS if is_digest(v)] == []
    assert is_safe_name("node-0.gpu_1") and is_digest(DIGEST)
    assert not any(is_safe_name(v) for v in ("", ".", "..", ".x", "a/b", "a\n", "a" * 129, "é"))


@pytest.mark.parametrize(
    "name", [".", "instruction.md", "task.toml", "environment", "environment/Dockerfile", "tests"]
)
def test_a_harbor_task_reads_no_file_of_the_host_by_a_link(tmp_path: Path, name: str) -> None:
    """Tasks come from other people, and what they name goes into prompts and sandboxes."""
    host, task = tmp_path / "host", tmp_path / "tasks" / "task"
    for folder in (host, task):
        (folder / "environment").mkdir(parents=True)
        (folder / "tests").mkdir()
        (folder / "task.toml").write_text("")
        (folder / "instruction.md").write_text("SECRET" if folder == host else "Do it.")
        (folder / "environment" / "Dockerfile").write_text("FROM debian\nWORKDIR /app\nCOPY . .\n")
        (folder / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt")
    (task / name).rename(tmp_path / "replaced")
    (task / name).symlink_to(host / name)
    with pytest.raises(ConfigError, match="is a link"):
        read_tasks("train", HarborSpec(path=str(tmp_path / "tasks")))


@pytest.mark.parametrize("named", ["tasks", "tasks/task"])
def test_who_names_harbor_tasks_may_name_a_link(tmp_path: Path, named: str) -> None:
    task = tmp_path / "real" / "task"
    (task / "environment").mkdir(parents=True)
    (task / "tests").mkdir()
    (task / "task.toml").write_text("")
    (task / "instruction.md").write_text("Do it.")
    (task / "environment" / "Dockerfile").write_text("FROM debian\nWORKDIR /app\n")
    (task / "tests" / "test.sh").write_text("true")
    link, real = tmp_path / named, tmp_path / named.replace("tasks", "real")
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(real)
    [payload] = read_tasks("train", HarborSpec(path=str(link)))
    assert payload["prompt"] == "Do it."
