# SPDX-License-Identifier: Apache-2.0
"""Relays over HTTP, alone and in a tree: correct bytes or none, one copy from the origin, tokens
that are useless elsewhere, and nodes that survive their failure."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest
from tests.contract.dataflow_server import dataflow, free_port, serving, small_config
from tests.unit.weights.relay_doubles import CHUNK, TamperingSource, flip, origin, put_blob
from tests.unit.weights.snapshot_folders import contents, weights_bytes, write_folder
from tests.unit.weights.weight_servers import listening, put, put_folder

from penstock.errors import WeightsError
from penstock.fleet.run_folder import RunFolder
from penstock.rollout.peer_relay import PeerRelayConfig, PeerRelayFetcher
from penstock.rollout.weight_loader import WeightServerFetcher
from penstock.types import PublishedVersion
from penstock.weights.client import Puller
from penstock.weights.serving.piece_cache import PIECE_BYTES
from penstock.weights.serving.relay import Relay
from penstock.weights.serving.server import build
from penstock.wire.auth import Audience, Role, Signer
from penstock.wire.client import AsyncServiceClient, connect

ROOT = Path(__file__).parents[2]
SHAPES = {"model.layers.0.weight": (1024, 512), "lm_head.weight": (1024, 513)}
"""Four megabytes: several pieces of a relay, and more than one file."""


def put_large(tmp_path: Path, seed: int = 0, number: int = 0) -> PublishedVersion:
    folder = write_folder(tmp_path / f"large-{seed}", seed)
    (folder / "model-00002-of-00002.safetensors").write_bytes(weights_bytes(SHAPES, seed))
    return put_folder(tmp_path, folder, number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run's tokens, as its folder mints them."""

    folder: RunFolder
    signer: Signer

    @property
    def node(self) -> str:
        return self.folder.token(self.signer.run, Role.ROLLOUT, ttl_s=600)

    @property
    def relay(self) -> str:
        return self.folder.token(self.signer.run, Role.RELAY, ttl_s=600)

    @property
    def for_relay(self) -> str:
        return self.folder.relay_token(self.signer.run, Role.ROLLOUT, ttl_s=600)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    signer = Signer.create(tmp_path / "keys", small_config().name)
    return Run(folder=RunFolder(tmp_path), signer=signer)


@asynccontextmanager
async def served(run: Run, source: TamperingSource) -> AsyncGenerator[str]:
    async with listening(build(source, run.signer.verifier(Audience.WEIGHTS))) as url:
        yield url


@asynccontextmanager
async def relayed(run: Run, cache: Path, *upstreams: str) -> AsyncGenerator[str]:
    callers = [AsyncServiceClient(url, run.relay) for url in upstreams]
    source = Relay(callers, cache, max_bytes=1 << 30)
    async with listening(build(source, run.signer.verifier(Audience.RELAY))) as url:
        yield url
    for caller in callers:
        await caller.close()


# --- tokens -----------------------------------------------------------------------------------


async def test_a_token_for_a_relay_is_useless_elsewhere(tmp_path: Path, run: Run) -> None:
    manifest = f"/v1/manifests/{put(tmp_path).manifest_digest}"
    with dataflow(tmp_path, small_config()) as running:
        async with (
            served(run, origin(tmp_path / "store")) as weight_server_url,
            relayed(run, tmp_path / "relay", weight_server_url) as relay_url,
            httpx2.AsyncClient(timeout=60) as http,
        ):

            async def status(token: str, url: str, method: str = "GET") -> int:
                headers = {"authorization": f"Bearer {token}"}
                return (await http.request(method, url, headers=headers)).status_code

            assert await status(run.for_relay, relay_url + manifest) == 200
            assert await status(run.for_relay, weight_server_url + manifest) == 403
            assert await status(run.relay, relay_url + manifest) == 200
            assert await status(run.relay, weight_server_url + manifest) == 200
            assert await status(run.node, weight_server_url + manifest) == 200
            assert await status(run.node, relay_url + manifest) == 403
            headers = {"authorization": f"Bearer {running.token(Role.ADMIN)}"}
            document = (await http.get(f"{running.url}/openapi.json", headers=headers)).json()
            routes = [
                (method.upper(), path.replace("{", "").replace("}", ""))
                for path, operations in document["paths"].items()
                for method in operations
                if path != "/healthz"
            ]
            assert len(routes) > 10
            for method, path in routes:
                for token in (run.for_relay, run.relay):
                    assert await status(token, running.url + path, method) == 403, path


