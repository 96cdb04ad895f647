# SPDX-License-Identifier: Apache-2.0
"""Hundreds of nodes come back at once after the service was gone: they find it again, each within
its back-off, and the service is not crushed by them.

`make chaos CLIENTS=500 OUTAGE_S=60`."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import closing
from pathlib import Path

import pytest
from tests.chaos.processes import Services, commands, make_run
from tests.chaos.results_table import begin
from tests.chaos.test_churn import training

from penstock.dataflow.client.dataflow import NodeClient, StatusClient
from penstock.dataflow.core.leasing import LiveVersion, NodeState, RegisterRequest
from penstock.dataflow.service.nodes.messages import Heartbeat
from penstock.errors import NotFound
from penstock.fleet.run_folder import RunFolder
from penstock.types import NodeId, PolicyName
from penstock.wire.auth import Role

CLIENTS = int(os.environ.get("PENSTOCK_CLIENTS", "100"))
OUTAGE_S = float(os.environ.get("PENSTOCK_OUTAGE_S", "6"))
RECOVERED_S = 30.0
BEAT_S = 0.75
POLICY = PolicyName("policy")

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.alone,
    pytest.mark.timeout(900 + 4 * OUTAGE_S),
    pytest.mark.skipif(not CLIENTS, reason="CLIENTS=0"),
]


class Client:
    """Sends heartbeats, as `Membership` does, with the client and the back-off of a real node."""

    def __init__(self, folder: RunFolder, run: str, number: int) -> None:
        self._name = NodeId(f"n{number}")
        token = folder.token(run, Role.ROLLOUT, ttl_s=36_000.0, subject=self._name)
        self.api = NodeClient(folder.endpoints().dataflow, token)
        self._answered_at = 0.0
        self._answered = asyncio.Event()

    async def run(self) -> None:
        boot_id = f"boot-{self._name}"
        live = (LiveVersion(policy=POLICY, incarnation=1, number=0),)
        body = RegisterRequest(node_id=self._name, boot_id=boot_id, capacity=1, policies=())
        await self.api.register(body)
        while True:
            beat = Heartbeat(boot_id=boot_id, state=NodeState.LIVE, live=live)
            try:
                await self.api.heartbeat(self._name, beat)
            except NotFound:  # silent for longer than its ttl
                await self.api.register(body)
            self._answered_at = time.monotonic()
            self._answered.set()
            await asyncio.sleep(BEAT_S)

    async def answered_after(self, since: float) -> float:
        while self._answered_at <= since:
            self._answered.clear()
            await self._answered.wait()
        return self._answered_at


async def until_answered(clients: list[Client], since: float) -> float:
    """When the last of them was first answered after this moment."""
    return max(await asyncio.gather(*(client.answered_after(since) for client in clients)))


async def test_clients_return_after_an_outage(tmp_path: Path) -> None:
    figures = begin(f"{CLIENTS} clients return after {OUTAGE_S:g} s of outage")
    folder = make_run(tmp_path / "run")
    with Services(commands(folder), folder.logs) as services:
        await services.start_all()
        with training(folder):
            run = folder.read_config().name
            clients = [Client(folder, run, number) for number in range(CLIENTS)]
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(client.run()) for client in clients]
                await until_answered(clients, time.monotonic())
                services.kill("dataflow")
                await asyncio.sleep(OUTAGE_S)
                services.start("dataflow")
                await services.wait_ready("dataflow")
                back_at = time.monotonic()
                recovered_s = await until_answered(clients, back_at) - back_at
                token = folder.token(run, Role.READER, ttl_s=600.0)
                with closing(StatusClient(folder.endpoints().dataflow, token)) as reader:
                    status = await asyncio.to_thread(reader.status)
                for task in running:
                    task.cancel()
            for client in clients:
                await client.api.close()
    assert len(status.nodes) == CLIENTS, "each of them is known again"
    figures.trials = CLIENTS
    figures.note = f"all answered {recovered_s:.1f} s after the service was back"
    print(figures.note)
    assert recovered_s <= RECOVERED_S
