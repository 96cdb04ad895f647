# SPDX-License-Identifier: Apache-2.0
"""A dataflow with a source of sessions over real HTTP, a gateway for external agents, and an
agent."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import msgspec
from tests.contract.dataflow_server import (
    POLICY,
    FakeTrainer,
    RunningDataflow,
    dataflow,
    small_config,
)
from tests.unit.rollout.polling import eventually
from tests.unit.rollout.snapshot_files import write_snapshot
from tests.unit.rollout.test_node import FolderFetch

from penstock.config import AlgorithmConfig, RunConfig, SourceConfig
from penstock.config.sources import SessionConfig
from penstock.dataflow.client.partitioned import PartitionedNodeClient
from penstock.dataflow.service.operators.messages import ForgetSessionAnswer
from penstock.dataflow.service.trainers.messages import BatchRequest
from penstock.rollout.delivery_queue import AckLog
from penstock.rollout.engine import Engine
from penstock.rollout.engines.scripted import ScriptedEngine
from penstock.rollout.node import NodeDeps
from penstock.rollout.online import OnlineNode, build_online
from penstock.types import Manifest, NodeId, Trajectory
from penstock.wire.auth import Audience, Role
from penstock.wire.client import ServiceClient

TASKS = SourceConfig(name="train", task="penstock.tasks.reverse")


def session_config(
    *,
    groups_per_batch: int = 2,
    steps: int = 100,
    max_staleness: int = 1,
    idle_s: float = 60.0,
    reward_deadline_s: float = 60.0,
    default_reward: float | None = None,
    tasks: tuple[SourceConfig, ...] = (),
) -> RunConfig:
    config = small_config(groups_per_batch=groups_per_batch, steps=steps)
    session = SessionConfig(
        reward_deadline_s=reward_deadline_s, idle_s=idle_s, default_reward=default_reward
    )
    return config.model_copy(
        update={
            "sources": (SourceConfig(name="live", session=session), *tasks),
            "algorithm": AlgorithmConfig(name="reinforce", num_generations=2),
            "training": config.training.model_copy(update={"max_staleness": max_staleness}),
        }
    )


class Agent:
    """One external session, as seen by a plain HTTP client."""

    def __init__(self, http: httpx2.AsyncClient, token: str, opened: dict[str, Any]) -> None:
        self._http = http
        self._token = token
        self.id: str = opened["id"]
        self.is_recorded: bool = opened["is_recorded"]
        self._base_url: str = opened["base_url"]
        self._api_key: str = opened["api_key"]
        self._reward_key: str = opened["reward_key"]

    async def say(self, text: str = "abc") -> str:
        answer = await self._http.post(
            f"{self._base_url}/chat/completions",
            headers=bearer(self._api_key),
            json={"model": POLICY, "messages": [{"role": "user", "content": text}]},
        )
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]["content"]

    async def tell(
        self, verb: str, body: dict[str, Any] | None = None, *, token: str = ""
    ) -> httpx2.Response:
        return await self._http.post(
            f"/sessions/{self.id}/{verb}",
            headers=bearer(token or self._reward_key),
            json=body or {},
        )

    async def reward(self, value: float, reason: str = "") -> dict[str, Any]:
        answer = await self.tell("reward", {"reward": value, "reason": reason})
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def state(self) -> str:
        answer = await self._http.get(f"/sessions/{self.id}", headers=bearer(self._token))
        return answer.json()["state"]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@dataclass(slots=True)
class OnlineHarness:
    running: RunningDataflow
    trainer: FakeTrainer
    node: OnlineNode
    http: httpx2.AsyncClient
    token: str
    operator: str

    async def open(self, name: str = "") -> Agent:
        answer = await self.http.post("/sessions", headers=bearer(self.token), json={"name": name})
        assert answer.status_code == 200, answer.text
        return Agent(self.http, self.token, answer.json())

    async def wait_for_slots(self, num: int = 1) -> None:
        await eventually(lambda: self.node.slot_pool.num_free >= num)

    async def delivered(self) -> None:
        await eventually(lambda: not len(self.node.delivery_queue))

    @property
    def counts(self) -> dict[str, int]:
        return dict(self.node.online.counts)

    async def seal(self, wait_s: float = 5.0) -> Manifest | None:
        """The next batch, not committed."""
        trainer = self.trainer
        request = BatchRequest(
            consumer=POLICY, seq=trainer.seq + 1, incarnation=trainer.incarnation, wait_s=wait_s
        )
        return (await asyncio.to_thread(trainer.client.batch, request)).manifest

    async def rows(self, seq: int = 1) -> dict[str, Trajectory | None]:
        answer = await asyncio.to_thread(self.trainer.client.rows, POLICY, seq)
        return {
            row.row_id: None
            if row.payload is None
            else msgspec.msgpack.decode(row.payload, type=Trajectory)
            for row in answer.rows
        }

    async def forget(self, session: str) -> str:
        def call() -> str:
            caller = ServiceClient(self.running.url, self.running.token(Role.ADMIN))
            try:
                path = f"/v1/sessions/{session}"
                return caller.call("DELETE", path, None, ForgetSessionAnswer, deadline_s=60.0).was
            finally:
                caller.close()

        return await asyncio.to_thread(call)

    async def explain(self, group: str) -> str:
        client = httpx2.AsyncClient(base_url=self.running.url, timeout=60)
        async with client:
            headers = bearer(self.running.token(Role.READER))
            answer = await client.get(f"/v1/explain/{group}", headers=headers)
        return answer.text


@asynccontextmanager
async def gateway(
    running: RunningDataflow,
    folder: Path,
    *,
    name: str = "gateway",
    slot_pool_size: int = 4,
    make_engine: Callable[[], Engine] = ScriptedEngine,
) -> AsyncGenerator[OnlineNode]:
    """The gateway process, run in this event loop; stopped gracefully unless it was cancelled
    before."""
    client = PartitionedNodeClient(running.url, running.token(Role.GATEWAY, subject=name))
    ack_log = AckLog(folder / f"{name}.txt")
    fetch = FolderFetch(write_snapshot(folder / "snapshot"))
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    deps = NodeDeps(
        ack_log=ack_log,
        dataflow=client,
        make_fetcher=lambda facts: fetch,
        make_engine=lambda facts, policy, seat: make_engine(),
    )
    tokens = running.signer.verifier(Audience.GATEWAY)
    try:
        async with build_online(
            deps,
            tokens,
            node_id=NodeId(name),
            listener=listener,
            slot_pool_size=slot_pool_size,
        ) as node:
            process = asyncio.create_task(node.run())
            try:
                yield node
                node.stopping.set()
                await asyncio.wait_for(process, 60)
            finally:
                process.cancel()
                await asyncio.gather(process, return_exceptions=True)
    finally:
        await client.close()
        ack_log.close()
        listener.close()


@asynccontextmanager
async def world(
    folder: Path,
    config: RunConfig,
    *,
    slot_pool_size: int = 4,
    make_engine: Callable[[], Engine] = ScriptedEngine,
) -> AsyncGenerator[OnlineHarness]:
    with dataflow(folder, config) as running:
        trainer = await asyncio.to_thread(FakeTrainer, running)
        async with gateway(
            running, folder, slot_pool_size=slot_pool_size, make_engine=make_engine
        ) as node:
            port = node.listener.getsockname()[1]
            async with httpx2.AsyncClient(
                base_url=f"http://127.0.0.1:{port}", timeout=60.0
            ) as http:
                made = OnlineHarness(
                    running=running,
                    trainer=trainer,
                    node=node,
                    http=http,
                    token=running.token(Role.SESSION, Audience.GATEWAY),
                    operator=running.token(Role.GATEWAY, Audience.GATEWAY),
                )
                await made.wait_for_slots()
                yield made
