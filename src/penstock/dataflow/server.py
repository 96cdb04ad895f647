# SPDX-License-Identifier: Apache-2.0
"""HTTP surface of the dataflow service, and the one place where its parts are wired together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

import structlog
from starlette.applications import Starlette

from penstock.config import RunConfig
from penstock.dataflow import status as reading
from penstock.dataflow.build import build, run_facts
from penstock.dataflow.protocol import (
    BatchAnswer,
    BatchRequest,
    CheckpointsRequest,
    CommitRequest,
    DeliveryAnswer,
    DeliveryRequest,
    Done,
    Heartbeat,
    HeartbeatAnswer,
    IncarnationAnswer,
    IncarnationRequest,
    LeaseAnswer,
    LeaseRequest,
    PolicyState,
    PublishRequest,
    Register,
    Registered,
    RowsAnswer,
    RunFacts,
    Status,
)
from penstock.dataflow.service import Dataflow
from penstock.errors import BadRequest, StoreError
from penstock.types import NodeId
from penstock.wire.auth import Role, Verifier
from penstock.wire.server import EVERYBODY, Call, Raw, Route, Tls, build_app, server

log = structlog.get_logger(__name__)

DELIVERY_BYTES = 64 << 20
NODES = frozenset({Role.ROLLOUT, Role.STAGE, Role.ADMIN})
TRAINERS = frozenset({Role.TRAINER, Role.ADMIN})
READERS = frozenset({Role.READER, Role.TRAINER, Role.ADMIN})


@dataclass(frozen=True, slots=True, kw_only=True)
class Surface:
    """The routes, bound to one service."""

    service: Dataflow
    facts: RunFacts
    weights_url: str
    ttl_s: float

    async def register(self, call: Call) -> Registered:
        body: Register = call.body
        if not 0 < body.capacity <= 100_000 or not _is_name(body.node_id):
            raise BadRequest("node_id is [A-Za-z0-9._-]{1,128}, capacity 1 to 100,000")
        return Registered(
            orders=await self.service.register(body),
            weights_url=self.weights_url,
            heartbeat_s=self.ttl_s / 4,
            ttl_s=self.ttl_s,
            facts=self.facts,
        )

    async def heartbeat(self, call: Call) -> HeartbeatAnswer:
        orders = await self.service.heartbeat(NodeId(call.path["node_id"]), call.body)
        return HeartbeatAnswer(orders=orders, weights_url=self.weights_url)

    async def leave(self, call: Call) -> Done:
        await self.service.leave(NodeId(call.path["node_id"]), call.query.get("session", ""))
        return Done()

    async def lease(self, call: Call) -> LeaseAnswer:
        return await self.service.lease(call.body, call.is_gone)

    async def deliver(self, call: Call) -> DeliveryAnswer:
        return await self.service.deliver(call.body)

    async def policy(self, call: Call) -> PolicyState:
        return self.service.policy_state(call.path["policy"])

    async def incarnate(self, call: Call) -> IncarnationAnswer:
        return await self.service.incarnate(call.path["policy"], call.body)

    async def publish(self, call: Call) -> Done:
        await self.service.publish(call.path["policy"], call.body)
        return Done()

    async def checkpoints(self, call: Call) -> Done:
        await self.service.checkpoints(call.path["policy"], call.body)
        return Done()

    async def batch(self, call: Call) -> BatchAnswer:
        return await self.service.batch(call.body)

    async def rows(self, call: Call) -> RowsAnswer:
        policy, seq = _batch_id(call.path["batch_id"])
        rank, of = call.query.get("rank", "0"), call.query.get("of", "1")
        if not (rank.isdecimal() and of.isdecimal() and len(rank + of) <= 12):
            raise BadRequest("rank and of are numbers of at most six digits")
        return await self.service.rows(policy, seq, int(rank), int(of))

    async def commit(self, call: Call) -> Done:
        policy, seq = _batch_id(call.path["batch_id"])
        await self.service.commit(policy, seq, call.body)
        return Done()

    async def status(self, call: Call) -> Status:
        return reading.status(self.service, self.facts.run)

    async def metrics(self, call: Call) -> Raw:
        body = reading.metrics(self.service, self.facts.run)
        return Raw(body, "text/plain; version=0.0.4; charset=utf-8")

    def routes(self) -> list[Route]:
        return [*self._node_routes(), *self._trainer_routes(), *self._reader_routes()]

    def _node_routes(self) -> list[Route]:
        return [
            Route(
                method="POST",
                path="/v1/nodes",
                handler=self.register,
                roles=NODES,
                summary="Join the run, or start a new life of a known node.",
                request=Register,
                response=Registered,
            ),
            Route(
                method="PUT",
                path="/v1/nodes/{node_id}",
                handler=self.heartbeat,
                roles=NODES,
                summary="Heartbeat: renews all leases of the node.",
                request=Heartbeat,
                response=HeartbeatAnswer,
            ),
            Route(
                method="DELETE",
                path="/v1/nodes/{node_id}",
                handler=self.leave,
                roles=NODES,
                summary="Leave; what the node held is given to others at once.",
                response=Done,
                query=("session",),
            ),
            Route(
                method="POST",
                path="/v1/leases",
                handler=self.lease,
                roles=NODES,
                summary="Lease up to n slots; held open when there is no work.",
                request=LeaseRequest,
                response=LeaseAnswer,
            ),
            Route(
                method="POST",
                path="/v1/trajectories",
                handler=self.deliver,
                roles=NODES | {Role.GATEWAY},
                summary="Deliver results, fenced by lease epoch; durable when answered.",
                request=DeliveryRequest,
                response=DeliveryAnswer,
                max_body_bytes=DELIVERY_BYTES,
            ),
        ]

    def _trainer_routes(self) -> list[Route]:
        return [
            Route(
                method="GET",
                path="/v1/policies/{policy}",
                handler=self.policy,
                roles=READERS,
                summary="Where this policy stands.",
                response=PolicyState,
            ),
            Route(
                method="POST",
                path="/v1/policies/{policy}/incarnations",
                handler=self.incarnate,
                roles=TRAINERS,
                summary="Become the one trainer, forking at a checkpoint.",
                request=IncarnationRequest,
                response=IncarnationAnswer,
            ),
            Route(
                method="POST",
                path="/v1/policies/{policy}/versions",
                handler=self.publish,
                roles=TRAINERS,
                summary="Publish a committed version by compare-and-set.",
                request=PublishRequest,
                response=Done,
            ),
            Route(
                method="PUT",
                path="/v1/policies/{policy}/checkpoints",
                handler=self.checkpoints,
                roles=TRAINERS,
                summary="Name the checkpoints that could be restored.",
                request=CheckpointsRequest,
                response=Done,
            ),
            Route(
                method="POST",
                path="/v1/batches",
                handler=self.batch,
                roles=TRAINERS,
                summary="The sealed manifest number seq; held open until it exists.",
                request=BatchRequest,
                response=BatchAnswer,
            ),
            Route(
                method="GET",
                path="/v1/batches/{batch_id}/rows",
                handler=self.rows,
                roles=TRAINERS,
                summary="The rows of one rank.",
                response=RowsAnswer,
                query=("rank", "of"),
            ),
            Route(
                method="POST",
                path="/v1/batches/{batch_id}/commit",
                handler=self.commit,
                roles=TRAINERS,
                summary="This batch is trained, or skipped with a reason.",
                request=CommitRequest,
                response=Done,
            ),
        ]

    def _reader_routes(self) -> list[Route]:
        return [
            Route(
                method="GET",
                path="/v1/status",
                handler=self.status,
                roles=READERS,
                summary="State of the run, and who waits for whom.",
                response=Status,
            ),
            Route(
                method="GET",
                path="/metrics",
                handler=self.metrics,
                roles=EVERYBODY,
                summary="Prometheus metrics.",
            ),
        ]


def _is_name(text: str) -> bool:
    return 0 < len(text) <= 128 and all(c.isalnum() or c in "._-" for c in text)


def _batch_id(text: str) -> tuple[str, int]:
    policy, _, seq = text.rpartition(".")
    if not (policy and seq.isdecimal() and len(seq) < 16):
        raise BadRequest(f"{text[:80]!r} is no batch id; it reads CONSUMER.SEQ")
    return policy, int(seq)


def surface(service: Dataflow, config: RunConfig, weights_url: str) -> Surface:
    return Surface(
        service=service,
        facts=run_facts(config),
        weights_url=weights_url,
        ttl_s=config.dataflow.lease.ttl_s,
    )


def build_server(surface: Surface, verifier: Verifier) -> Starlette:
    """The app with the service's timers inside its lifespan; a storage failure ends the process
    aloud."""
    service = surface.service

    def ended(timers: asyncio.Task[None]) -> None:
        error = None if timers.cancelled() else timers.exception()
        if error is not None and not isinstance(error, StoreError):  # the ledger told of those
            service.ledger.on_failure(StoreError(f"the timers ended: {error!r}"))

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        timers = asyncio.create_task(service.run_timers(), name="timers")
        timers.add_done_callback(ended)
        try:
            yield
        finally:
            timers.cancel()
            await asyncio.wait([timers])
            service.ledger.close()

    return build_app(surface.routes(), verifier, title="penstock dataflow", lifespan=lifespan)


async def serve_dataflow(
    config: RunConfig,
    run_dir: Path,
    *,
    host: str,
    port: int,
    weights_url: str,
    verifier: Verifier,
    tls: Tls | None = None,
) -> None:
    """Serve one run until told to stop; raises StoreError when storage failed."""
    service = build(config, run_dir / "ledger")
    app = build_server(surface(service, config, weights_url), verifier)
    listener = server(app, host, port, tls)
    failures: list[StoreError] = []

    def stop(error: StoreError) -> None:
        log.error("storage failed; this service ends and acknowledges nothing more", why=str(error))
        failures.append(error)
        listener.should_exit = True

    service.ledger.on_failure = stop
    log.info("dataflow serves", run=config.name, host=host, port=port)
    await listener.serve()
    if failures:
        raise failures[0]