async def test_a_relay_refuses_strangers(tmp_path: Path, run: Run) -> None:
    digest = put(tmp_path).manifest_digest
    other_key = Signer.create(tmp_path / "other", run.signer.run)
    other_run = Signer.read(tmp_path / "keys", "another")
    audience = [Audience.RELAY]
    async with (
        served(run, origin(tmp_path / "store")) as url,
        relayed(run, tmp_path / "relay", url) as relay_url,
        httpx2.AsyncClient(base_url=relay_url, timeout=60) as http,
    ):
        for path in (f"/v1/manifests/{digest}", f"/v1/blobs/{'a' * 64}", "/metrics"):
            for token, status in (
                (other_run.mint(Role.ROLLOUT, audience, ttl_s=3600), 401),
                (run.signer.mint(Role.SESSION, audience, ttl_s=3600), 403),
                (
                    run.signer.mint(Role.ADMIN, [Audience.WEIGHTS, Audience.DATAFLOW], ttl_s=3600),
                    403,
                ),
                (other_key.mint(Role.ROLLOUT, audience, ttl_s=3600), 401),
                (run.signer.mint(Role.ROLLOUT, audience, ttl_s=-1), 401),
                ("nonsense", 401),
            ):
                answer = await http.get(path, headers={"authorization": f"Bearer {token}"})
                assert answer.status_code == status


async def test_a_relay_whose_own_token_is_refused_does_not_blame_its_readers(
    tmp_path: Path, run: Run
) -> None:
    digest = put(tmp_path).manifest_digest
    async with served(run, origin(tmp_path / "store")) as url:
        caller = AsyncServiceClient(url, run.signer.mint(Role.RELAY, [Audience.WEIGHTS], ttl_s=-1))
        source = Relay([caller], tmp_path / "relay", max_bytes=1 << 20)
        app = build(source, run.signer.verifier(Audience.RELAY))
        async with listening(app) as relay_url, httpx2.AsyncClient(timeout=60) as http:
            headers = {"authorization": f"Bearer {run.for_relay}"}
            answer = await http.get(f"{relay_url}/v1/manifests/{digest}", headers=headers)
        await caller.close()
    assert answer.status_code == 503
    assert "token has expired" in answer.json()["error"]["message"]


async def test_a_relay_whose_upstream_is_gone_says_so_before_it_sends(
    tmp_path: Path, run: Run
) -> None:
    digest, data = put_blob(tmp_path / "store", 3 * PIECE_BYTES)
    async with httpx2.AsyncClient(timeout=60) as http:

        async def get(relay_url: str, first: int) -> httpx2.Response:
            headers = {"authorization": f"Bearer {run.for_relay}", "range": f"bytes={first}-"}
            return await http.get(f"{relay_url}/v1/blobs/{digest}", headers=headers)

        async with AsyncExitStack() as stack:
            weight_server = AsyncExitStack()
            url = await weight_server.enter_async_context(served(run, origin(tmp_path / "store")))
            relay_url = await stack.enter_async_context(relayed(run, tmp_path / "relay", url))
            answer = await get(relay_url, 2 * PIECE_BYTES)
            assert (answer.status_code, answer.content) == (206, data[2 * PIECE_BYTES :])
            await weight_server.aclose()
            assert (await get(relay_url, 2 * PIECE_BYTES)).content == data[2 * PIECE_BYTES :]
            refused = await get(relay_url, PIECE_BYTES)
            assert refused.status_code == 503
            assert "retry-after" not in refused.headers
            assert url in refused.json()["error"]["message"]


# --- a tree -----------------------------------------------------------------------------------


async def test_a_tree_of_relays_costs_the_origin_one_copy(tmp_path: Path, run: Run) -> None:
    wanted = put_large(tmp_path)
    source = origin(tmp_path / "store")
    async with (
        served(run, source) as url,
        relayed(run, tmp_path / "first", url) as first_url,
        relayed(run, tmp_path / "second", first_url, url) as second_url,
        connect(first_url, run.for_relay) as first,
        connect(second_url, run.for_relay) as second,
        connect(url, run.node) as far,
    ):
        pulls = [
            Puller(tmp_path / f"node-{i}").pull([second if i % 2 else first, far], wanted)
            for i in range(8)
        ]
        folders = await asyncio.gather(*pulls)
    for folder in folders:
        assert contents(folder) == contents(tmp_path / "large-0")
    assert source.num_bytes == sum(map(len, contents(tmp_path / "large-0").values()))


