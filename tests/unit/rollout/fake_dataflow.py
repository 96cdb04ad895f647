# SPDX-License-Identifier: Apache-2.0
"""A fake dataflow that implements docs/reference/protocol.md over real HTTP, with faults."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette

from penstock.dataflow.core.leasing import DeliveryStatus, Grant, RegisterRequest
from penstock.dataflow.service.messages import Ack
from penstock.dataflow.service.nodes.messages import (
    DeliveryAnswer,
    DeliveryRequest,
    DeliveryResult,
    Heartbeat,
    HeartbeatAnswer,
    LeaseAnswer,
    LeaseRequest,
    NodeDirectives,
    RegisterAnswer,
    RunInfo,
)
from penstock.errors import Fenced, NotFound, Unreachable
from penstock.tasks import reverse
from penstock.types import (
    GroupId,
    NodeId,
    PolicyName,
    PublishedVersion,
    RowId,
    SamplingSpec,
    Task,
    Trajectory,
)
from penstock.wire.auth import Audience, Role, Signer
from penstock.wire.codec import decode
from penstock.wire.routes import Call, Route
from penstock.wire.server import build_app
from penstock.wire.serving import serve_on_socket

POLICY = PolicyName("policy")
RUN = "test-run"


def facts(**changes: object) -> RunInfo:
    values: dict[str, object] = {
        "run": RUN,
        "policies": (POLICY,),
        "workflow": "single_turn",
        "reward": "penstock.tasks.reverse:reward",
        "sampling": SamplingSpec(max_tokens=3),
        "engine": "scripted",
        "torch_threads": 1,
        "start_to_close_s": 60.0,
    }
    return RunInfo(**{**values, **changes})  # type: ignore[arg-type]


def task(ordinal: int = 0, *, workflow: str = "") -> Task:
    return Task(
        key=f"task-{ordinal}",
        source="train",
        ordinal=ordinal,
        payload=reverse.make_task(ordinal, 0),
        workflow=workflow,
        seed=ordinal,
    )


def wanted(number: int, incarnation: int = 1) -> PublishedVersion:
    return PublishedVersion(
        policy=POLICY, incarnation=incarnation, number=number, manifest_digest=f"{number:064x}"
    )


class FakeDataflow:
    """Grants `num_slots` slots one by one, in groups of four, and records all calls."""

    def __init__(self, keys: Path, *, num_slots: int, run_info: RunInfo | None = None) -> None:
        self.facts = run_info or facts()
        self.orders = NodeDirectives(wanted=(wanted(0),))
        self.waiting: list[tuple[int, int]] = [(slot, 1) for slot in range(num_slots)]
        """(slot number, epoch) of the slots that are not leased."""
        self.stored: dict[RowId, bytes] = {}
        self.fenced_rows: set[RowId] = set()
        """Slots whose lease was revoked."""
        self.released: list[RowId] = []
        self.beats: list[Heartbeat] = []
        self.leases: list[LeaseRequest] = []
        self.boot_ids: dict[NodeId, str] = {}
        self.left: list[str] = []
        self.num_registered = 0
        self.lose_next_lease_answer = False
        self.hang_next_beat_s = 0.0
        self.heartbeat_s = 0.1
        self.weights_url = "http://nowhere.invalid"
        self._granted: dict[str, LeaseAnswer] = {}
        self._changed = asyncio.Condition()
        self.signer = Signer.create(keys, RUN)
        audiences = [Audience.DATAFLOW, Audience.WEIGHTS]
        self.token = self.signer.mint(Role.ROLLOUT, audiences, ttl_s=600)
        self.url = ""
        self._listener: socket.socket | None = None
        self._serving: asyncio.Task[None] | None = None

    # --- actions of tests ------------------------------------------------------------------------

    @asynccontextmanager
    async def served(self) -> AsyncGenerator[FakeDataflow]:
        self.up()
        try:
            yield self
        finally:
            await self.down()

    def up(self) -> None:
        port = int(self.url.rsplit(":", 1)[1]) if self.url else 0
        self._listener = socket.create_server(("127.0.0.1", port))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._serving = asyncio.create_task(serve_on_socket(self._app(), self._listener))

    async def down(self) -> None:
        assert self._serving is not None and self._listener is not None
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)
        self._listener.close()

    async def order(self, orders: NodeDirectives) -> None:
        async with self._changed:
            self.orders = orders
            self._changed.notify_all()

    async def until_stored(self, num_rows: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.stored) >= num_rows)

    def trajectories(self) -> list[Trajectory]:
        return [decode(payload, Trajectory) for payload in self.stored.values()]

    # --- the contract ----------------------------------------------------------------------------

    def _app(self) -> Starlette:
        rollout = frozenset({Role.ROLLOUT})

        def route(method: str, path: str, handler: object, request: type | None) -> Route:
            return Route(
                method=method,
                path=path,
                handler=handler,  # type: ignore[arg-type]
                roles=rollout,
                summary=path,
                request=request,
                max_body_bytes=8 << 20,
            )

        routes = [
            route("POST", "/v1/nodes", self._register, RegisterRequest),
            route("PUT", "/v1/nodes/{node_id}", self._heartbeat, Heartbeat),
            route("DELETE", "/v1/nodes/{node_id}", self._leave, None),
            route("POST", "/v1/leases", self._lease, LeaseRequest),
            route("POST", "/v1/trajectories", self._deliver, DeliveryRequest),
        ]
        return build_app(routes, self.signer.verifier(Audience.DATAFLOW), title="fake dataflow")

    async def _register(self, call: Call) -> RegisterAnswer:
        body: RegisterRequest = call.body
        self.boot_ids[body.node_id] = body.boot_id
        self.num_registered += 1
        return RegisterAnswer(
            orders=self.orders,
            weights_url=self.weights_url,
            heartbeat_s=self.heartbeat_s,
            ttl_s=2.0,
            facts=self.facts,
        )

    def _check(self, node_id: str, boot_id: str) -> None:
        known = self.boot_ids.get(NodeId(node_id))
        if known is None:
            raise NotFound(f"no node {node_id}")
        if known != boot_id:
            raise Fenced(f"node {node_id} has a newer boot_id")

    async def _heartbeat(self, call: Call) -> HeartbeatAnswer:
        body: Heartbeat = call.body
        self._check(call.path["node_id"], body.boot_id)
        hang_s, self.hang_next_beat_s = self.hang_next_beat_s, 0.0
        if hang_s:
            await asyncio.sleep(hang_s)
            raise Unreachable("the answer was lost on the way")
        self.beats.append(body)
        return HeartbeatAnswer(orders=self.orders, weights_url=self.weights_url)

    async def _leave(self, call: Call) -> Ack:
        self._check(call.path["node_id"], call.query["boot_id"])
        self.left.append(call.path["node_id"])
        return Ack()

    async def _lease(self, call: Call) -> LeaseAnswer:
        body: LeaseRequest = call.body
        self._check(body.node_id, body.boot_id)
        self.leases.append(body)
        if body.request_id not in self._granted:
            orders = self.orders
            try:
                async with asyncio.timeout(min(body.wait_s, 0.5)), self._changed:
                    await self._changed.wait_for(lambda: self.waiting or self.orders is not orders)
            except TimeoutError:
                pass
            self._granted[body.request_id] = self._grant(body.max_slots)
        if self.lose_next_lease_answer:
            self.lose_next_lease_answer = False
            raise Unreachable("the answer was lost on the way")
        return self._granted[body.request_id]

    def _grant(self, max_slots: int) -> LeaseAnswer:
        taken, self.waiting = self.waiting[:max_slots], self.waiting[max_slots:]
        grants = tuple(
            Grant(
                group_id=GroupId(f"p0-{slot // 4}"),
                slot=slot % 4,
                epoch=epoch,
                attempt=epoch,
                task=index,
                seed=slot,
            )
            for index, (slot, epoch) in enumerate(taken)
        )
        tasks = tuple(task(slot // 4) for slot, _ in taken)
        return LeaseAnswer(tasks=tasks, grants=grants, orders=self.orders)

    async def _deliver(self, call: Call) -> DeliveryAnswer:
        body: DeliveryRequest = call.body
        self._check(body.node_id, body.boot_id)
        async with self._changed:
            self.released.extend(body.released)
            results = tuple(
                DeliveryResult(row_id=d.row_id, status=self._store(d.row_id, bytes(d.payload)))
                for d in body.deliveries
            ) + tuple(
                DeliveryResult(row_id=row_id, status=DeliveryStatus.STORED)
                for row_id in body.released
            )
            self._changed.notify_all()
        return DeliveryAnswer(results=results)

    def _store(self, row_id: RowId, payload: bytes) -> DeliveryStatus:
        if row_id in self.fenced_rows:
            return DeliveryStatus.FENCED
        if row_id in self.stored:
            is_same = self.stored[row_id] == payload
            return DeliveryStatus.DUPLICATE if is_same else DeliveryStatus.CONFLICT
        self.stored[row_id] = payload
        return DeliveryStatus.STORED
