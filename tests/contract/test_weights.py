# SPDX-License-Identifier: Apache-2.0
"""Put and pull over HTTP on loopback: stored data is pulled intact, despite failures."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from starlette.requests import Request
from tests.unit.weights.snapshot_folders import contents
from tests.unit.weights.weight_servers import put, running_weight_server, tampering_server

from penstock.types import PublishedVersion
from penstock.weights.client import Puller
from penstock.weights.pulling import partial as module
from penstock.weights.tensors import Scan
from penstock.wire.client import AsyncServiceClient


@pytest.fixture
async def caller(tmp_path: Path) -> AsyncGenerator[AsyncServiceClient]:
    async with running_weight_server(tmp_path) as caller:
        yield caller


async def test_a_stored_version_is_pulled(tmp_path: Path, caller: AsyncServiceClient) -> None:
    wanted = put(tmp_path)
    folder = await Puller(tmp_path / "cache").pull([caller], wanted)
    assert contents(folder) == contents(tmp_path / "hf-0")
    assert await Puller(tmp_path / "cache").pull([caller], wanted) == folder
    assert len(list((tmp_path / "cache" / "versions").iterdir())) == 1


async def test_unchanged_files_are_fetched_once(tmp_path: Path) -> None:
    asked: list[str] = []

    async def note(request: Request, data: bytes) -> bytes:
        asked.append(request.url.path)
        return data

    first, second = put(tmp_path, 0, 0), put(tmp_path, 1, 1)
    async with tampering_server(tmp_path / "store", note) as caller:
        await Puller(tmp_path / "cache").pull([caller], first)
        assert len(asked) == 1 + 5
        asked.clear()
        folder = await Puller(tmp_path / "cache").pull([caller], second)
        assert [path.split("/")[2] for path in asked] == ["updates", "blobs"]
    assert contents(folder) == contents(tmp_path / "hf-1")
    assert contents(tmp_path / "cache" / "versions" / first.manifest_digest) == contents(
        tmp_path / "hf-0"
    )


async def test_many_pulls_may_share_a_cache(tmp_path: Path, caller: AsyncServiceClient) -> None:
    wanted = [put(tmp_path, seed, seed) for seed in range(4)] * 3
    folders = await asyncio.gather(
        *(Puller(tmp_path / "cache").pull([caller], each) for each in wanted)
    )
    for each, folder in zip(wanted, folders, strict=True):
        assert contents(folder) == contents(tmp_path / f"hf-{each.number}")
    left = {path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    assert not [name for name in left if name.endswith(".partial")]


async def test_an_outage_in_mid_blob_is_sat_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MIN_PIECE_BYTES", 64)
    wanted = put(tmp_path)
    failures = iter(range(5))

    async def fail(request: Request, data: bytes) -> bytes:
        if "bytes=128-" in request.headers.get("range", "") and next(failures, None) is not None:
            raise RuntimeError("the service falls over")
        return data

    async with tampering_server(tmp_path / "store", fail) as caller:
        folder = await Puller(tmp_path / "cache").pull([caller], wanted)
    assert contents(folder) == contents(tmp_path / "hf-0")


async def test_pruning_keeps_kept_versions_and_shared_blobs(
    tmp_path: Path, caller: AsyncServiceClient
) -> None:
    cache = tmp_path / "cache"
    versions = [put(tmp_path, seed, seed) for seed in range(3)]
    folders = [await Puller(cache).pull([caller], each) for each in versions]
    (cache / "versions" / ".left-by-a-killed-pull").mkdir()
    Puller(cache).prune({versions[2].manifest_digest})
    assert [folder.exists() for folder in folders] == [False, False, True]
    assert contents(folders[2]) == contents(tmp_path / "hf-2")
    assert len(list((cache / "versions").iterdir())) == 1
    assert len(list((cache / "blobs").iterdir())) == 5


async def test_pruning_deletes_nothing_under_a_running_pull(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first, second = put(tmp_path, 0, 0), put(tmp_path, 1, 1)
    is_slow, is_asked, may_answer = False, asyncio.Event(), asyncio.Event()

    async def slow(request: Request, data: bytes) -> bytes:
        if is_slow and "/blobs/" in request.url.path:
            is_asked.set()
            await may_answer.wait()
        return data

    async with tampering_server(tmp_path / "store", slow) as caller:
        folder = await Puller(cache).pull([caller], first)
        is_slow = True
        running = asyncio.create_task(Puller(cache).pull([caller], second))
        await asyncio.wait_for(is_asked.wait(), 60)
        Puller(cache).prune(set())
        assert folder.exists()
        may_answer.set()
        assert contents(await running) == contents(tmp_path / "hf-1")
    Puller(cache).prune({second.manifest_digest})
    assert not folder.exists()


async def test_a_partial_worth_resuming_survives_pruning(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    fresh, old = (tmp_path / "blobs" / f"{digit * 64}.partial" for digit in "ab")
    fresh.write_bytes(b"1")
    old.write_bytes(b"1")
    os.utime(old, (0, 0))
    Puller(tmp_path).prune(set())
    assert fresh.exists()
    assert not old.exists()


async def test_on_one_machine_files_are_linked_and_verified_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def note(request: Request, data: bytes) -> bytes:
        asked.append(request.url.path.split("/")[2])
        return data

    scans: list[str] = []
    real = module.scan

    def counted(source: BinaryIO, name: str, *more: Any, **options: Any) -> Scan:
        scans.append(name)
        return real(source, name, *more, **options)

    monkeypatch.setattr(module, "scan", counted)
    wanted, store = put(tmp_path), tmp_path / "store"
    puller = Puller(tmp_path / "cache", store_root=store)
    async with tampering_server(store, note) as caller:
        folder = await puller.pull([caller], wanted)
    assert asked == ["manifests"]
    assert contents(folder) == contents(tmp_path / "hf-0")
    assert sorted(scans) == sorted(contents(folder))
    assert all(path.stat().st_nlink == 3 for path in folder.iterdir()), "store, cache and version"
    puller.prune(set())
    assert not list((tmp_path / "cache" / "blobs").iterdir()), "other links do not keep it"


async def test_a_damaged_file_is_not_linked(tmp_path: Path) -> None:
    wanted, store = put(tmp_path), tmp_path / "store"
    good = put_in(tmp_path / "other")
    assert good.manifest_digest == wanted.manifest_digest
    largest = max((store / "blobs").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[-1] ^= 1
    largest.unlink()
    largest.write_bytes(content)
    async with running_weight_server(tmp_path / "other") as caller:
        folder = await Puller(tmp_path / "cache", store_root=store).pull([caller], wanted)
    assert contents(folder) == contents(tmp_path / "hf-0")


def put_in(folder: Path) -> PublishedVersion:
    folder.mkdir()
    return put(folder)
