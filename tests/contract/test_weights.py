# SPDX-License-Identifier: Apache-2.0
"""Store, front and client together, over HTTP on loopback."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute
from tests.unit.weights.folders import contents, write_folder

from penstock.errors import Unauthorized, WeightsError
from penstock.types import PolicyName, PublishedVersion
from penstock.weights import client as module
from penstock.weights.client import prune, pull, put_snapshot
from penstock.weights.manifest import FileEntry, encode_manifest, make_manifest, parse_manifest
from penstock.weights.server import build
from penstock.weights.store import DirectoryStore
from penstock.weights.tensors import TensorEntry
from penstock.wire.auth import Audience, Role, Signer
from penstock.wire.client import AsyncCaller, connect
from penstock.wire.server import server

POLICY = PolicyName("policy")
Touch = Callable[[Request, bytes], Awaitable[bytes]]


@asynccontextmanager
async def listening(app: Starlette) -> AsyncGenerator[str]:
    front = server(app, "127.0.0.1", 0)
    task = asyncio.create_task(front.serve())
    while not front.started:
        assert not task.done(), "the server ended before it listened"
        await asyncio.sleep(0.005)
    host, port = front.servers[0].sockets[0].getsockname()
    try:
        yield f"http://{host}:{port}"
    finally:
        front.should_exit = True
        await task


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    return Signer.create(tmp_path / "keys", "run")


@pytest.fixture
async def caller(tmp_path: Path, signer: Signer) -> AsyncGenerator[AsyncCaller]:
    token = signer.mint(Role.ROLLOUT, [Audience.WEIGHTS], ttl_s=60)
    app = build(tmp_path / "store", signer.verifier(Audience.WEIGHTS))
    async with listening(app) as url, connect(url, token) as caller:
        yield caller


def put(tmp_path: Path, seed: int = 0, number: int = 0) -> PublishedVersion:
    folder = write_folder(tmp_path / f"hf-{seed}", seed)
    stored = put_snapshot(tmp_path / "store", folder, policy=POLICY, number=number)
    return PublishedVersion(
        policy=POLICY, incarnation=1, number=number, manifest_digest=stored.manifest_digest
    )


@asynccontextmanager
async def meddling(store: Path, touch: Touch) -> AsyncGenerator[AsyncCaller]:
    """A relay nobody should trust: passes what the store holds through `touch`."""

    async def answer(request: Request) -> Response:
        path = store / request.url.path.removeprefix("/v1/")
        if path.parent.name == "manifests":
            path = path.with_suffix(".json")
        data = path.read_bytes()
        asked = request.headers.get("range", "")
        if asked:
            first, last = asked.removeprefix("bytes=").split("-")
            data = data[int(first) : int(last) + 1]
        return Response(await touch(request, data), status_code=206 if asked else 200)

    app = Starlette(routes=[StarletteRoute("/v1/{kind}/{digest}", answer)])
    async with listening(app) as url, connect(url, "none") as caller:
        yield caller


async def as_it_is(request: Request, data: bytes) -> bytes:
    return data


# --- pull ----------------------------------------------------------------------------------------


async def test_what_was_put_is_pulled(tmp_path: Path, caller: AsyncCaller) -> None:
    wanted = put(tmp_path)
    folder = await pull(caller, wanted, tmp_path / "cache")
    assert contents(folder) == contents(tmp_path / "hf-0")
    assert await pull(caller, wanted, tmp_path / "cache") == folder
    assert len(list((tmp_path / "cache" / "versions").iterdir())) == 1


async def test_unchanged_files_are_fetched_once(tmp_path: Path) -> None:
    asked: list[str] = []

    async def note(request: Request, data: bytes) -> bytes:
        asked.append(request.url.path)
        return data

    first, second = put(tmp_path, 0, 0), put(tmp_path, 1, 1)
    async with meddling(tmp_path / "store", note) as caller:
        await pull(caller, first, tmp_path / "cache")
        assert len(asked) == 1 + 5
        asked.clear()
        folder = await pull(caller, second, tmp_path / "cache")
        assert sorted(path.split("/")[2] for path in asked) == ["blobs", "manifests"]
    assert contents(folder) == contents(tmp_path / "hf-1")
    assert contents(tmp_path / "cache" / "versions" / first.manifest_digest) == contents(
        tmp_path / "hf-0"
    )


async def test_many_pulls_may_share_a_cache(tmp_path: Path, caller: AsyncCaller) -> None:
    wanted = [put(tmp_path, seed, seed) for seed in range(4)] * 3
    folders = await asyncio.gather(*(pull(caller, each, tmp_path / "cache") for each in wanted))
    for each, folder in zip(wanted, folders, strict=True):
        assert contents(folder) == contents(tmp_path / f"hf-{each.number}")
    left = {path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    assert not [name for name in left if name.endswith(".partial")]


async def test_a_cut_off_blob_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 100)
    wanted = put(tmp_path)
    store = DirectoryStore(tmp_path / "store")
    files = parse_manifest(store.read_manifest(wanted.manifest_digest)).files
    largest = max(files, key=lambda file: file.bytes)
    asked: list[str] = []
    enough = asyncio.Event()

    async def stall(request: Request, data: bytes) -> bytes:
        if largest.blob in request.url.path:
            asked.append(request.headers["range"])
            if len(asked) == 4 and not enough.is_set():
                enough.set()
                await asyncio.sleep(30)
        return data

    async with meddling(tmp_path / "store", stall) as caller:
        task = asyncio.create_task(pull(caller, wanted, tmp_path / "cache"))
        await enough.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asked == ["bytes=0-99", "bytes=100-199", "bytes=200-299", "bytes=300-399"]
        asked.clear()
        folder = await pull(caller, wanted, tmp_path / "cache")
        assert asked[0] == "bytes=300-399"
    assert contents(folder) == contents(tmp_path / "hf-0")


async def test_an_outage_in_mid_blob_is_sat_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signer: Signer
) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 64)
    wanted = put(tmp_path)
    failures = iter(range(5))

    async def fail(request: Request, data: bytes) -> bytes:
        if "bytes=128-" in request.headers.get("range", "") and next(failures, None) is not None:
            raise RuntimeError("the service falls over")
        return data

    async with meddling(tmp_path / "store", fail) as caller:
        folder = await pull(caller, wanted, tmp_path / "cache")
    assert contents(folder) == contents(tmp_path / "hf-0")


# --- damage --------------------------------------------------------------------------------------


async def test_a_damaged_blob_is_fetched_again(tmp_path: Path) -> None:
    wanted = put(tmp_path)
    damaged: set[str] = set()

    async def once(request: Request, data: bytes) -> bytes:
        if "/blobs/" in request.url.path and request.url.path not in damaged:
            damaged.add(request.url.path)
            return bytes([data[0] ^ 0x80]) + data[1:]
        return data

    async with meddling(tmp_path / "store", once) as caller:
        folder = await pull(caller, wanted, tmp_path / "cache")
    assert len(damaged) == 5
    assert contents(folder) == contents(tmp_path / "hf-0")


@pytest.mark.parametrize("kind", ["manifests", "blobs"])
async def test_every_flipped_byte_on_the_way_is_found(
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
    at = 0

    async def flip(request: Request, data: bytes) -> bytes:
        if request.url.path.endswith(target):
            return data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :]
        return data

    async with meddling(store, flip) as caller:
        for at in range(0, size, 1 if kind == "blobs" else 3):  # noqa: B007 - `flip` reads it
            with pytest.raises(WeightsError, match="another digest"):
                await pull(caller, wanted, tmp_path / "cache")
    assert list((tmp_path / "cache" / "versions").iterdir()) == []


async def test_every_flipped_byte_in_the_cache_is_found_and_repaired(tmp_path: Path) -> None:
    wanted = put(tmp_path)
    async with meddling(tmp_path / "store", as_it_is) as caller:
        folder = await pull(caller, wanted, tmp_path / "cache")
        for name, right in contents(tmp_path / "hf-0").items():
            for at in range(0, len(right), 37):
                os.chmod(folder / name, 0o644)
                with (folder / name).open("r+b") as file:
                    file.seek(at)
                    file.write(bytes([right[at] ^ 4]))
                assert await pull(caller, wanted, tmp_path / "cache") == folder
                assert (folder / name).read_bytes() == right


async def test_a_folder_somebody_changed_is_staged_again(
    tmp_path: Path, caller: AsyncCaller
) -> None:
    wanted = put(tmp_path)
    folder = await pull(caller, wanted, tmp_path / "cache")
    (folder / "config.json").unlink()
    (folder / "modeling.py").write_text("import os")
    assert await pull(caller, wanted, tmp_path / "cache") == folder
    assert contents(folder) == contents(tmp_path / "hf-0")


@pytest.mark.parametrize("change", ["cut", "longer", "empty", "endless"])
async def test_answers_of_the_wrong_length_are_refused(tmp_path: Path, change: str) -> None:
    wanted = put(tmp_path)

    async def touch(request: Request, data: bytes) -> bytes:
        if "/manifests/" in request.url.path:
            return data
        return {
            "cut": data[:-1] or data,
            "longer": data + b"!",
            "empty": b"",
            "endless": bytes(1 << 24),
        }[change]

    async with meddling(tmp_path / "store", touch) as caller:
        if change == "cut":  # a short piece is no lie: the rest is asked for
            folder = await pull(caller, wanted, tmp_path / "cache")
            assert contents(folder) == contents(tmp_path / "hf-0")
            return
        with pytest.raises(WeightsError):
            await pull(caller, wanted, tmp_path / "cache")


async def test_a_manifest_of_something_else_is_refused(tmp_path: Path, caller: AsyncCaller) -> None:
    wanted = put(tmp_path)
    other = PublishedVersion(
        policy=POLICY, incarnation=1, number=5, manifest_digest=wanted.manifest_digest
    )
    with pytest.raises(WeightsError, match="is that of policy number 0"):
        await pull(caller, other, tmp_path / "cache")
    missing = PublishedVersion(policy=POLICY, incarnation=1, number=0, manifest_digest="0" * 64)
    with pytest.raises(WeightsError, match="404"):
        await pull(caller, missing, tmp_path / "cache")
    hostile = PublishedVersion(policy=POLICY, incarnation=1, number=0, manifest_digest="../../x")
    with pytest.raises(WeightsError, match="no BLAKE3 digest"):
        await pull(caller, hostile, tmp_path / "cache")


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
    tmp_path: Path, caller: AsyncCaller, rewrite: Rewrite
) -> None:
    """The files are what their digests say; the manifest lies about what is in them."""
    honest = put(tmp_path)
    store = DirectoryStore(tmp_path / "store")
    manifest = parse_manifest(store.read_manifest(honest.manifest_digest))
    files, tensors = list(manifest.files), list(manifest.tensors)
    rewrite(files, tensors)
    digest = store.put_manifest(encode_manifest(make_manifest(POLICY, 0, files, tensors)))
    wanted = PublishedVersion(policy=POLICY, incarnation=1, number=0, manifest_digest=digest)
    with pytest.raises(WeightsError):
        await pull(caller, wanted, tmp_path / "cache")
    assert list((tmp_path / "cache" / "versions").iterdir()) == []
    folder = await pull(caller, honest, tmp_path / "cache")
    assert contents(folder) == contents(tmp_path / "hf-0")


async def test_a_cache_that_cannot_be_written_is_a_weights_error(
    tmp_path: Path, caller: AsyncCaller
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WeightsError, match=r"pulling policy@1\.0 into"):
        await pull(caller, put(tmp_path), tmp_path / "file" / "cache")


async def test_without_a_credential_nothing_is_pulled(tmp_path: Path, caller: AsyncCaller) -> None:
    wanted = put(tmp_path)
    async with connect(caller.base_url, "nonsense") as stranger:
        with pytest.raises(Unauthorized):
            await pull(stranger, wanted, tmp_path / "cache")


# --- prune ---------------------------------------------------------------------------------------


async def test_pruning_keeps_what_is_kept_and_what_it_shares(
    tmp_path: Path, caller: AsyncCaller
) -> None:
    cache = tmp_path / "cache"
    versions = [put(tmp_path, seed, seed) for seed in range(3)]
    folders = [await pull(caller, each, cache) for each in versions]
    (cache / "versions" / ".left-by-a-killed-pull").mkdir()
    prune(cache, {versions[2].manifest_digest})
    assert [folder.exists() for folder in folders] == [False, False, True]
    assert contents(folders[2]) == contents(tmp_path / "hf-2")
    assert len(list((cache / "versions").iterdir())) == 1
    assert len(list((cache / "blobs").iterdir())) == 5


async def test_pruning_deletes_nothing_under_a_running_pull(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first, second = put(tmp_path, 0, 0), put(tmp_path, 1, 1)
    is_slow = False

    async def slow(request: Request, data: bytes) -> bytes:
        if is_slow and "/blobs/" in request.url.path:
            await asyncio.sleep(0.2)
        return data

    async with meddling(tmp_path / "store", slow) as caller:
        folder = await pull(caller, first, cache)
        is_slow = True
        running = asyncio.create_task(pull(caller, second, cache))
        await asyncio.sleep(0.1)
        prune(cache, set())
        assert folder.exists()
        assert contents(await running) == contents(tmp_path / "hf-1")
    prune(cache, {second.manifest_digest})
    assert not folder.exists()


async def test_a_partial_worth_resuming_survives_pruning(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    fresh, old = (tmp_path / "blobs" / f"{digit * 64}.partial" for digit in "ab")
    fresh.write_bytes(b"1")
    old.write_bytes(b"1")
    os.utime(old, (0, 0))
    prune(tmp_path, set())
    assert fresh.exists()
    assert not old.exists()
