# SPDX-License-Identifier: Apache-2.0
"""SIGKILL of a Tinker server at random moments, with all requests of two clients in flight: every
future has one result, every optimizer call counts once, and weights, log-probs and answers are bit
for bit those of a server that nobody killed.

Requests and kills follow from one seed, which is printed: repeat with `PENSTOCK_CHAOS_SEED=…`. The
full campaign is `PENSTOCK_TINKER_REQUESTS=620 PENSTOCK_TINKER_KILLS=20`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest
from safetensors.torch import load
from tests.unit.tinker.tinker_harness import TINY, make_folder, pass_body, random_lines

from penstock.tinker.folder import TinkerFolder
from penstock.tinker.journal import Journal
from penstock.tinker.protocol import PROTOBUF

SEED = int(os.environ.get("PENSTOCK_CHAOS_SEED") or time.time())
NUM_REQUESTS = int(os.environ.get("PENSTOCK_TINKER_REQUESTS", "60"))
NUM_KILLS = int(os.environ.get("PENSTOCK_TINKER_KILLS", "3"))
OWNERS = ("alice", "bob")
SNAPSHOT_EVERY = 7
START_S, WAIT_S = 300.0, 1800.0
RETRY_S = 0.05


@dataclass(slots=True)
class Server:
    """A server process that a campaign kills and starts again, always at one address."""

    folder: TinkerFolder
    port: int
    process: Process | None = None
    is_up: asyncio.Event = field(default_factory=asyncio.Event)
    progress: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by every result."""

    async def start(self) -> None:
        argv = ["tinker", "serve", str(self.folder.path), "--port", str(self.port), "--json"]
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "penstock.cli.main", *argv),
            *("--snapshot-every", str(SNAPSHOT_EVERY)),
            stdout=PIPE,
            stderr=DEVNULL,
        )
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), timeout=START_S)
        assert json.loads(line)["model"] == TINY
        self.is_up.set()

    async def kill(self) -> None:
        assert self.process is not None
        self.is_up.clear()
        self.process.send_signal(signal.SIGKILL)
        await asyncio.wait_for(self.process.wait(), timeout=START_S)


@dataclass(slots=True)
class Client:
    """Sends again whatever was not answered, as the SDK does."""

    server: Server
    http: httpx2.AsyncClient
    key: str
    results: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """By request, the result that its first retrieval had."""

    async def post(self, path: str, content: bytes, media_type: str) -> httpx2.Response:
        headers = {"X-API-Key": self.key, "Content-Type": media_type, "Accept": PROTOBUF}
        while True:
            await asyncio.wait_for(self.server.is_up.wait(), timeout=START_S)
            try:
                found = await self.http.post(f"/api/v1/{path}", content=content, headers=headers)
            except httpx2.TransportError:
                await asyncio.sleep(RETRY_S)
                continue
            if found.status_code == 429:
                await asyncio.sleep(RETRY_S)
                continue
            assert found.status_code == 200, found.text
            return found

    async def call(self, path: str, **body: Any) -> Any:
        return (await self.post(path, json.dumps(body).encode(), "application/json")).json()

    async def retrieve(self, id: str) -> bytes:
        body = json.dumps({"request_id": id}).encode()
        while True:
            found = await self.post("retrieve_future", body, "application/json")
            is_binary = found.headers["content-type"] == PROTOBUF
            if is_binary or found.json().get("type") != "try_again":
                return found.content

    async def future(self, path: str, content: bytes, media_type: str = "application/json") -> str:
        id = (await self.post(path, content, media_type)).json()["request_id"]
        found = await self.retrieve(id)
        assert b'"error"' not in found, found
        assert self.results.setdefault(id, found) == found
        self.server.progress.set()
        return id


@dataclass(slots=True)
class Outcome:
    results: list[bytes] = field(default_factory=list[bytes])
    """Of every request, without the ids of its session, in the order of the plan."""
    weights: list[bytes] = field(default_factory=list[bytes])
    num_kills: int = 0


