# SPDX-License-Identifier: Apache-2.0
"""A ledger that knows only versions, and the processes around it that a campaign may hurt."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tests.chaos.weights_content import tensors, value_of
from tests.chaos.weights_processes import KEPT, POLICY
from tests.unit.weights.weight_servers import listening

from penstock.dataflow.core.versions import Lineage
from penstock.dataflow.records import CommitRecord
from penstock.errors import Conflict
from penstock.fleet.ports import free_port
from penstock.wire.auth import Audience, Role, Signer

ROOT = Path(__file__).parents[2]


@dataclass(slots=True)
class Ledger:
    """The real lineage under a few routes. A number counts as committed once it is published, which
    spares the campaign its batches."""

    lineage: Lineage = field(default_factory=lambda: Lineage(POLICY))
    served: dict[str, int] = field(default_factory=dict[str, int])
    """By node: the number it served last."""
    num_served: int = 0
    num_fenced: int = 0
    wrong: list[str] = field(default_factory=list[str])
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def newest(self) -> int:
        record = self.lineage.newest
        return -1 if record is None else record.number

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/incarnate", self.incarnate, methods=["POST"]),
                Route("/publish", self.publish, methods=["POST"]),
                Route("/used", self.used),
                Route("/wanted", self.wanted),
                Route("/served", self.heard, methods=["POST"]),
            ]
        )

    async def incarnate(self, request: Request) -> Response:
        lineage = self.lineage
        record = lineage.incarnate(
            expected=lineage.incarnation,
            number=lineage.number,
            seq=lineage.seq,
            request_id=os.urandom(8).hex(),
            now=0.0,
        )
        lineage.apply_incarnation(record)
        return JSONResponse({"incarnation": record.incarnation, "number": record.number})

    async def publish(self, request: Request) -> Response:
        body: dict[str, Any] = await request.json()
        lineage = self.lineage
        try:
            lineage.require(body["incarnation"])
            if body["number"] == lineage.number + 1:
                self._commit()
            lineage.apply_version(lineage.publish(**body, now=0.0))
        except Conflict as error:
            self.num_fenced += 1
            return Response(str(error), status_code=409)
        return Response()

    def _commit(self) -> None:
        lineage = self.lineage
        record = CommitRecord(
            consumer=POLICY,
            seq=lineage.seq + 1,
            incarnation=lineage.incarnation,
            number=lineage.number + 1,
            skipped="",
            stats="{}",
            at=0.0,
        )
        lineage.apply_commit(record)

    async def used(self, request: Request) -> Response:
        return JSONResponse([r.manifest_digest for r in [*self.lineage.versions()][-KEPT:]])

    async def wanted(self, request: Request) -> Response:
        record = self.lineage.newest
        if record is None:
            return Response()
        return JSONResponse(
            {
                "policy": record.policy,
                "incarnation": record.incarnation,
                "number": record.number,
                "manifest_digest": record.manifest_digest,
            }
        )

    async def heard(self, request: Request) -> Response:
        body: dict[str, Any] = await request.json()
        number: int = body["number"]
        if body["value"] != value_of(tensors(number)):
            self.wrong.append(f"{body['node']} serves something else as number {number}")
        self.served[body["node"]] = number
        self.num_served += 1
        self.changed.set()
        return Response()

    async def until(self, is_so: Callable[[], bool], what: str, within_s: float) -> None:
        try:
            async with asyncio.timeout(within_s):
                while not is_so():
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            raise AssertionError(
                f"{what}: not within {within_s:g} s; newest is {self.newest}, served {self.served}"
            ) from None


class World:
    """The parties of one campaign; nothing outlives `close`."""

    def __init__(self, root: Path, ledger: Ledger, ledger_url: str) -> None:
        self.root = root
        self.ledger = ledger
        signer = Signer.create(root / "keys", "run")
        weight_server, relay = free_port(), free_port()
        weight_server_token = signer.mint(
            Role.RELAY, [Audience.WEIGHTS, Audience.RELAY], ttl_s=86_400
        )
        for_relay = signer.mint(Role.ROLLOUT, [Audience.RELAY], ttl_s=86_400)
        weight_server_url, relay_url = (
            f"http://127.0.0.1:{port}" for port in (weight_server, relay)
        )
        weight_servers = [[relay_url, for_relay], [weight_server_url, weight_server_token]]
        self._orders: dict[str, dict[str, Any]] = {
            "weight_server": {"process": "weight_server", "port": weight_server},
            "relay": {
                "process": "relay",
                "port": relay,
                "upstream": weight_server_url,
                "token": weight_server_token,
            },
            "trainer": {"process": "trainer", "ledger": ledger_url},
            "trainer-2": {"process": "trainer", "ledger": ledger_url},
            **{
                name: {
                    "process": "node",
                    "name": name,
                    "ledger": ledger_url,
                    "weight_servers": weight_servers,
                }
                for name in ("node-a", "node-b")
            },
        }
        self._pids: dict[str, int] = {}
        self._warm = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.weights_processes"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )

    def close(self) -> None:
        for name in list(self._pids):
            self.kill(name)
        assert self._warm.stdin is not None and self._warm.stdout is not None
        self._warm.stdin.close()
        self._warm.wait(timeout=300)
        self._warm.stdout.close()

    def start(self, name: str, kill_at: tuple[str, int] | None = None) -> None:
        assert self._warm.stdin is not None and self._warm.stdout is not None
        log = str(self.root / f"{name}.log")
        order = {**self._orders[name], "root": str(self.root), "log": log, "kill_at": kill_at}
        self._warm.stdin.write(json.dumps(order) + "\n")
        self._warm.stdin.flush()
        self._pids[name] = int(self._warm.stdout.readline())

    def signal(self, name: str, number: signal.Signals) -> None:
        try:
            os.kill(self._pids[name], number)
        except ProcessLookupError:
            return

    def kill(self, name: str) -> None:
        self.signal(name, signal.SIGKILL)
        del self._pids[name]

    def has_ended(self, name: str) -> bool:
        return not Path(f"/proc/{self._pids[name]}").exists()

    async def wait_ended(self, names: Sequence[str], within_s: float) -> bool:
        """Whether one of them has by then; a point may lie on a way that is not taken now."""
        for _ in range(int(within_s / 0.02)):
            if any(map(self.has_ended, names)):
                return True
            await asyncio.sleep(0.02)
        return False

    def log(self, name: str) -> str:
        path = self.root / f"{name}.log"
        return path.read_text()[-2000:] if path.exists() else ""


@asynccontextmanager
async def world(root: Path) -> AsyncGenerator[World]:
    ledger = Ledger()
    async with listening(ledger.app()) as url:
        made = World(root, ledger, url)
        try:
            for name in ("weight_server", "relay", "trainer", "node-a", "node-b"):
                made.start(name)
            yield made
        finally:
            made.close()
