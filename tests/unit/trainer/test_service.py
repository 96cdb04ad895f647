# SPDX-License-Identifier: Apache-2.0
"""`run_trainer` as its process runs it: its own client, over HTTP, against a dataflow in memory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.trainer.doubles import POLICY, MemoryDataflow, random_batch

from penstock.config import RunConfig, demo_config
from penstock.dataflow.service.messages import Ack
from penstock.dataflow.service.trainers.messages import (
    BatchRequest,
    BatchRowsRequest,
    CheckpointsRequest,
    CommitRequest,
    IncarnationRequest,
    PublishRequest,
)
from penstock.fleet.launchers import local
from penstock.trainer import service
from penstock.trainer.build import build_models
from penstock.trainer.models import Models
from penstock.trainer.service import EXIT_FENCED, EXIT_STOPPED, run_trainer
from penstock.wire.auth import Audience, Role, Signer
from penstock.wire.routes import Call, Route
from penstock.wire.server import build_app
from penstock.wire.serving import serve_on_socket


class Surface:
    """The trainer's routes over a `MemoryDataflow`."""

    def __init__(self, dataflow: MemoryDataflow) -> None:
        self._dataflow = dataflow

    async def state(self, call: Call) -> object:
        return self._dataflow.state(POLICY)

    async def incarnate(self, call: Call) -> object:
        return self._dataflow.incarnate(POLICY, call.body)

    async def batch(self, call: Call) -> object:
        return self._dataflow.batch(call.body)

    async def rows(self, call: Call) -> object:
        return self._dataflow.rows(POLICY, _seq(call), call.body.indexes)

    async def commit(self, call: Call) -> object:
        self._dataflow.commit(POLICY, _seq(call), call.body)
        return Ack()

    async def publish(self, call: Call) -> object:
        self._dataflow.publish(POLICY, call.body)
        return Ack()

    async def checkpoints(self, call: Call) -> object:
        self._dataflow.checkpoints(POLICY, call.body)
        return Ack()

    def routes(self) -> list[Route]:
        policy, batch = "/v1/policies/{policy}", "/v1/batches/{batch_id}"
        return [
            _route("GET", policy, self.state),
            _route("POST", f"{policy}/incarnations", self.incarnate, IncarnationRequest),
            _route("POST", f"{policy}/versions", self.publish, PublishRequest),
            _route("PUT", f"{policy}/checkpoints", self.checkpoints, CheckpointsRequest),
            _route("POST", "/v1/batches", self.batch, BatchRequest),
            _route("POST", f"{batch}/rows", self.rows, BatchRowsRequest),
            _route("POST", f"{batch}/commit", self.commit, CommitRequest),
        ]


def _seq(call: Call) -> int:
    return int(call.path["batch_id"].rpartition(".")[2])


def _route(
    method: str,
    path: str,
    handler: Callable[[Call], Awaitable[object]],
    request: type[object] | None = None,
) -> Route:
    roles = frozenset({Role.TRAINER})
    return Route(
        method=method, path=path, handler=handler, roles=roles, summary="", request=request
    )


@contextlib.contextmanager
def serving(dataflow: MemoryDataflow, signer: Signer) -> Generator[str]:
    app = build_app(Surface(dataflow).routes(), signer.verifier(Audience.DATAFLOW), title="test")
    listener = socket.create_server(("127.0.0.1", 0))
    loop = asyncio.new_event_loop()
    task = loop.create_task(serve_on_socket(app, listener))

    def run() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(timeout=60)
        loop.close()
        listener.close()


def train(dataflow: MemoryDataflow, tmp_path: Path, config: RunConfig) -> int:
    signer = Signer.create(tmp_path / "keys", "reverse")
    token = signer.mint(role=Role.TRAINER, audiences=[Audience.DATAFLOW], ttl_s=600)
    with serving(dataflow, signer) as url:
        return run_trainer(
            config,
            POLICY,
            url=url,
            token=token,
            run_dir=tmp_path,
            store_root=tmp_path / "weights",
        )


def test_a_whole_run_over_http(tmp_path: Path) -> None:
    dataflow = MemoryDataflow(batches=[random_batch(0, seq=seq) for seq in (1, 2)])
    assert train(dataflow, tmp_path, demo_config(0)) == 0
    assert (dataflow.number, dataflow.seq) == (2, 2)
    assert dataflow.retained == ((0, 0), (2, 2))
    folders = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert folders == {"step_0", "step_2"}
    last = (tmp_path / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["number"] == 2


def test_a_replaced_trainer_exits_with_its_own_code(tmp_path: Path) -> None:
    class Replaced(MemoryDataflow):
        def commit(self, policy: str, seq: int, body: CommitRequest) -> None:
            self.incarnation += 1
            super().commit(POLICY, seq, body)

    dataflow = Replaced(batches=[random_batch(0)])
    assert train(dataflow, tmp_path, demo_config(0)) == EXIT_FENCED
    assert local.EXIT_FENCED == EXIT_FENCED, "what the launcher must not start again"
    assert dataflow.commits == []


def test_a_trainer_takes_over_before_it_loads_its_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or one that is alive would prune the checkpoint that is loaded."""
    dataflow, seen = MemoryDataflow(batches=[random_batch(0)]), list[int]()

    def build(*args: Any) -> Models:
        seen.append(dataflow.incarnation)
        return build_models(*args)

    monkeypatch.setattr(service, "build_models", build)
    assert train(dataflow, tmp_path, demo_config(0)) == 0
    assert seen == [1]


def test_a_trainer_stops_also_while_the_dataflow_is_away(tmp_path: Path) -> None:
    told = threading.Event()
    threading.Timer(1.0, told.set).start()
    began_at = time.monotonic()
    code = run_trainer(
        demo_config(0),
        POLICY,
        url="http://127.0.0.1:9",
        token="token",
        run_dir=tmp_path,
        store_root=tmp_path / "weights",
        is_stopping=told.is_set,
    )
    assert code == EXIT_STOPPED and time.monotonic() - began_at < 30
