# SPDX-License-Identifier: Apache-2.0
"""No name that a caller or a weight server chooses leads out of the folder that it belongs to."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Generator
from pathlib import Path
from urllib.parse import quote

import httpx2
import pytest
from starlette.requests import Request
from tests.contract.dataflow_server import RunningDataflow, dataflow, serving, small_config
from tests.contract.test_weights_deltas import versions
from tests.unit.weights.weight_servers import running_weight_server, tampering_server

from penstock.dataflow.ledger.blobs import BlobStore
from penstock.errors import BadRequest, WeightsError
from penstock.types import PublishedVersion, is_digest, is_safe_name
from penstock.weights.client import Puller
from penstock.weights.deltas.chain import DeltaChain, DeltaEntry, is_valid_chain
from penstock.weights.manifest import FileEntry
from penstock.weights.pulling.cache import BlobCache
from penstock.weights.serving.origin import Origin
from penstock.weights.serving.server import build as build_weight_server
from penstock.weights.store import DirectoryStore
from penstock.wire.auth import Audience, Role, Signer
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
    folder = await pull_through(tmp_path, str(victim), b"ATTACKER!!")
    assert victim.read_bytes() == SECRET
    assert [*victim.parent.iterdir()] == [victim]
    assert (folder / "model.safetensors").is_file()


@pytest.mark.finding(1)
async def test_a_relay_cannot_leave_bytes_in_a_folder_of_the_node(
    tmp_path: Path, victim: Path
) -> None:
    """A relay that names a new file by a relative path: nothing appears outside of the cache."""
    await pull_through(tmp_path, "../../home/bashrc", b"echo owned" * 100)
    assert [*victim.parent.iterdir()] == [victim]


@pytest.mark.finding(1)
@pytest.mark.parametrize("field", ["base", "target", "blob"])
def test_every_name_of_a_delta_is_a_digest(field: str) -> None:
    """All 200 names are refused in each field of a step, whoever asks: decoder and chain."""
    sound = {"base": "0" * 64, "target": "1" * 64, "blob": "2" * 64, "bytes": 10}
    assert decode(encode({"steps": [sound]}), DeltaChain).steps[0].blob == "2" * 64
    for name in VECTORS:
        with pytest.raises(BadRequest):
            decode(encode({"steps": [sound | {field: name}]}), DeltaChain)
        step = DeltaEntry(**(sound | {field: name}))
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
    blobs = tmp_path / "cache" / "blobs"
    blobs.mkdir(parents=True)
    for path in (tmp_path / "store" / "blobs").iterdir():
        (blobs / f"{path.name}.partial").symlink_to(victim)
    async with running_weight_server(tmp_path) as origin:
        with pytest.raises(WeightsError):
            await Puller(tmp_path / "cache").pull([origin], version)
    assert victim.read_bytes() == SECRET


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


@pytest.fixture
def running(tmp_path: Path) -> Generator[RunningDataflow]:
    with dataflow(tmp_path, small_config()) as running:
        yield running


def client(running: RunningDataflow, role: Role) -> httpx2.Client:
    headers = {"authorization": f"Bearer {running.token(role)}"}
    http = httpx2.Client(base_url=running.url, headers=headers, timeout=60)
    running.clients.callback(http.close)
    return http


def test_200_names_at_the_blobs_of_the_dataflow(running: RunningDataflow, tmp_path: Path) -> None:
    """C3: as a path parameter, every name is answered with 400 or 404, and nothing is written."""
    http = client(running, Role.ADMIN)
    before = fingerprint(tmp_path / "keys")
    for name in VECTORS:
        path = f"/v1/blobs/{quote(name, safe='')}"
        answers = [http.get(path), http.put(f"{path}?offset=0&size=4", content=b"evil")]
        assert {answer.status_code for answer in answers} <= {400, 404, 405}, name
        assert all(b"BEGIN" not in answer.content for answer in answers)
    assert fingerprint(tmp_path / "keys") == before
    assert not [*(tmp_path / "ledger").rglob("*evil*")]


def test_200_names_of_nodes_readers_and_spaces(running: RunningDataflow) -> None:
    """C3: as the name of a node, a reader or a space, every name is answered with 4xx."""
    http = client(running, Role.ADMIN)
    http.headers["content-type"] = "application/msgpack"
    for name in (v for v in VECTORS if not is_safe_name(v)):
        node = {"node_id": name, "boot_id": "b", "capacity": 1, "policies": []}
        assert http.post("/v1/nodes", content=encode(node)).status_code == 400, name
        quoted = quote(name, safe="")
        reader = http.put(f"/v1/readers/{quoted}", content=encode({"reads": ["turns"]}))
        assert reader.status_code in (400, 404, 405), name
        space = http.put(f"/v1/spaces/{quoted}", content=encode({"quota_bytes": 1}))
        assert space.status_code in (400, 404, 405), name


def test_200_names_at_the_weight_server(tmp_path: Path) -> None:
    """C3: manifests, blobs and deltas by any name but a digest are answered with 4xx."""
    signer = Signer.create(tmp_path / "keys", "run")
    token = signer.mint(Role.ROLLOUT, [Audience.WEIGHTS], ttl_s=600)
    app = build_weight_server(
        Origin(DirectoryStore(tmp_path / "store")), signer.verifier(Audience.WEIGHTS)
    )
    with (
        serving(app) as url,
        httpx2.Client(
            base_url=url, headers={"authorization": f"Bearer {token}"}, timeout=60
        ) as http,
    ):
        for name in VECTORS:
            for kind in ("manifests", "blobs", "deltas"):
                answer = http.get(f"/v1/{kind}/{quote(name, safe='')}?bytes=10&from={DIGEST}")
                assert answer.status_code in (400, 404), name
            bases = http.get(f"/v1/deltas/{DIGEST}?bytes=10&from={quote(name, safe='')}")
            assert bases.status_code == 400 or not name


def test_a_delivery_cannot_name_a_file_as_its_blob(running: RunningDataflow) -> None:
    """A delivery whose claim-check is a path is refused before anything is read."""
    http = client(running, Role.ADMIN)
    http.headers["content-type"] = "application/msgpack"
    for name in (v for v in VECTORS if v):
        delivery = {"row_id": "p0-1.0.1", "payload": b"", "blob": name}
        body = {"node_id": "n", "boot_id": "b", "deliveries": [delivery]}
        answer = http.post("/v1/trajectories", content=encode(body))
        assert answer.status_code == 400, name


def test_a_version_cannot_be_published_under_a_path(running: RunningDataflow) -> None:
    """A trainer that publishes a path as a manifest is refused: nodes would open it."""
    http = client(running, Role.TRAINER)
    http.headers["content-type"] = "application/msgpack"
    for name in VECTORS:
        body = {"incarnation": 1, "number": 0, "manifest_digest": name, "weights_digest": "w"}
        answer = http.post("/v1/policies/policy/versions", content=encode(body))
        assert answer.status_code == 400, name


def test_a_column_cannot_name_a_file_as_its_blob(running: RunningDataflow) -> None:
    """A stage's value by claim-check is a digest, never a path."""
    http = client(running, Role.STAGE)
    http.headers["content-type"] = "application/msgpack"
    for name in VECTORS:
        row = {"key": "k", "columns": {"c": {"digest": name, "size": 1}}}
        answer = http.post("/v1/spaces/mine/rows", content=encode({"rows": [row]}))
        assert answer.status_code == 400, name


def test_safe_names_and_digests_are_exact() -> None:
    """The two types that become paths accept nothing else, not even a trailing newline."""
    assert [v for v in VECTORS if is_digest(v)] == []
    assert is_safe_name("node-0.gpu_1") and is_digest(DIGEST)
    assert not any(is_safe_name(v) for v in ("", ".", "..", ".x", "a/b", "a\n", "a" * 129, "é"))