async def campaign(folder: TinkerFolder, seed: int, kill_at: Sequence[int]) -> Outcome:
    """All requests at once; a kill as soon as so many have their result."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = Server(folder=folder, port=port)
    outcome = Outcome()
    await server.start()
    try:
        async with clients(server) as both:
            sessions = [(await c.call("create_session", tags=[]))["session_id"] for c in both]
            work: list[Coroutine[Any, Any, str]] = []
            for client, session in zip(both, sessions, strict=True):
                work += requests(client, session, seed, NUM_REQUESTS // len(both))
            killing = asyncio.create_task(kills(server, both, kill_at, random.Random(seed)))
            ids = await asyncio.wait_for(asyncio.gather(*work), timeout=WAIT_S)
            outcome.num_kills = await asyncio.wait_for(killing, timeout=WAIT_S)
            for client, session in zip(both, sessions, strict=True):
                own = [id for id in ids if id.startswith(session)]
                assert len(set(own)) == len(own) == NUM_REQUESTS // len(both)
                for id in own:  # a second retrieval has the same result
                    assert await client.retrieve(id) == client.results[id]
                    outcome.results.append(client.results[id].replace(session.encode(), b""))
                body = {"model_id": f"{session}:train:0", "path": "end", "seq_id": 10**6}
                numbers = [int(id.rpartition(":")[2]) for id in own if ":train:" in id]
                body["seq_id"] = max(numbers) + 1
                await client.future("save_weights", json.dumps(body).encode())
    finally:
        await server.kill()
    journal = Journal(folder.path)
    rows = journal.rows("SELECT state, COUNT(*) FROM requests GROUP BY state")
    assert rows == [("done", len(ids) + len(OWNERS))]
    for (where,) in journal.rows("SELECT folder FROM checkpoints ORDER BY owner"):
        outcome.weights.append((folder.path / where / "state.bin").read_bytes())
    await journal.close()
    return outcome


@asynccontextmanager
async def clients(server: Server) -> AsyncGenerator[list[Client]]:
    limits = httpx2.Limits(max_connections=NUM_REQUESTS + 8)
    url = f"http://127.0.0.1:{server.port}"
    async with httpx2.AsyncClient(base_url=url, timeout=WAIT_S, limits=limits) as http:
        yield [
            Client(server, http, server.folder.issue_key(name, ttl_s=86_400.0)) for name in OWNERS
        ]


def requests(client: Client, session: str, seed: int, count: int) -> list[Coroutine[Any, Any, str]]:
    """A model's creation, its training, and a fifth of sampling."""
    model = f"{session}:train:0"
    lora = {"rank": 4, "seed": seed}
    created = {
        "session_id": session,
        "model_seq_id": 0,
        "base_model": TINY,
        "lora_config": lora,
    }

    async def create() -> str:
        try:
            return await client.future("create_model", json.dumps(created).encode())
        finally:
            is_there.set()

    async def train(number: int) -> str:
        await asyncio.wait_for(is_there.wait(), timeout=WAIT_S)
        if number % 2:
            body = pass_body(model, number, random_lines(seed + number))
            return await client.future("forward_backward", body, PROTOBUF)
        step = {"model_id": model, "seq_id": number, "adam_params": {"learning_rate": 1e-3}}
        return await client.future("optim_step", json.dumps(step).encode())

    async def sample(number: int) -> str:
        opened = {"session_id": session, "sampling_session_seq_id": 0, "base_model": TINY}
        id = (await client.call("create_sampling_session", **opened))["sampling_session_id"]
        body = {
            "sampling_session_id": id,
            "seq_id": number,
            "num_samples": 2,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [4, 5, 3]}]},
            "sampling_params": {"max_tokens": 4, "seed": number},
        }
        return await client.future("asample", json.dumps(body).encode())

    is_there = asyncio.Event()
    num_samples = count // 5
    num_trained = count - num_samples - 1
    return [
        create(),
        *(train(number) for number in range(1, num_trained + 1)),
        *(sample(number) for number in range(num_samples)),
    ]


async def kills(
    server: Server, both: Sequence[Client], kill_at: Sequence[int], draw: random.Random
) -> int:
    for threshold in kill_at:
        while sum(len(client.results) for client in both) < threshold:
            await asyncio.wait_for(server.progress.wait(), timeout=WAIT_S)
            server.progress.clear()
        await asyncio.sleep(draw.random() * RETRY_S)
        await server.kill()
        await server.start()
    return len(kill_at)


@pytest.mark.chaos
@pytest.mark.timeout(3600)
async def test_no_future_is_lost_and_no_step_is_applied_twice(tmp_path: Path) -> None:
    print(f"PENSTOCK_CHAOS_SEED={SEED}: {NUM_REQUESTS} requests, {NUM_KILLS} kills")
    draw = random.Random(SEED)
    kill_at = sorted(draw.randrange(NUM_REQUESTS * 9 // 10) for _ in range(NUM_KILLS))
    straight = await campaign(make_folder(tmp_path / "straight"), SEED, ())
    killed = await campaign(make_folder(tmp_path / "killed"), SEED, kill_at)
    assert killed.num_kills == NUM_KILLS
    assert killed.results == straight.results
    assert killed.weights == straight.weights
    num_steps = (NUM_REQUESTS // 2 - NUM_REQUESTS // 2 // 5 - 1) // 2
    for weights in killed.weights:
        steps = {float(value) for name, value in load(weights).items() if name.startswith("step/")}
        assert steps == {num_steps}
    print(f"{len(killed.results)} results, {num_steps} optimizer calls of each model")
