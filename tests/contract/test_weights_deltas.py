# SPDX-License-Identifier: Apache-2.0
"""Versions pulled as deltas: the same bytes as the full file, a fraction of them on the wire, and
the full file whenever a delta fails."""

from __future__ import annotations

import asyncio
import os
import random
import time
from pathlib import Path

import pytest
import zstandard
from starlette.requests import Request
from tests.unit.weights.round_trips import long_link
from tests.unit.weights.snapshot_folders import contents, weights_bytes
from tests.unit.weights.weight_servers import (
    listening,
    put_folder,
    running_weight_server,
    tampering_server,
)

from penstock.types import PublishedVersion
from penstock.weights.client import Puller, open_weight_server
from penstock.weights.manifest import MAX_MANIFEST_BYTES, FileEntry, parse_manifest
from penstock.weights.pulling import links as module
from penstock.weights.serving.origin import Origin
from penstock.weights.serving.server import build
from penstock.weights.store import DirectoryStore
from penstock.weights.update import Update, unpack_manifest
from penstock.wire.auth import Audience, Role, Signer
from penstock.wire.certificates import Authority
from penstock.wire.codec import decode, encode

WEIGHTS = "model.safetensors"
SHAPES = {"a.weight": (200, 300), "b.weight": (300,), "c.weight": (40_000,)}


def write_version(folder: Path, number: int, share: float = 0.01) -> Path:
    """Version 0, with a few more changes for each number."""
    folder.mkdir(parents=True)
    data = bytearray(weights_bytes(SHAPES, 1))
    start = data.index(b"}}") + 2
    draw = random.Random(0)
    for _ in range(number * int(share * (len(data) - start) / 4)):
        data[draw.randrange(start, len(data)) & ~3] ^= 1
    (folder / WEIGHTS).write_bytes(bytes(data))
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    return folder


def versions(tmp_path: Path, num: int) -> list[PublishedVersion]:
    """Each with a delta from the previous one."""
    found: list[PublishedVersion] = []
    for number in range(num):
        folder = write_version(tmp_path / f"hf-{number}", number)
        after = found[-1] if found else None
        found.append(put_folder(tmp_path, folder, number, after))
    return found


def weights_file(tmp_path: Path, version: PublishedVersion) -> FileEntry:
    data = DirectoryStore(tmp_path / "store").read_manifest(version.manifest_digest)
    return next(file for file in parse_manifest(data).files if file.name == WEIGHTS)


async def test_only_changes_travel(tmp_path: Path) -> None:
    num_bytes: list[int] = []

    async def count(request: Request, data: bytes) -> bytes:
        num_bytes.append(len(data))
        return data

    made = versions(tmp_path, 4)
    async with tampering_server(tmp_path / "store", count) as caller:
        await Puller(tmp_path / "cache").pull([caller], made[0])
        whole = sum(num_bytes)
        for number in (1, 3):  # one step, then two together
            num_bytes.clear()
            folder = await Puller(tmp_path / "cache").pull([caller], made[number])
            assert contents(folder) == contents(tmp_path / f"hf-{number}")
            assert sum(num_bytes) < whole / 10
    assert not list((tmp_path / "cache").rglob("*.partial"))


async def test_the_real_server_offers_deltas(tmp_path: Path) -> None:
    made = versions(tmp_path, 3)
    fetched = tmp_path / "cache" / "blobs"
    async with running_weight_server(tmp_path) as caller:
        await Puller(tmp_path / "cache").pull([caller], made[0])
        folder = await Puller(tmp_path / "cache").pull([caller], made[2])
    assert contents(folder) == contents(tmp_path / "hf-2")
    store = DirectoryStore(tmp_path / "store")
    target = weights_file(tmp_path, made[2]).blob
    [step] = store.deltas_to(target)
    assert (fetched / step.blob).exists(), "it came as a delta"


def write_large_version(folder: Path, number: int) -> Path:
    """2 MB of weights, of which each version changes a tenth."""
    folder.mkdir(parents=True)
    data = bytearray(weights_bytes({"a.weight": (500, 1000)}, 1))
    part = len(data) // 10
    for version in range(1, number + 1):
        data[version * part : (version + 1) * part] = random.Random(version).randbytes(part)
    (folder / WEIGHTS).write_bytes(bytes(data))
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    return folder


