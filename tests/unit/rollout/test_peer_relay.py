# SPDX-License-Identifier: Apache-2.0
"""Two node processes, one a relay for the other: the weight server sends one copy, and a node that
loses its peer falls back to the weight server."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.contract.dataflow_server import free_port
from tests.unit.rollout.fake_dataflow import RUN, FakeDataflow
from tests.unit.rollout.polling import eventually
from tests.unit.rollout.test_process import PATHS, published
from tests.unit.weights.relay_doubles import origin
from tests.unit.weights.snapshot_folders import contents
from tests.unit.weights.weight_servers import listening

from penstock.config import demo_config
from penstock.dataflow.service.nodes.messages import NodeDirectives
from penstock.fleet.run_folder import Endpoints, RunFolder
from penstock.weights.serving.server import build
from penstock.wire.auth import Audience, Role
from penstock.wire.codec import encode_json


@asynccontextmanager
async def process(env: Mapping[str, str], *words: str) -> AsyncGenerator[Process]:
    """A penstock command."""
    node = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock.cli.main", *words),
        env={**os.environ, "PYTHONPATH": PATHS, **env},
    )
    try:
        yield node
    finally:
        if node.returncode is None:
            node.kill()
        await node.wait()


def run_folder(path: Path, dataflow: FakeDataflow) -> None:
    """The files of a started run that `penstock rollout` needs."""
    config = demo_config(0)
    models = {"policy": config.models["policy"].model_copy(update={"engine": "scripted"})}
    RunFolder(path).write_config(config.model_copy(update={"name": RUN, "models": models}))
    endpoints = Endpoints(dataflow=dataflow.url, weights="http://127.0.0.1:1", work_dir=str(path))
    (path / "run").mkdir()
    (path / "run" / "endpoints.json").write_bytes(encode_json(endpoints))


@pytest.mark.parametrize("command", ["join", pytest.param("rollout", marks=pytest.mark.slow)])
async def test_a_node_serves_its_neighbour_until_it_is_killed(
    tmp_path: Path, snapshot: Path, command: str
) -> None:
    dataflow = FakeDataflow(tmp_path / "keys", num_slots=0)
    first = published(tmp_path / "store", snapshot, 0)
    size = sum(map(len, contents(snapshot).values()))
    dataflow.orders = NodeDirectives(wanted=(first,))
    source = origin(tmp_path / "store")
    port = free_port()
    env = {
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PENSTOCK_TOKEN_FILE": str(tmp_path / "token"),
    }
    (tmp_path / "token").write_text(dataflow.token)
    to_relay = dataflow.signer.mint(Role.ROLLOUT, [Audience.RELAY], ttl_s=600)
    (tmp_path / "relay-token").write_text(to_relay)
    sharing = ["--name", "near", "--serve-weights", f"127.0.0.1:{port}"]
    using = ["--name", "far", "--relay", f"http://127.0.0.1:{port}"]
    if command == "join":
        sharing.append(f"--public-key={tmp_path / 'keys' / 'public.key'}")
        using += ["--relay-token-file", str(tmp_path / "relay-token")]

    def live(number: int) -> int:
        """How many node processes report this version."""
        last = {beat.boot_id: beat for beat in dataflow.beats}
        return sum(any(v.number == number for v in beat.live) for beat in last.values())

    app = build(source, dataflow.signer.verifier(Audience.WEIGHTS))
    async with listening(app) as dataflow.weights_url, dataflow.served():
        words = ["join", dataflow.url]
        if command == "rollout":
            run_folder(tmp_path, dataflow)
            words, env = ["rollout", "--run-dir", str(tmp_path)], {}
        async with process(env, *words, *sharing) as near:
            await eventually(lambda: live(0) == 1, 40)
            async with process(env, *words, *using):
                await eventually(lambda: live(0) == 2, 40)
                assert source.num_bytes == size
                near.send_signal(signal.SIGKILL)
                await near.wait()
                await dataflow.order(
                    NodeDirectives(wanted=(published(tmp_path / "store", snapshot, 1),))
                )
                await eventually(lambda: live(1) == 1, 40)
