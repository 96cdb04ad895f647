# SPDX-License-Identifier: Apache-2.0
"""A server over a store that keeps few full files: every version in use can still be read."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from blake3 import blake3
from tests.unit.weights.version_history import VersionHistory
from tests.unit.weights.weight_servers import running_weight_server

from penstock.errors import NotFound, Unreachable
from penstock.weights import retention
from penstock.weights import store as store_module
from penstock.weights.deltas.chain import DeltaChain
from penstock.weights.retention import execute_plan, plan_deletion
from penstock.weights.serving import origin as module
from penstock.weights.serving.origin import Origin
from penstock.weights.serving.rebuilt import Rebuilt
from penstock.weights.store import DirectoryStore
from penstock.wire.client import AsyncServiceClient


@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VersionHistory:
    """Eight versions in use; the first and the last are stored in full."""
    monkeypatch.setattr(retention, "GRACE_S", -1.0)
    history = VersionHistory(tmp_path / "store", share=0.2)
    history.add_versions(8)
    with history.store.deleting():
        in_use = [history.digest(number) for number in range(8)]
        execute_plan(history.store, plan_deletion(history.store, in_use, in_use[-1:]))
    assert history.whole() == [0, 7]
    return history


async def ask_way(
    caller: AsyncServiceClient, history: VersionHistory, base: int, target: int
) -> DeltaChain:
    file = history.file(target)
    path = f"/v1/deltas/{file.blob}?bytes={file.bytes}&from={history.file(base).blob}"
    return await caller.call("GET", path, None, DeltaChain)


async def test_a_missing_full_file_is_rebuilt_and_kept(
    history: VersionHistory, tmp_path: Path
) -> None:
    file = history.file(4)
    async with running_weight_server(tmp_path) as caller:
        answer = await caller.request("GET", f"/v1/blobs/{file.blob}")
    assert blake3(answer.content).hexdigest() == file.blob
    assert (history.store.rebuilt_folder / "blobs" / file.blob).exists()


async def test_it_is_rebuilt_once_for_all_requests(
    history: VersionHistory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    real = DirectoryStore.make_blob

    def make(store: DirectoryStore, digest: str, fill: object) -> None:
        made.append(digest)
        real(store, digest, fill)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(DirectoryStore, "make_blob", make)
    file = history.file(5)
    async with running_weight_server(tmp_path) as caller:
        asking = [caller.request("GET", f"/v1/blobs/{file.blob}") for _ in range(8)]
        answers = await asyncio.gather(*asking)
    assert made == [file.blob]
    assert {blake3(answer.content).hexdigest() for answer in answers} == {file.blob}


async def test_clients_far_behind_get_one_delta(history: VersionHistory, tmp_path: Path) -> None:
    async with running_weight_server(tmp_path) as caller:
        (entry,) = (await ask_way(caller, history, 1, 7)).steps
        near = (await ask_way(caller, history, 5, 7)).steps
    assert (entry.base, entry.target) == (history.file(1).blob, history.file(7).blob)
    assert len(near) == 2, "few steps are not worth a delta of their own"


async def test_requests_wait_only_briefly_for_a_merge(
    history: VersionHistory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = threading.Event()
    real = Rebuilt.merge

    def slow(rebuilt: Rebuilt, base: str, target: str, num_bytes: int) -> None:
        may_go_on.wait(60)
        real(rebuilt, base, target, num_bytes)

    monkeypatch.setattr(Rebuilt, "merge", slow)
    monkeypatch.setattr(module, "JOB_WAIT_S", 0.05)
    async with running_weight_server(tmp_path) as caller:
        assert len((await ask_way(caller, history, 1, 7)).steps) == 6
        may_go_on.set()
        async with asyncio.timeout(60):
            while len((await ask_way(caller, history, 1, 7)).steps) > 1:
                pass


async def test_early_requests_get_retry_after(
    history: VersionHistory, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = threading.Event()
    real = Rebuilt.rebuild

    def slow(rebuilt: Rebuilt, digest: str) -> Path:
        may_go_on.wait(60)
        return real(rebuilt, digest)

    monkeypatch.setattr(Rebuilt, "rebuild", slow)
    monkeypatch.setattr(module, "JOB_WAIT_S", 0.05)
    source = Origin(history.store)
    with pytest.raises(Unreachable) as caught:
        await source.blob(history.file(3).blob)
    assert caught.value.retry_after_s
    may_go_on.set()
    await source.close()


async def test_a_damaged_delta_is_not_used(history: VersionHistory) -> None:
    (entry,) = history.store.deltas_to(history.file(1).blob)
    path = history.store.blob_path(entry.blob)
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-9])
    source = Origin(history.store)
    with pytest.raises(NotFound):
        await source.blob(history.file(2).blob)
    await source.close()


async def test_blobs_are_kept_until_their_readers_finish(
    history: VersionHistory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a slow link many versions are published during one transfer; the blob being read is
    kept."""
    file = history.file(0)

    def sweep() -> None:
        with history.store.deleting():
            execute_plan(history.store, plan_deletion(history.store, [], [history.digest(7)]))

    async with running_weight_server(tmp_path) as caller:
        path = f"/v1/blobs/{file.blob}"
        first = await caller.request("GET", path, headers={"range": "bytes=0-999"})
        sweep()
        rest = await caller.request("GET", path, headers={"range": "bytes=1000-"})
    assert blake3(first.content + rest.content).hexdigest() == file.blob
    monkeypatch.setattr(store_module, "READ_WINDOW_S", -1.0)
    sweep()
    assert not history.store.has_blob(file.blob)
