# SPDX-License-Identifier: Apache-2.0
"""Test helper: the row service alone, with a separate ledger, over HTTP on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from blake3 import blake3
from msgspec import structs
from starlette.applications import Starlette
from tests.sim.reader_world import rollout_row

from penstock.dataflow.client.rows import RowsClient
from penstock.dataflow.ledger.blobs import BlobStore
from penstock.dataflow.ledger.segments import Location
from penstock.dataflow.ledger.store import Ledger
from penstock.dataflow.records import CommandJournal, FreedRecord
from penstock.dataflow.service.process import Process
from penstock.dataflow.service.rows.handlers import RowService
from penstock.dataflow.service.rows.routes import row_routes
from penstock.types import GroupId, RowId
from penstock.wire.auth import Audience, Role, Signer
from penstock.wire.server import build_app
from penstock.wire.serving import server

T = TypeVar("T")
TICK_S = 0.1


class RowServiceHost:
    """Minimal host of the row service: journal, ledger and timer."""

    def __init__(self, folder: Path, now: float = 1000.0, stages: Sequence[str] = ()) -> None:
        self.now = now
        self.ledger = Ledger(folder, stages=stages)
        self.process = Process(
            self.ledger,
            CommandJournal(),
            lambda: self.now,
            on_command=lambda now: self.rows.row_window.pop_completed().clear(),
            on_wake=lambda: self.rows.on_wake(),
        )
        self.rows = RowService(self.process, BlobStore(folder / "blobs"), dict.fromkeys(stages, ()))
        self.rows.restore()
        self.loop: asyncio.AbstractEventLoop | None = None

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.now += TICK_S
            await self.rows.tick()

    async def deliver(self, row_id: str, payload: bytes, reward: float | None) -> None:
        """Add a rollout row, as a partition does."""
        location = self.ledger.place(payload)
        arrival = self.rows.row_window.next_arrival()
        row = rollout_row(RowId(row_id), arrival, self.now, reward, location)
        summary = structs.replace(row.summary, digest=blake3(payload).hexdigest())
        row = structs.replace(row, summary=summary)
        self.process.journal(row)
        initial_columns = {"turns"} if reward is None else {"turns", "reward"}
        self.rows.row_window.add_rows("train", (row.row_id,), arrival, initial_columns, self.now)
        await self.process.make_durable()

    async def deliver_blob(self, row_id: str, digest: str, size: int) -> None:
        """Add a rollout row whose payload is a blob."""
        arrival = self.rows.row_window.next_arrival()
        location = Location(segment=0, offset=0, length=size)
        row = rollout_row(RowId(row_id), arrival, self.now, None, location)
        self.process.journal(structs.replace(row, blob=digest))
        self.rows.row_window.add_rows("train", (row.row_id,), arrival, {"turns"}, self.now)
        await self.process.make_durable()

    async def free(self, group_id: str) -> None:
        """As the coordinator does when no policy needs the group any more."""
        self.process.journal(FreedRecord(group_id=GroupId(group_id), at=self.now))
        await self.process.make_durable()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningRowService:
    host: RowServiceHost
    url: str
    signer: Signer

    def client(self, role: Role = Role.ADMIN, patience_s: float = 20.0) -> RowsClient:
        return RowsClient(self.url, self.token(role), patience_s=patience_s)

    def token(self, role: Role) -> str:
        return self.signer.mint(role, [Audience.DATAFLOW], ttl_s=600.0)

    def deliver(self, row_id: str, payload: bytes = b"turns", reward: float | None = None) -> None:
        self.call(self.host.deliver(row_id, payload, reward))

    def call(self, work: Coroutine[None, None, T]) -> T:
        """Run this on the service's event loop."""
        assert self.host.loop is not None
        return asyncio.run_coroutine_threadsafe(work, self.host.loop).result(timeout=60)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def running_row_service(
    folder: Path, port: int = 0, now: float = 1000.0, stages: Sequence[str] = ()
) -> Generator[RunningRowService]:
    folder.mkdir(exist_ok=True)
    signer = Signer.create(folder / "keys", "test")
    host = RowServiceHost(folder / "ledger", now, stages)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        host.loop = asyncio.get_running_loop()
        timer = asyncio.create_task(host.run())
        yield
        timer.cancel()
        await asyncio.wait([timer])
        host.ledger.close()

    routes = row_routes(host.rows)
    app = build_app(routes, signer.verifier(Audience.DATAFLOW), title="rows", lifespan=lifespan)
    port = port or free_port()
    listener = server(app, "127.0.0.1", port)
    listener.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    thread = threading.Thread(target=lambda: asyncio.run(listener.serve()), daemon=True)
    thread.start()
    while not listener.started:
        assert thread.is_alive(), "the server exited before it started"
    try:
        yield RunningRowService(host=host, url=f"http://127.0.0.1:{port}", signer=signer)
    finally:
        listener.should_exit = True
        thread.join(timeout=60)
        assert not thread.is_alive()