async def test_a_delta_takes_two_round_trips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handshakes and slow start included; five minutes after the version before it, too. One names
    manifest and deltas, one brings the bytes: a link of 300 ms makes each dear."""
    made: list[PublishedVersion] = []
    for number in range(4):
        folder = write_large_version(tmp_path / f"hf-{number}", number)
        made.append(put_folder(tmp_path, folder, number, made[-1] if made else None))
    authority = Authority.create(tmp_path / "tls")
    tls = authority.issue("weights", ["127.0.0.1"], days=1)
    monkeypatch.setenv("PENSTOCK_CA", str(authority.certificate))
    signer = Signer.create(tmp_path / "keys", "run")
    app = build(Origin(DirectoryStore(tmp_path / "store")), signer.verifier(Audience.WEIGHTS))
    token = signer.mint(Role.ROLLOUT, [Audience.WEIGHTS], ttl_s=3600)
    clock, ahead_s = time.monotonic, 0
    monkeypatch.setattr(time, "monotonic", lambda: clock() + ahead_s)
    async with listening(app, tls) as url, long_link(int(url.rpartition(":")[2])) as (link, port):
        caller = open_weight_server(f"https://127.0.0.1:{port}", token)
        try:
            await Puller(tmp_path / "cache").pull([caller], made[0])
            for number in (1, 2, 3):
                ahead_s += 300
                link.rest()
                num_before = link.num_round_trips
                folder = await Puller(tmp_path / "cache").pull([caller], made[number])
                assert link.num_round_trips - num_before == 2
                assert contents(folder) == contents(tmp_path / f"hf-{number}")
                target = weights_file(tmp_path, made[number]).blob
                [step] = DirectoryStore(tmp_path / "store").deltas_to(target)
                assert step.bytes > 150_000
        finally:
            await caller.close()


@pytest.mark.parametrize("spoil", ["bits", "size", "no size", "other weights", "chains"])
async def test_a_spoiled_update_is_not_believed(tmp_path: Path, spoil: str) -> None:
    made = versions(tmp_path, 2)
    other = put_folder(tmp_path, write_version(tmp_path / "other", 2), 1)
    asked: list[str] = []

    async def meddle(request: Request, data: bytes) -> bytes:
        asked.append(request.path_params["kind"])
        if asked[-1] != "updates":
            return data
        update = decode(data, Update)
        manifest = unpack_manifest(update)
        if spoil == "bits":
            manifest = manifest[:-20] + b"x" * 20
        elif spoil == "other weights":
            manifest = DirectoryStore(tmp_path / "store").read_manifest(other.manifest_digest)
        frame = zstandard.compress(manifest)
        if spoil == "size":
            frame = zstandard.compress(b" " * (MAX_MANIFEST_BYTES + 1))
        elif spoil == "no size":
            frame = zstandard.ZstdCompressor(write_content_size=False).compress(manifest)
        chains = {blob: (*steps, *steps) for blob, steps in update.chains.items()}
        return encode(Update(manifest=frame, chains=chains))

    async with tampering_server(tmp_path / "store", meddle) as caller:
        await Puller(tmp_path / "cache").pull([caller], made[0])
        folder = await Puller(tmp_path / "cache").pull([caller], made[1])
    assert contents(folder) == contents(tmp_path / "hf-1")
    assert ("manifests" in asked[asked.index("updates") :]) == (spoil != "chains")


@pytest.mark.parametrize("spoil", ["delta", "base", "chain"])
async def test_a_failed_delta_costs_only_its_bytes(tmp_path: Path, spoil: str) -> None:
    made = versions(tmp_path, 2)
    file = weights_file(tmp_path, made[1])
    [step] = DirectoryStore(tmp_path / "store").deltas_to(file.blob)

    async def meddle(request: Request, data: bytes) -> bytes:
        kind = request.path_params["kind"]
        if spoil == "delta" and step.blob in request.url.path:
            return data[:-9] + bytes(9)
        if spoil == "chain" and kind in ("deltas", "updates"):
            return data.replace(step.blob.encode(), file.blob.encode())
        return data

    async with tampering_server(tmp_path / "store", meddle) as caller:
        await Puller(tmp_path / "cache").pull([caller], made[0])
        if spoil == "base":
            path = tmp_path / "cache" / "blobs" / weights_file(tmp_path, made[0]).blob
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            os.chmod(path, 0o644)
            path.write_bytes(data)
        folder = await Puller(tmp_path / "cache").pull([caller], made[1])
    assert contents(folder) == contents(tmp_path / "hf-1")


async def test_a_server_without_deltas_sends_the_full_file(tmp_path: Path) -> None:
    made = versions(tmp_path, 2)
    for path in (tmp_path / "store" / "deltas").rglob("*.json"):
        path.unlink()
    async with running_weight_server(tmp_path) as caller:
        folders = [await Puller(tmp_path / "cache").pull([caller], version) for version in made]
    assert contents(folders[1]) == contents(tmp_path / "hf-1")


async def test_a_server_failing_on_deltas_costs_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older server, or one that fails for deltas only."""
    monkeypatch.setattr(module, "QUERY_TIMEOUT_S", 0.1)

    async def fail(request: Request, data: bytes) -> bytes:
        if request.path_params["kind"] in ("deltas", "updates"):
            raise RuntimeError("no such thing")
        return data

    made = versions(tmp_path, 2)
    async with tampering_server(tmp_path / "store", fail) as caller, asyncio.timeout(60):
        folders = [await Puller(tmp_path / "cache").pull([caller], version) for version in made]
    assert contents(folders[1]) == contents(tmp_path / "hf-1")


def test_another_layout_has_no_delta(tmp_path: Path) -> None:
    """A renamed parameter, with all file sizes unchanged."""
    first = put_folder(tmp_path, write_version(tmp_path / "hf-0", 0), 0)
    folder = write_version(tmp_path / "hf-1", 1)
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data.replace(b"a.weight", b"z.weight"))
    second = put_folder(tmp_path, folder, 1, first)
    blob = weights_file(tmp_path, second).blob
    assert not DirectoryStore(tmp_path / "store").deltas_to(blob)
