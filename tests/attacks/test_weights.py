# SPDX-License-Identifier: Apache-2.0
"""What one reader of weights asks for does not hold up the others, nor what a relay answers its
node."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx2
import pytest
from tests.contract.test_weight_server import bearer, http, manifest_digest, signer
from tests.unit.weights.version_history import VersionHistory

from penstock.errors import BadRequest, Unreachable
from penstock.types import PolicyName, PublishedVersion
from penstock.weights import client, update
from penstock.weights.deltas.chain import DeltaEntry
from penstock.weights.manifest import SnapshotManifest, digest_of, parse_manifest
from penstock.weights.retention import execute_plan, plan_deletion
from penstock.weights.serving import origin, rebuilt, server
from penstock.weights.serving.origin import Origin
from penstock.weights.store import DirectoryStore
from penstock.weights.update import Chains, Update, pack_manifest, read_update
from penstock.wire.auth import Audience, Role, Signer
from penstock.wire.codec import encode

__all__ = ["http", "signer"]


async def test_a_manifest_is_packed_once_and_not_in_the_loop(
    tmp_path: Path, signer: Signer, http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a mixture with 90,000 tensors it takes half a second: two readers that asked again and
    again had the server, for all nodes."""
    threads: list[int] = []

    def parse(data: bytes) -> SnapshotManifest:
        threads.append(threading.get_ident())
        return parse_manifest(data)

    monkeypatch.setattr(server, "parse_manifest", parse)
    path = f"/v1/updates/{manifest_digest(tmp_path)}?from="
    asked = [http.get(path + f"{n:064x}", headers=bearer(signer)) for n in range(20)]
    answers = await asyncio.gather(*asked)
    assert {one.status_code for one in answers} == {200}
    assert len({one.content for one in answers}) == 1
    assert len(threads) == 1 and threads != [threading.get_ident()]


def again_and_again(name: str, value: object, num_bytes: int) -> bytes:
    one = encode(name) + encode(value)
    times = num_bytes // len(one)
    return b"\xdf" + (1 + times).to_bytes(4, "big") + encode("manifest") + encode(b"") + one * times


@pytest.mark.parametrize("name", ["chains", "manifest", "unknown"])
def test_an_update_of_very_many_parts_is_not_built(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relay may answer with 256 MB: chains that stood there again and again took the event loop
    of a node for eight seconds."""
    chains: dict[str, list[object]] = {f"{n:064x}": [] for n in range(50)}
    value: object = b"" if name == "manifest" else chains
    data = again_and_again(name, value, update.MAX_CHAINS_BYTES + 10_000)
    monkeypatch.setattr(update, "Update", None)
    with pytest.raises(BadRequest, match="beside its manifest"):
        read_update(data, digest_of(b""))


async def test_an_update_is_unpacked_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some kilobytes of zeros are 256 MB, whose digest is wrong."""
    threads: list[int] = []

    def read(data: bytes, digest: str) -> tuple[bytes, Chains]:
        threads.append(threading.get_ident())
        return read_update(data, digest)

    monkeypatch.setattr(client, "read_update", read)

    class Server:
        def no_slower(self, num_bytes: int) -> None:
            raise Unreachable("it is asked for the manifest alone")

        async def ask(self, path: str, max_bytes: int) -> httpx2.Response:
            packed = pack_manifest(bytes(1 << 20))
            return httpx2.Response(200, content=encode(Update(manifest=packed)))

    target = PublishedVersion(
        policy=PolicyName("p"), incarnation=1, number=0, manifest_digest=digest_of(b"")
    )
    fetch = client._fetch_version  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(Unreachable, match="alone"):
        await fetch(cast(Any, Server()), target, ["0" * 64])
    assert len(threads) == 1 and threads != [threading.get_ident()]


class Blob:
    """Counts what is read of it, and how often it is open."""

    num_bytes = 64 << 20

    def __init__(self) -> None:
        self.num_read = self.num_open = 0

    async def read(self, start: int, num_bytes: int) -> bytes:
        self.num_read += num_bytes
        return bytes(num_bytes)

    async def close(self) -> None:
        self.num_open -= 1


class Blobs:
    def __init__(self) -> None:
        self.found = Blob()

    async def blob(self, digest: str) -> Blob:
        self.found.num_open += 1
        return self.found

    async def close(self) -> None:
        pass


async def test_downloads_that_nobody_reads_hold_little(signer: Signer) -> None:
    """Each held two pieces of 1 MB: 1,200 of one token held 2.4 GB. Few get such pieces now, more
    share them, and another credential has its own."""
    source, is_gone, num_started = Blobs(), asyncio.Event(), 0
    app = server.build(cast(Any, source), signer.verifier(Audience.WEIGHTS))
    blob, path = source.found, f"/v1/blobs/{'0' * 64}"

    async def call(subject: str) -> None:
        token = signer.mint(Role.ROLLOUT, [Audience.WEIGHTS], ttl_s=600, subject=subject)
        headers = [(b"authorization", f"Bearer {token}".encode())]
        scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode()}
        has_piece = False

        async def receive() -> dict[str, Any]:
            await is_gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            nonlocal num_started, has_piece
            num_started += message["type"] == "http.response.start"
            if has_piece:  # a connection waits here until the piece before is read
                await is_gone.wait()
            has_piece = bool(message.get("body"))

        await app({**scope, "query_string": b"", "headers": headers}, cast(Any, receive), send)

    async def turns() -> None:
        for _ in range(2000):
            await asyncio.sleep(0)

    num_calls = server.MAX_DOWNLOADS + 50
    calls = [asyncio.create_task(call("greedy")) for _ in range(num_calls)]
    await turns()
    assert num_started == blob.num_open == server.MAX_DOWNLOADS
    assert blob.num_read < 128 << 20
    before = blob.num_read
    calls.append(asyncio.create_task(call("other")))
    await turns()
    assert blob.num_read == before + server.PIECE_BYTES
    is_gone.set()
    await asyncio.gather(*calls)
    assert num_started == num_calls + 1 and blob.num_open == 0, "all had their turn"


