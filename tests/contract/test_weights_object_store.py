# SPDX-License-Identifier: Apache-2.0
"""A directory store and object storage give readers the same guarantees; a bucket never shows an
incomplete version."""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest
from tests.unit.weights.snapshot_folders import write_folder
from tests.unit.weights.version_history import VersionHistory
from tests.unit.weights.weight_servers import POLICY, listening, put

from penstock.errors import ConfigError, NotFound, Unreachable, WeightsError
from penstock.types import PublishedVersion
from penstock.weights.client import Puller
from penstock.weights.deltas.chain import is_valid_chain
from penstock.weights.manifest import FileEntry, parse_manifest
from penstock.weights.publish import put_snapshot
from penstock.weights.serving import mirror as mirror_module
from penstock.weights.serving import object_store as object_store
from penstock.weights.serving.mirror import ObjectMirror
from penstock.weights.serving.object_store import ObjectSource
from penstock.weights.serving.origin import Origin
from penstock.weights.serving.server import build
from penstock.weights.serving.sources import Blob, Source
from penstock.weights.store import DirectoryStore
from penstock.wire.auth import Audience, Role, Signer
from penstock.wire.client import connect
from penstock.wire.objects import open_objects

ABSENT = "0" * 64
_numbers = itertools.count()


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "store")


@pytest.fixture
def url(s3_url: str) -> str:
    """An empty prefix of a bucket."""
    return f"{s3_url}/weights-{next(_numbers)}"


def names(url: str) -> set[str]:
    pages = obstore.list(open_objects(url, "weights"))  # pyright: ignore[reportUnknownMemberType]
    return {meta["path"] for page in pages for meta in page}


def files(root: Path) -> set[str]:
    return {
        str(path.relative_to(root))
        for folder in ("blobs", "deltas", "manifests")
        for path in (root / folder).rglob("*")
        if path.is_file()
    }


async def read_all(blob: Blob, step: int) -> bytes:
    data = b""
    while piece := await blob.read(len(data), step):
        assert len(piece) <= step
        data += piece
    return data


# --- guarantees of every source -------------------------------------------------------------------


@pytest.fixture
def made(tmp_path: Path) -> VersionHistory:
    """Three versions, each with a delta from the previous one."""
    history = VersionHistory(tmp_path / "store")
    history.add_versions(3)
    return history


@pytest.fixture(params=["directory", "bucket"])
def source(request: pytest.FixtureRequest, store: DirectoryStore, made: VersionHistory) -> Source:
    if request.param == "directory":
        return Origin(store)
    url = request.getfixturevalue("url")
    for version in made.versions:
        ObjectMirror(url).upload(store, version.manifest_digest)
    return ObjectSource(url)


async def test_manifests_are_returned_byte_for_byte(
    source: Source, store: DirectoryStore, made: VersionHistory
) -> None:
    for version in made.versions:
        digest = version.manifest_digest
        assert await source.manifest(digest) == store.read_manifest(digest)


async def test_blobs_are_read_by_range(
    source: Source, tmp_path: Path, made: VersionHistory
) -> None:
    file = made.file(1)
    data = made.store.blob_path(file.blob).read_bytes()
    blob = await source.blob(file.blob)
    assert blob.num_bytes == len(data) == file.bytes
    assert await read_all(blob, 100_000) == data
    for start, num_bytes in ((0, 1), (7, 13), (len(data) - 5, 5), (len(data) - 5, 100)):
        assert await blob.read(start, num_bytes) == data[start : start + num_bytes]
    assert await blob.read(len(data), 10) == b""
    await blob.close()


async def test_missing_items_are_not_found(source: Source) -> None:
    with pytest.raises(NotFound, match=ABSENT):
        await source.manifest(ABSENT)
    with pytest.raises(NotFound, match=ABSENT):
        await source.blob(ABSENT)
    assert await source.chain(ABSENT, 1000, [ABSENT]) == ()


async def test_chains_start_at_available_blobs(
    source: Source, tmp_path: Path, made: VersionHistory
) -> None:
    first, second, third = (made.file(number) for number in range(3))
    steps = await source.chain(third.blob, third.bytes, [ABSENT, first.blob])
    assert is_valid_chain(third.blob, steps, [first.blob], below=third.bytes)
    [step] = await source.chain(third.blob, third.bytes, [first.blob, second.blob])
    assert (step.base, step.target) == (second.blob, third.blob)
    delta = await source.blob(step.blob)
    assert delta.num_bytes == step.bytes
    await delta.close()
    assert await source.chain(third.blob, step.bytes, [second.blob]) == (), "it would not pay"
    assert await source.chain(third.blob, third.bytes, [ABSENT]) == ()
    await source.close()


