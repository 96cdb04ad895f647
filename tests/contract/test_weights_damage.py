# SPDX-License-Identifier: Apache-2.0
"""Damaged and forged data, in transit and in the cache: detected, repaired or rejected, never
staged."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import pytest
from starlette.requests import Request
from tests.unit.rollout.polling import eventually
from tests.unit.weights.snapshot_folders import contents
from tests.unit.weights.weight_servers import POLICY, put, running_weight_server, tampering_server

from penstock.errors import Unauthorized, WeightsError
from penstock.types import PublishedVersion
from penstock.weights import client as module
from penstock.weights.client import Puller
from penstock.weights.manifest import FileEntry, encode_manifest, make_manifest, parse_manifest
from penstock.weights.pulling.partial import Partial
from penstock.weights.store import DirectoryStore
from penstock.weights.tensors import TensorEntry
from penstock.wire.client import AsyncServiceClient, connect


@pytest.fixture
async def caller(tmp_path: Path) -> AsyncGenerator[AsyncServiceClient]:
    async with running_weight_server(tmp_path) as caller:
        yield caller


async def as_it_is(request: Request, data: bytes) -> bytes:
    return data


async def test_a_damaged_blob_is_fetched_again(tmp_path: Path) -> None:
    wanted = put(tmp_path)
    damaged: set[str] = set()

    async def once(request: Request, data: bytes) -> bytes:
        if "/blobs/" in request.url.path and request.url.path not in damaged:
            damaged.add(request.url.path)
            return bytes([data[0] ^ 0x80]) + data[1:]
        return data

    async with tampering_server(tmp_path / "store", once) as caller:
        folder = await Puller(tmp_path / "cache").pull([caller], wanted)
    assert len(damaged) == 5
    assert contents(folder) == contents(tmp_path / "hf-0")


async def test_damage_between_verification_and_load_is_reported(
    tmp_path: Path, caller: AsyncServiceClient
) -> None:
    wanted = put(tmp_path)
    puller = Puller(tmp_path / "cache")
    folder = await puller.pull([caller], wanted)
    puller.require_unchanged(folder)
    path = next(folder.glob("*.safetensors"))
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"!")
    with pytest.raises(WeightsError, match=f"{path.name} was written to"):
        puller.require_unchanged(folder)
    assert contents(await puller.pull([caller], wanted)) == contents(tmp_path / "hf-0")
    puller.require_unchanged(folder)
    puller.prune([])
    with pytest.raises(WeightsError, match="was pruned"):
        puller.require_unchanged(folder)


@pytest.mark.parametrize("kind", ["manifests", "blobs"])
async def test_every_byte_flipped_in_transit_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(module, "MAX_TRIES", 1)
    wanted = put(tmp_path)
    store = tmp_path / "store"
    manifest = DirectoryStore(store).read_manifest(wanted.manifest_digest)
    shard = parse_manifest(manifest).files[3]
    assert shard.name.endswith(".safetensors")
    target = shard.blob if kind == "blobs" else wanted.manifest_digest
    size = shard.bytes if kind == "blobs" else len(manifest)
    at = num_flipped = num_rounds = 0

    async def flip(request: Request, data: bytes) -> bytes:
        nonlocal num_flipped
        asked = request.headers.get("range", "bytes=0-").removeprefix("bytes=").split("-")
        place = at - int(asked[0])
        if request.url.path.endswith(target) and 0 <= place < len(data):
            num_flipped += 1
            return data[:place] + bytes([data[place] ^ (1 << at % 8)]) + data[place + 1 :]
        return data

    async with tampering_server(store, flip) as caller:
        for at in range(0, size, 1 if kind == "blobs" else 3):  # noqa: B007 - `flip` reads it
            with pytest.raises(WeightsError, match="does not match digest"):
                await Puller(tmp_path / "cache").pull([caller], wanted)
            num_rounds += 1
            left = tmp_path / "cache" / "blobs" / f"{target}.partial"
            left.unlink(missing_ok=True)  # otherwise the next pull would request only a part of it
    assert num_flipped == num_rounds
    assert list((tmp_path / "cache" / "versions").iterdir()) == []


async def test_every_flipped_byte_in_the_cache_is_found_and_repaired(tmp_path: Path) -> None:
    wanted = put(tmp_path)
    async with tampering_server(tmp_path / "store", as_it_is) as caller:
        folder = await Puller(tmp_path / "cache").pull([caller], wanted)
        for name, right in contents(tmp_path / "hf-0").items():
            for at in range(0, len(right), 37):
                os.chmod(folder / name, 0o644)
                with (folder / name).open("r+b") as file:
                    file.seek(at)
                    file.write(bytes([right[at] ^ 4]))
                assert await Puller(tmp_path / "cache").pull([caller], wanted) == folder
                assert (folder / name).read_bytes() == right


async def test_a_modified_folder_is_staged_again(
    tmp_path: Path, caller: AsyncServiceClient
) -> None:
    wanted = put(tmp_path)
    folder = await Puller(tmp_path / "cache").pull([caller], wanted)
    (folder / "config.json").unlink()
    (folder / "modeling.py").write_text("import os")
    assert await Puller(tmp_path / "cache").pull([caller], wanted) == folder
    assert contents(folder) == contents(tmp_path / "hf-0")


@pytest.mark.parametrize("change", ["cut", "longer", "empty", "endless"])
async def test_answers_of_the_wrong_length_are_refused(tmp_path: Path, change: str) -> None:
    wanted = put(tmp_path)

    async def tamper(request: Request, data: bytes) -> bytes:
        if "/manifests/" in request.url.path:
            return data
        return {
            "cut": data[:-1] or data,
            "longer": data + b"!",
            "empty": b"",
            "endless": bytes(1 << 24),
        }[change]

    async with tampering_server(tmp_path / "store", tamper) as caller:
        if change == "cut":  # a short piece is valid: the rest is requested
            folder = await Puller(tmp_path / "cache").pull([caller], wanted)
            assert contents(folder) == contents(tmp_path / "hf-0")
            return
        with pytest.raises(WeightsError):
            await Puller(tmp_path / "cache").pull([caller], wanted)


async def test_a_manifest_of_something_else_is_refused(
    tmp_path: Path, caller: AsyncServiceClient
) -> None:
    wanted = put(tmp_path)
    other = PublishedVersion(
        policy=POLICY, incarnation=1, number=5, manifest_digest=wanted.manifest_digest
    )
    with pytest.raises(WeightsError, match="describes policy number 0"):
        await Puller(tmp_path / "cache").pull([caller], other)
    missing = PublishedVersion(policy=POLICY, incarnation=1, number=0, manifest_digest="0" * 64)
    with pytest.raises(WeightsError, match="404"):
        await Puller(tmp_path / "cache").pull([caller], missing)
    hostile = PublishedVersion(policy=POLICY, incarnation=1, number=0, manifest_digest="../../x")
    with pytest.raises(WeightsError, match="not a BLAKE3 digest"):
        await Puller(tmp_path / "cache").pull([caller], hostile)


Rewrite = Callable[[list[FileEntry], list[TensorEntry]], None]


def _swap_digests(files: list[FileEntry], tensors: list[TensorEntry]) -> None:
    a, b = tensors[0], tensors[1]
    tensors[0] = TensorEntry(name=a.name, dtype=a.dtype, shape=a.shape, digest=b.digest)


def _transpose(files: list[FileEntry], tensors: list[TensorEntry]) -> None:
    a = next(tensor for tensor in tensors if len(tensor.shape) == 2)
    tensors.remove(a)
    tensors.append(TensorEntry(name=a.name, dtype=a.dtype, shape=a.shape[::-1], digest=a.digest))


def _promise_more(files: list[FileEntry], tensors: list[TensorEntry]) -> None:
    tensors.append(TensorEntry(name="more", dtype="F32", shape=(1,), digest="0" * 64))


def _promise_less(files: list[FileEntry], tensors: list[TensorEntry]) -> None:
    tensors.pop()


def _drop_a_shard(files: list[FileEntry], tensors: list[TensorEntry]) -> None:
    files.remove(next(file for file in files if file.name.endswith("2.safetensors")))


def _size_too_large(files: list[FileEntry], tensors: list[TensorEntry]) -> None:
    files[0] = FileEntry(name=files[0].name, blob=files[0].blob, bytes=files[0].bytes + 1)


def _call_json_weights(files: list[FileEntry], tensors: list[TensorEntry]) -> None:
    files.append(FileEntry(name="x.safetensors", blob=files[0].blob, bytes=files[0].bytes))


@pytest.mark.parametrize(
    "rewrite",
    [
        _swap_digests,
        _transpose,
        _promise_more,
        _promise_less,
        _drop_a_shard,
        _size_too_large,
        _call_json_weights,
    ],
)
async def test_every_tensor_is_held_against_the_manifest(
    tmp_path: Path, caller: AsyncServiceClient, rewrite: Rewrite
) -> None:
    """The files match their digests; the manifest lists the wrong tensors."""
    honest = put(tmp_path)
    store = DirectoryStore(tmp_path / "store")
    manifest = parse_manifest(store.read_manifest(honest.manifest_digest))
    files, tensors = list(manifest.files), list(manifest.tensors)
    rewrite(files, tensors)
    digest = store.put_manifest(encode_manifest(make_manifest(POLICY, 0, files, tensors)))
    wanted = PublishedVersion(policy=POLICY, incarnation=1, number=0, manifest_digest=digest)
    with pytest.raises(WeightsError):
        await Puller(tmp_path / "cache").pull([caller], wanted)
    assert list((tmp_path / "cache" / "versions").iterdir()) == []
    folder = await Puller(tmp_path / "cache").pull([caller], honest)
    assert contents(folder) == contents(tmp_path / "hf-0")


async def test_a_cache_that_cannot_be_written_is_a_weights_error(
    tmp_path: Path, caller: AsyncServiceClient
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WeightsError, match=r"pulling policy@1\.0 into"):
        await Puller(tmp_path / "file" / "cache").pull([caller], put(tmp_path))


async def test_without_a_credential_nothing_is_pulled(
    tmp_path: Path, caller: AsyncServiceClient
) -> None:
    wanted = put(tmp_path)
    async with connect(caller.base_url, "nonsense") as stranger:
        with pytest.raises(Unauthorized):
            await Puller(tmp_path / "cache").pull([stranger], wanted)


@pytest.mark.parametrize("step", ["missing", "finish"])
async def test_a_cancelled_pull_changes_no_file_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Both truncate: without the lock, they could hit a blob that another pull has verified."""
    wanted = put(tmp_path)
    begun, ended, may_end = list[str](), list[str](), threading.Event()
    real = getattr(Partial, step)

    def slow(partial: Partial) -> object:
        begun.append(partial.file.name)
        may_end.wait(60)
        result = real(partial)
        ended.append(partial.file.name)
        return result

    monkeypatch.setattr(Partial, step, slow)
    async with tampering_server(tmp_path / "store", as_it_is) as caller:
        pull = asyncio.create_task(Puller(tmp_path / "cache").pull([caller], wanted))
        await eventually(lambda: len(begun) > 0)
        pull.cancel()
        await asyncio.sleep(0.05)
        assert not pull.done(), "its thread still has the file"
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await pull
        assert sorted(ended) == sorted(begun)