async def test_questions_about_chains_hold_up_no_other_credential(
    tmp_path: Path, signer: Signer, http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reads every entry of a chain in a thread. They had all threads: a manifest for another
    node took four seconds instead of two milliseconds, beside 100 connections."""
    loop, may_go_on = asyncio.get_running_loop(), threading.Event()
    arrived: dict[str, asyncio.Event] = {name * 64: asyncio.Event() for name in "ef"}
    looked_up: list[str] = []

    def deltas_to(store: object, target: str) -> list[DeltaEntry]:
        looked_up.append(target)
        may_go_on.wait(20)
        return []

    real = Origin.chain

    async def chain(origin: Origin, target: str, num_bytes: int, have: list[str]) -> Any:
        loop.call_soon(arrived[target].set)
        return await real(origin, target, num_bytes, have)

    monkeypatch.setattr(DirectoryStore, "deltas_to", deltas_to)
    monkeypatch.setattr(Origin, "chain", chain)

    def ask(target: str, subject: str) -> asyncio.Task[httpx2.Response]:
        token = signer.mint(Role.ROLLOUT, [Audience.WEIGHTS], ttl_s=600, subject=subject)
        path = f"/v1/deltas/{target}?bytes=1&from={'0' * 64}"
        return asyncio.create_task(http.get(path, headers={"authorization": f"Bearer {token}"}))

    asked = [ask("e" * 64, "greedy") for _ in range(2 * server.MAX_QUESTIONS)]
    await arrived["e" * 64].wait()
    answer = await http.get(f"/v1/manifests/{manifest_digest(tmp_path)}", headers=bearer(signer))
    assert answer.status_code == 200 and not any(task.done() for task in asked)
    asked.append(ask("f" * 64, "other"))
    await arrived["f" * 64].wait()
    may_go_on.set()
    await asyncio.gather(*asked)
    assert looked_up.index("f" * 64) <= 2 * server.MAX_QUESTIONS, "two folders for each"


# --- old versions -----------------------------------------------------------------------------


@pytest.fixture
def history(tmp_path: Path) -> VersionHistory:
    """Ten versions, of which the first and the last are stored in full."""
    history = VersionHistory(tmp_path / "old" / "store")
    history.add_versions(10)
    in_use = [history.digest(number) for number in range(10)]
    with history.store.deleting():
        execute_plan(history.store, plan_deletion(history.store, in_use, in_use[-1:]))
    return history


def num_bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def set_room(monkeypatch: pytest.MonkeyPatch, folder: Path, num_bytes: int) -> None:
    """What is rebuilt may take half of it."""

    def usage(_: object) -> object:
        return SimpleNamespace(free=num_bytes - num_bytes_in(folder / "blobs"))

    monkeypatch.setattr(rebuilt.shutil, "disk_usage", usage)


async def test_reads_of_old_versions_do_not_fill_the_disk(
    history: VersionHistory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One byte of each old version had all of them rebuilt in the store, and each pair of versions
    that are far apart a merged delta; the trainer could not delete them while they were read."""
    folder, file = history.store.rebuilt_folder, history.file(0)
    stored = {*history.store.blobs()}, [*history.store.deltas()]
    set_room(monkeypatch, folder, 5 * file.bytes)
    source = Origin(history.store)
    for base in range(10):
        for target in range(base + 4, 10):
            await source.chain(history.file(target).blob, 1 << 40, [history.file(base).blob])
    for number in range(10):
        await (await source.blob(history.file(number).blob)).close()
        assert num_bytes_in(folder / "blobs") <= 2.5 * file.bytes
    kept = {path.name for path in (folder / "blobs").iterdir()}
    assert {history.file(7).blob, history.file(8).blob} <= kept, "read last"
    assert stored == ({*history.store.blobs()}, [*history.store.deltas()])
    set_room(monkeypatch, folder, file.bytes)
    with pytest.raises(Unreachable, match="no room") as caught:
        await source.blob(history.file(3).blob)
    assert caught.value.retry_after_s
    await source.close()


async def test_a_rebuild_does_not_delay_deletion_and_few_wait(
    history: VersionHistory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer found the lock taken, again and again."""
    may_go_on, real = threading.Event(), rebuilt.apply_chain

    def apply_chain(*args: Any) -> None:
        may_go_on.wait(20)
        real(*args)

    monkeypatch.setattr(rebuilt, "apply_chain", apply_chain)
    monkeypatch.setattr(origin, "JOB_WAIT_S", 0.05)
    monkeypatch.setattr(origin, "MAX_JOBS", 3)
    source, messages = Origin(history.store), list[str]()
    for number in range(1, 6):
        with pytest.raises(Unreachable) as caught:
            await source.blob(history.file(number).blob)
        assert caught.value.retry_after_s
        messages.append(str(caught.value))
    assert ["3 files" in message for message in messages] == [False] * 3 + [True] * 2
    with history.store.deleting() as has_lock:
        assert has_lock
    may_go_on.set()
    await source.close()