async def test_a_server_over_a_bucket_serves_nodes(
    tmp_path: Path, url: str, store: DirectoryStore, made: VersionHistory
) -> None:
    for version in made.versions:
        ObjectMirror(url).upload(store, version.manifest_digest)
    signer = Signer.create(tmp_path / "keys", "run")
    token = signer.mint(Role.ROLLOUT, [Audience.WEIGHTS], ttl_s=3600)
    app = build(ObjectSource(url), signer.verifier(Audience.WEIGHTS))
    cache = tmp_path / "cache"
    async with listening(app) as address, connect(address, token) as caller:
        for number in (0, 2):
            wanted = PublishedVersion(
                policy=POLICY, incarnation=1, number=number, manifest_digest=made.digest(number)
            )
            folder = await Puller(cache).pull([caller], wanted)
            blob = made.store.blob_path(made.file(number).blob)
            assert (folder / made.file(number).name).read_bytes() == blob.read_bytes()
    [step] = store.deltas_to(made.file(2).blob)
    assert (cache / "blobs" / step.blob).exists(), "it came as a delta"


# --- uploads to a bucket --------------------------------------------------------------------------


def test_a_bucket_equals_the_directory_and_uploads_once(
    tmp_path: Path, url: str, store: DirectoryStore, made: VersionHistory
) -> None:
    mirror = ObjectMirror(url)
    sent = [mirror.upload(store, version.manifest_digest) for version in made.versions]
    assert names(url) == files(tmp_path / "store")
    whole = sum(path.stat().st_size for path in (tmp_path / "store").rglob("*") if path.is_file())
    assert sum(sent) == whole, "config.json was sent once"
    assert [mirror.upload(store, version.manifest_digest) for version in made.versions] == [0, 0, 0]
    assert set(mirror.manifests()) == {version.manifest_digest for version in made.versions}
    assert dict(mirror.blobs()) == dict(store.blobs())
    assert list(mirror.deltas()) == list(store.deltas())


@pytest.mark.parametrize("failing", range(6))
def test_a_version_is_visible_only_when_all_of_it_is_there(
    tmp_path: Path,
    url: str,
    store: DirectoryStore,
    made: VersionHistory,
    monkeypatch: pytest.MonkeyPatch,
    failing: int,
) -> None:
    """The upload fails at each of its puts, and is repeated."""
    monkeypatch.setattr(mirror_module, "NUM_FILES", 1)
    digest = made.digest(1)
    mirror = ObjectMirror(url)
    put, count = obstore.put, itertools.count()

    def fail(*arguments: object, **options: object) -> object:
        if next(count) == failing:
            raise OSError("the line went dead")
        return put(*arguments, **options)  # pyright: ignore[reportArgumentType]

    with monkeypatch.context() as patch:
        patch.setattr(obstore, "put", fail)
        if failing < 5:  # weights, config, delta, its entry, the manifest
            with pytest.raises(WeightsError, match="the line went dead"):
                mirror.upload(store, digest)
            assert not list(mirror.manifests())
    mirror.upload(store, digest)
    assert list(mirror.manifests()) == [digest]
    sizes = dict(mirror.blobs())
    manifest = parse_manifest(store.read_manifest(digest))
    assert all(sizes[file.blob] == file.bytes for file in manifest.files)
    assert all(sizes[step.blob] == step.bytes for step in mirror.deltas())


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> int:
    """The smallest parts that S3 accepts, and a file of more than two."""
    monkeypatch.setattr(mirror_module, "PART_BYTES", 5 << 20)
    return (12 << 20) + 12_345


def large(tmp_path: Path, num_bytes: int) -> tuple[str, dict[str, FileEntry]]:
    """Its manifest's digest, and its files by name."""
    folder = write_folder(tmp_path / "hf")
    (folder / "large.txt").write_bytes(os.urandom(num_bytes))
    digest = put_snapshot(tmp_path / "store", folder, policy=POLICY, number=0).manifest_digest
    return digest, files_of(DirectoryStore(tmp_path / "store"), digest)


def files_of(store: DirectoryStore, digest: str) -> dict[str, FileEntry]:
    return {file.name: file for file in parse_manifest(store.read_manifest(digest)).files}


async def test_a_large_file_travels_in_parts(
    tmp_path: Path, url: str, store: DirectoryStore, parts: int
) -> None:
    digest, found = large(tmp_path, parts)
    assert ObjectMirror(url).upload(store, digest) > parts
    assert ObjectMirror(url).upload(store, digest) == 0, "it is there"
    blob = await ObjectSource(url).blob(found["large.txt"].blob)
    assert await read_all(blob, 4 << 20) == (tmp_path / "hf" / "large.txt").read_bytes()