@pytest.mark.parametrize(("seed", "share"), [*enumerate([0.02, 0.02, 0.2, 0.2, 1.0])])
async def test_altered_bytes_are_always_found(
    tmp_path: Path, run: Run, seed: int, share: float
) -> None:
    wanted = put_large(tmp_path)
    draw = random.Random(seed)

    async def alter(_: str, start: int, data: bytes) -> bytes:
        if not data or draw.random() > share:
            return data
        at = draw.randrange(len(data))
        return data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :]

    async with (
        served(run, origin(tmp_path / "store", alter)) as bad,
        served(run, origin(tmp_path / "store")) as good,
        relayed(run, tmp_path / "relay", bad) as relay_url,
        connect(relay_url, run.for_relay) as near,
        connect(good, run.node) as far,
    ):
        folder = await Puller(tmp_path / "cache").pull([near, far], wanted)
        assert contents(folder) == contents(tmp_path / "large-0")


async def test_a_relay_with_only_damaged_data_delivers_nothing(tmp_path: Path, run: Run) -> None:
    wanted = put_large(tmp_path)

    async def alter(digest: str, start: int, data: bytes) -> bytes:
        return data if start < 0 else await flip(digest, start, data)

    liar = build(origin(tmp_path / "store", alter), run.signer.verifier(Audience.RELAY))
    async with listening(liar) as url, connect(url, run.for_relay) as caller:
        with pytest.raises(WeightsError):
            await Puller(tmp_path / "cache").pull([caller], wanted)
    assert not list((tmp_path / "cache" / "versions").iterdir())


# --- processes --------------------------------------------------------------------------------


@contextlib.contextmanager
def relay_process(run: Run, cache: Path, url: str) -> Generator[tuple[str, int]]:
    """`penstock relay`; its URL and pid."""
    port = free_port()
    token_file = run.folder.path / "relay-token"
    token_file.write_text(run.relay)
    words = ["relay", url, f"--public-key={run.folder.public_key()}", "--port", str(port)]
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.cli.main", *words, "--cache", str(cache)],
        env={
            **os.environ,
            "PENSTOCK_TOKEN_FILE": str(token_file),
            "PYTHONPATH": str(ROOT / "src"),
        },
    )
    try:
        for _ in range(30_000):
            assert process.poll() is None, "the relay ended before it listened"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.01)
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.kill()
        process.wait()


async def test_a_node_survives_its_relay_during_a_transfer(tmp_path: Path, run: Run) -> None:
    wanted = put_large(tmp_path)
    size = sum(map(len, contents(tmp_path / "large-0").values()))
    is_slow = True

    async def slow(_: str, start: int, data: bytes) -> bytes:
        if is_slow and start > 8 * CHUNK:
            await asyncio.sleep(0.2)
        return data

    source = origin(tmp_path / "store", slow)
    weight_server = build(source, run.signer.verifier(Audience.WEIGHTS))
    with serving(weight_server) as url:
        with relay_process(run, tmp_path / "relay", url) as (relay_url, pid):
            async with connect(relay_url, run.for_relay) as near, connect(url, run.node) as far:
                pull = asyncio.create_task(Puller(tmp_path / "cache").pull([near, far], wanted))
                while source.num_bytes < size // 4:
                    assert not pull.done(), "it was too fast to be disturbed"
                    await asyncio.sleep(0.005)
                os.kill(pid, signal.SIGKILL)
                is_slow = False
                assert contents(await pull) == contents(tmp_path / "large-0")
        with relay_process(run, tmp_path / "relay", url) as (relay_url, _):
            async with connect(relay_url, run.for_relay) as near:
                folder = await Puller(tmp_path / "cache-2").pull([near], wanted)
                assert contents(folder) == contents(tmp_path / "large-0")


# --- peer relays ------------------------------------------------------------------------------


async def test_nodes_that_share_cost_one_copy_and_may_leave(tmp_path: Path, run: Run) -> None:
    first, second = put_large(tmp_path, 0, 0), put_large(tmp_path, 1, 1)
    source = origin(tmp_path / "store")
    sharing = PeerRelayConfig(
        host="127.0.0.1",
        port=free_port(),
        tls=None,
        public_key=run.folder.public_key(),
        denied_file=run.folder.keys / "denied",
        max_bytes=1 << 30,
    )
    relay = (f"http://127.0.0.1:{sharing.port}", run.for_relay)
    async with served(run, source) as url:
        sharer = PeerRelayFetcher(run.node, tmp_path / "sharer", sharing)
        others = [WeightServerFetcher(run.node, tmp_path / f"n{i}", relay=relay) for i in range(3)]
        folder = await sharer(url, first)
        folders = await asyncio.gather(*(fetch(url, first) for fetch in others))
        for each in (folder, *folders):
            assert contents(each) == contents(tmp_path / "large-0")
        assert source.num_bytes == sum(map(len, contents(tmp_path / "large-0").values()))
        await sharer.close()
        folders = await asyncio.gather(*(fetch(url, second) for fetch in others))
        for each in folders:
            assert contents(each) == contents(tmp_path / "large-1")
        for fetch in others:
            await fetch.close()
