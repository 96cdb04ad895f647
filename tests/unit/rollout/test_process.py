# SPDX-License-Identifier: Apache-2.0
"""`run_node` in a separate process: real weight server, real signals, files that persist."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
from tests.unit.rollout.fake_dataflow import POLICY, FakeDataflow, facts
from tests.unit.rollout.polling import SOURCE, eventually
from tests.unit.weights.snapshot_folders import TENSORS, weights_bytes

from penstock.dataflow.core.leasing import NodeState
from penstock.dataflow.service.nodes.messages import NodeDirectives, RunInfo
from penstock.types import PublishedVersion
from penstock.weights.publish import put_snapshot
from penstock.weights.serving.origin import Origin
from penstock.weights.serving.server import build
from penstock.weights.store import DirectoryStore
from penstock.wire.auth import Audience
from penstock.wire.serving import serve_on_socket

PROGRAM = """
import asyncio, sys
from pathlib import Path
from penstock.rollout.node import run_node
url, token, folder = sys.argv[1:]
asyncio.run(run_node(url, token, node_id="node-1", state_dir=Path(folder), capacity=16))
"""
PATHS = os.pathsep.join([SOURCE, str(Path(__file__).parents[3])])


@asynccontextmanager
async def weights_front(dataflow: FakeDataflow, root: Path) -> AsyncGenerator[None]:
    listener = socket.create_server(("127.0.0.1", 0))
    app = build(Origin(DirectoryStore(root)), dataflow.signer.verifier(Audience.WEIGHTS))
    serving = asyncio.create_task(serve_on_socket(app, listener))
    dataflow.weights_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        yield
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        listener.close()


def published(root: Path, snapshot: Path, number: int) -> PublishedVersion:
    (snapshot / "model.safetensors").write_bytes(weights_bytes(TENSORS, number))
    stored = put_snapshot(root, snapshot, policy=POLICY, number=number)
    return PublishedVersion(
        policy=POLICY, incarnation=1, number=number, manifest_digest=stored.manifest_digest
    )


@asynccontextmanager
async def started(
    tmp_path: Path, snapshot: Path, *, num_slots: int, run_info: RunInfo | None = None
) -> AsyncGenerator[tuple[FakeDataflow, Process]]:
    dataflow = FakeDataflow(tmp_path / "keys", num_slots=num_slots, run_info=run_info)
    dataflow.orders = NodeDirectives(wanted=(published(tmp_path / "store", snapshot, 0),))
    async with weights_front(dataflow, tmp_path / "store"), dataflow.served():
        node = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", PROGRAM, dataflow.url, dataflow.token, str(tmp_path / "node")),
            env={**os.environ, "PYTHONPATH": PATHS},
        )
        try:
            yield dataflow, node
        finally:
            if node.returncode is None:
                node.kill()
            await node.wait()


async def test_a_url_and_a_token_are_enough(tmp_path: Path, snapshot: Path) -> None:
    async with started(tmp_path, snapshot, num_slots=40) as (dataflow, node):
        await asyncio.wait_for(dataflow.until_stored(40), 60)
        newer = published(tmp_path / "store", snapshot, 1)
        await dataflow.order(NodeDirectives(wanted=(newer,)))
        await eventually(lambda: dataflow.beats[-1].live[0].number == 1)
        await dataflow.order(NodeDirectives(wanted=(newer,), finished=True))
        assert await asyncio.wait_for(node.wait(), 60) == 0
        acknowledged = (tmp_path / "node" / "acks.txt").read_text().splitlines()
        assert sorted(acknowledged) == sorted(dataflow.stored)
        assert all(row.reward == 1.0 for row in dataflow.trajectories())
        staged = list((tmp_path / "node" / "weights" / "versions").iterdir())
        assert len(staged) == 1  # older versions are pruned


async def test_sigterm_hands_back_and_leaves_with_0(tmp_path: Path, snapshot: Path) -> None:
    hanging = facts(workflow='["sleep", "300"]')
    async with started(tmp_path, snapshot, num_slots=6, run_info=hanging) as (dataflow, node):
        await eventually(lambda: dataflow.beats and dataflow.beats[-1].num_held == 6)
        children = psutil.Process(node.pid).children(recursive=True)
        assert len(children) >= 6
        node.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(node.wait(), 60) == 0
        assert len(dataflow.released) == 6 and dataflow.stored == {}
        assert dataflow.left == ["node-1"]
        assert NodeState.DRAINING in {beat.state for beat in dataflow.beats}
        _, alive = psutil.wait_procs(children, timeout=60)
        assert alive == []


async def test_sigterm_while_the_dataflow_is_away_ends_in_time(
    tmp_path: Path, snapshot: Path
) -> None:
    async with started(tmp_path, snapshot, num_slots=8) as (dataflow, node):
        await asyncio.wait_for(dataflow.until_stored(8), 60)
        await dataflow.down()
        node.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(node.wait(), 60) == 0
        dataflow.up()