@pytest.mark.parametrize("name", ["large.txt", "config.json"])
def test_a_file_that_went_bad_on_disk_does_not_get_its_name(
    tmp_path: Path, url: str, store: DirectoryStore, parts: int, name: str
) -> None:
    digest, found = large(tmp_path, parts)
    file = found[name]
    path = store.blob_path(file.blob)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    with pytest.raises(WeightsError, match=f"{file.blob} is damaged on disk"):
        ObjectMirror(url).upload(store, digest)
    assert f"blobs/{file.blob}" not in names(url)
    assert not list(ObjectMirror(url).manifests())


async def test_nothing_is_overwritten_and_damage_is_found_by_the_reader(
    tmp_path: Path, url: str, store: DirectoryStore
) -> None:
    version = put(tmp_path)
    file = files_of(store, version.manifest_digest)["config.json"]
    bucket = open_objects(url, "weights")
    obstore.put(bucket, f"blobs/{file.blob}", bytes(file.bytes))
    ObjectMirror(url).upload(store, version.manifest_digest)
    assert await read_all(await ObjectSource(url).blob(file.blob), 1000) == bytes(file.bytes)
    obstore.put(bucket, f"manifests/{version.manifest_digest}.json", b"{}")
    with pytest.raises(NotFound, match="damaged"):
        await ObjectSource(url).manifest(version.manifest_digest)


def test_an_object_of_the_wrong_size_is_reported(
    tmp_path: Path, url: str, store: DirectoryStore
) -> None:
    version = put(tmp_path)
    file = files_of(store, version.manifest_digest)["config.json"]
    obstore.put(open_objects(url, "weights"), f"blobs/{file.blob}", b"half")
    with pytest.raises(
        WeightsError, match=r"is damaged \(4 bytes instead of .* delete it and upload"
    ):
        ObjectMirror(url).upload(store, version.manifest_digest)
    assert not list(ObjectMirror(url).manifests())


def test_deletion_removes_only_the_named_objects(
    tmp_path: Path, url: str, store: DirectoryStore, made: VersionHistory
) -> None:
    mirror = ObjectMirror(url)
    for version in made.versions:
        mirror.upload(store, version.manifest_digest)
    step = next(iter(mirror.deltas()))
    for _ in range(2):  # deleted objects stay deleted
        mirror.delete_manifest(made.digest(0))
        mirror.delete_delta(step)
        mirror.delete_blob(step.blob)
    gone = {
        f"manifests/{made.digest(0)}.json",
        f"deltas/{step.target}/{step.base}.json",
        f"blobs/{step.blob}",
    }
    assert names(url) == files(tmp_path / "store") - gone


@pytest.mark.parametrize("entry", [b"", b"{", b'{"base":"../x","target":"y","blob":"z","bytes":1}'])
async def test_a_damaged_entry_is_as_good_as_none(
    tmp_path: Path, url: str, store: DirectoryStore, made: VersionHistory, entry: bytes
) -> None:
    file = made.file(1)
    [step] = store.deltas_to(file.blob)
    obstore.put(open_objects(url, "weights"), f"deltas/{file.blob}/{step.base}.json", entry)
    assert await ObjectSource(url).chain(file.blob, file.bytes, [step.base, "../x"]) == ()


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch, s3_url: str) -> Iterator[str]:
    """A bucket behind a closed port."""
    monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(object_store, "READ_TIMEOUT_S", 1.0)
    monkeypatch.setattr(mirror_module, "UPLOAD_S", 1.0)
    yield "s3://away/run"


async def test_an_unreachable_bucket_is_retried_later(
    tmp_path: Path, nobody: str, store: DirectoryStore
) -> None:
    source = ObjectSource(nobody)
    with pytest.raises(Unreachable) as raised:
        await source.manifest(ABSENT)
    assert raised.value.retry_after_s
    with pytest.raises(Unreachable):
        await source.blob(ABSENT)
    with pytest.raises(Unreachable):
        await source.chain(ABSENT, 10, [ABSENT])
    with pytest.raises(WeightsError, match=r"uploading version .* to s3://away/run"):
        ObjectMirror(nobody).upload(store, put(tmp_path).manifest_digest)


def test_errors_on_opening_name_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="use s3://bucket"):
        ObjectSource("ftp://host/x")

    def find_nothing(_: str) -> None:
        return None

    monkeypatch.setattr(importlib.util, "find_spec", find_nothing)
    with pytest.raises(ConfigError, match=r"pip install 'penstock-rl\[s3\]'"):
        ObjectSource("s3://bucket/run")
