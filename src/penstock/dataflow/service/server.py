# SPDX-License-Identifier: Apache-2.0
"""HTTP server of the dataflow service: the coordinator with partition 0, or another partition
alone."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import structlog
import uvicorn
from starlette.applications import Starlette

from penstock.config import RunConfig
from penstock.dataflow.explain.explain import Explanation, explain
from penstock.dataflow.ledger.recorded import RecordedRun
from penstock.dataflow.ledger.sealed_batches import partition_folder
from penstock.dataflow.report.shape import BalanceReport
from penstock.dataflow.service.build import build_partition, build_partly_restored, run_info
from penstock.dataflow.service.coordinator import DataflowService, EvaluationWriter
from penstock.dataflow.service.messages import Ack
from penstock.dataflow.service.nodes.eviction import evict_denied
from penstock.dataflow.service.nodes.messages import RunInfo
from penstock.dataflow.service.nodes.routes import node_routes
from penstock.dataflow.service.operators import status as reading
from penstock.dataflow.service.operators.action_log import ActionLog
from penstock.dataflow.service.operators.messages import ForgetSessionAnswer, NodeTags, Status
from penstock.dataflow.service.operators.observe import observe_service
from penstock.dataflow.service.operators.prometheus import (
    partition_prometheus_text,
    prometheus_text,
)
from penstock.dataflow.service.partition import PartitionService
from penstock.dataflow.service.partitions.coordinator_client import CoordinatorClient
from penstock.dataflow.service.partitions.routes import OPERATORS, PartitionRoutes, RowPayloadRoutes
from penstock.dataflow.service.row_payloads import RowPayloads
from penstock.dataflow.service.rows.routes import row_routes
from penstock.dataflow.service.trainers.messages import VersionsInUse
from penstock.dataflow.service.trainers.routes import CHECKERS, READERS, TrainerRoutes
from penstock.durable import write_durably
from penstock.errors import BadRequest, StoreError
from penstock.observe.admin_log import AdminAction, AdminLog
from penstock.observe.metrics import MetricsFile
from penstock.types import NodeId
from penstock.wire.auth import Verifier
from penstock.wire.codec import encode_json
from penstock.wire.held_token import Token
from penstock.wire.routes import ALL_ROLES, Call, RawResponse, Route, route, routes_of
from penstock.wire.server import build_app
from penstock.wire.serving import Tls, require_tls_off_loopback, server, tune_memory

TAG = re.compile(r"[A-Za-z0-9_=.-]{1,64}")
log = structlog.get_logger(__name__)

REPORT_INTERVAL_S = 10.0
"""Seconds between two reports that are stored for the time after the service."""
CONTENT_TYPE_PLAIN = "text/plain; version=0.0.4; charset=utf-8"
BEFORE_RESTORE = frozenset({("POST", "/v1/leases"), ("PUT", "/v1/nodes/{node_id}")})
"""Answered before the restore is complete: they need only the partition and end no group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceRoutes:
    """The routes, bound to one service."""

    service: DataflowService
    facts: RunInfo
    weights_url: str
    ttl_s: float

    @route("GET", "/v1/status", READERS, shares_budget=True)
    async def status(self, call: Call) -> Status:
        """State of the run, and what it is waiting for."""
        return reading.status(self.service, self.facts.run)

    @route("GET", "/v1/report", READERS, shares_budget=True)
    async def report(self, call: Call) -> BalanceReport:
        """Waiting times, wasted work, and the recommended number of nodes."""
        return self.make_report()

    def make_report(self) -> BalanceReport:
        service = self.service
        look = observe_service(service.coordinator, service.host)
        return service.balance.report(look, service.process.clock())

    @route("GET", "/v1/versions", READERS | CHECKERS, shares_budget=True)
    async def versions(self, call: Call) -> VersionsInUse:
        """Published versions that may still be requested from the weight store."""
        nodes = self.service.partition.nodes.values()
        return self.service.trainers.versions_in_use([live for node in nodes for live in node.live])

    @route(
        "POST",
        "/v1/nodes/{node_id}/drain",
        OPERATORS,
        query=("why",),
        audited=AdminAction.NODE_DRAINED,
    )
    async def drain(self, call: Call) -> Ack:
        """Drain this node: it returns its work and leaves; the status shows when it is gone."""
        self.service.nodes.drain(call.path["node_id"])
        return Ack()

    @route("GET", "/v1/explain/{id}", READERS, shares_budget=True)
    async def explain(self, call: Call) -> Explanation:
        """Explain a skipped task, a dropped row, or the composition of a batch."""
        recorded = RecordedRun(coordinator=self.service.process.ledger.tables, partitions={})
        return await asyncio.to_thread(explain, recorded, call.path["id"])

    @route("DELETE", "/v1/sessions/{session}", OPERATORS, audited=AdminAction.SESSION_FORGOTTEN)
    async def forget(self, call: Call) -> ForgetSessionAnswer:
        """Forget a session: remove it if untrained, mask it in sealed batches."""
        return await self.service.session_eraser.forget(call.path["session"])

    @route(
        "PUT",
        "/v1/nodes/{node_id}/tags",
        OPERATORS,
        query=("add", "remove", "why"),
        audited=AdminAction.NODE_TAGGED,
    )
    async def tag(self, call: Call) -> NodeTags:
        """Add and remove tags of a node, separated by commas; `why` goes to the log of actions."""
        node_id = NodeId(call.path["node_id"])
        add, remove = (_tags(call.query.get(name, "")) for name in ("add", "remove"))
        tags = self.service.sharing.retag(node_id, add, remove)
        await self.service.process.make_durable()
        return NodeTags(node_id=node_id, tags=tuple(tags))

    @route("GET", "/metrics", ALL_ROLES, response=None, shares_budget=True)
    async def metrics(self, call: Call) -> RawResponse:
        """Prometheus metrics."""
        return RawResponse(prometheus_text(self.service, self.facts.run), CONTENT_TYPE_PLAIN)

    def routes(self) -> list[Route]:
        service = self.service
        nodes = node_routes(
            service.nodes,
            self.facts,
            self.weights_url,
            self.ttl_s,
            partitions=lambda: service.partitions.addresses,
        )
        routes = [
            *nodes,
            *routes_of(TrainerRoutes(trainers=service.trainers)),
            *routes_of(PartitionRoutes(partitions=service.partitions)),
            *row_routes(service.rows),
            *routes_of(self),
        ]
        if service.is_restored.is_set():
            return routes
        return [
            declared
            if (declared.method, declared.path) in BEFORE_RESTORE
            else _after_restore(declared, service.is_restored)
            for declared in routes
        ]


def _tags(text: str) -> list[str]:
    found = [tag.strip() for tag in text.split(",") if tag.strip()]
    for tag in found:
        if not TAG.fullmatch(tag):
            raise BadRequest(f"tag {tag[:80]!r} is not valid; use up to 64 letters, digits or _=.-")
    return found


def _after_restore(declared: Route, is_restored: asyncio.Event) -> Route:
    """The same route, held open until the restore is complete."""

    async def handler(call: Call) -> object:
        await is_restored.wait()
        return await declared.handler(call)

    return replace(declared, handler=handler)


def surface(service: DataflowService, config: RunConfig, weights_url: str) -> ServiceRoutes:
    return ServiceRoutes(
        service=service,
        facts=run_info(config),
        weights_url=weights_url,
        ttl_s=config.dataflow.lease.ttl_s,
    )


def build_server(
    surface: ServiceRoutes,
    verifier: Verifier,
    *,
    report_file: Path | None = None,
    admin_log: AdminLog | None = None,
) -> Starlette:
    """The coordinator and its partition as an app that runs their timers in its lifespan, and
    stores its report in a file."""
    service = surface.service
    actions = None if admin_log is None else ActionLog(service.process, admin_log)
    if actions is not None:
        service.trainers.on_quarantine = actions.on_quarantine
    reports = _stored_reports(surface, report_file) if report_file else None
    return _app(
        surface.routes(),
        service,
        service.run_timers,
        verifier,
        "penstock dataflow",
        reports,
        actions,
    )


def build_partition_server(
    service: PartitionService, config: RunConfig, weights_url: str, verifier: Verifier
) -> Starlette:
    payloads = RowPayloads(service.process.ledger, service.rows.blobs)
    routes = [
        *node_routes(service.nodes, run_info(config), weights_url, config.dataflow.lease.ttl_s),
        *routes_of(RowPayloadRoutes(payloads=payloads)),
        *row_routes(service.rows),
        *routes_of(_PartitionMetricsRoute(service=service)),
    ]
    return _app(routes, service, service.run, verifier, "penstock dataflow partition")


@dataclass(frozen=True, slots=True, kw_only=True)
class _PartitionMetricsRoute:
    service: PartitionService

    @route("GET", "/metrics", ALL_ROLES, response=None, shares_budget=True)
    async def metrics(self, call: Call) -> RawResponse:
        """Prometheus metrics of the partition and its nodes."""
        return RawResponse(partition_prometheus_text(self.service), CONTENT_TYPE_PLAIN)


def _app(
    routes: list[Route],
    service: DataflowService | PartitionService,
    loops: Callable[[], Coroutine[None, None, None]],
    verifier: Verifier,
    title: str,
    reports: AbstractAsyncContextManager[None] | None = None,
    actions: ActionLog | None = None,
) -> Starlette:
    """A failed loop or disk ends the process with an error."""

    def ended(running: asyncio.Task[None]) -> None:
        error = None if running.cancelled() else running.exception()
        if error is not None and not isinstance(error, StoreError):  # the ledger has reported those
            service.process.ledger.on_failure(
                StoreError(f"a loop of the service failed: {error!r}")
            )

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        running = [
            asyncio.create_task(loops(), name="loops"),
            asyncio.create_task(
                evict_denied(service.nodes, service.partition, verifier.denied), name="evictions"
            ),
        ]
        for task in running:
            task.add_done_callback(ended)
        try:
            async with reports or contextlib.nullcontext():
                yield
        finally:
            for task in running:
                task.cancel()
            await asyncio.wait(running)
            service.close()

    on_action = None if actions is None else actions.on_call
    return build_app(routes, verifier, title=title, lifespan=lifespan, on_action=on_action)


@contextlib.asynccontextmanager
async def _stored_reports(routes: ServiceRoutes, path: Path) -> AsyncGenerator[None]:
    """Store the report in this file at intervals and at the end: its time accounts are in memory
    only, and people ask for them after the run."""

    async def store() -> None:
        if not routes.service.is_restored.is_set():
            return
        try:
            await asyncio.to_thread(write_durably, path, encode_json(routes.make_report()))
        except OSError as error:  # a full disk must not end the service
            log.warning("report not stored", path=str(path), error=str(error))

    async def store_at_intervals() -> None:
        """consumes: time · produces: the stored report · waits for: REPORT_INTERVAL_S"""
        await routes.service.is_restored.wait()
        while True:
            await asyncio.sleep(REPORT_INTERVAL_S)
            await store()

    storing = asyncio.create_task(store_at_intervals(), name="reports")
    try:
        yield
    finally:
        storing.cancel()
        await asyncio.wait([storing])
        await store()


async def serve_dataflow(
    config: RunConfig,
    run_dir: Path,
    *,
    host: str,
    port: int,
    weights_url: str,
    verifier: Verifier,
    partition_urls: Mapping[int, str],
    tls: Tls | None = None,
    evaluation_writer: EvaluationWriter | None = None,
) -> None:
    """Serve one run until stopped; raises StoreError when storage failed.

    partition_urls: the addresses of its own partitions, by number · evaluation_writer: stores the
    results of evaluations."""
    require_tls_off_loopback(host, tls)  # before the ledger is opened and the log says it serves
    failures = _StorageFailures()
    service = build_partly_restored(config, run_dir / "ledger", on_failure=failures)
    service.partitions.own_urls = partition_urls
    service.evaluation_writer = evaluation_writer
    routes = surface(service, config, weights_url)
    app = build_server(
        routes,
        verifier,
        report_file=run_dir / "run" / "report.json",
        admin_log=AdminLog(run_dir),
    )
    service.sharing.record = MetricsFile(run_dir / "events.jsonl").append
    log.info("dataflow serves", run=config.name, host=host, port=port)
    await _serve(failures, server(app, host, port, tls))


async def serve_partition(
    config: RunConfig,
    run_dir: Path,
    index: int,
    *,
    coordinator_url: str,
    token: Token,
    url: str,
    host: str,
    port: int,
    weights_url: str,
    verifier: Verifier,
    tls: Tls | None = None,
) -> None:
    """Serve one additional partition of a run until stopped."""
    require_tls_off_loopback(host, tls)
    coordinator = CoordinatorClient(coordinator_url, token)
    folder = partition_folder(run_dir / "ledger", index)
    failures = _StorageFailures()
    service = build_partition(config, folder, index, coordinator, url=url, on_failure=failures)
    app = build_partition_server(service, config, weights_url, verifier)
    log.info("partition serves", run=config.name, index=index, host=host, port=port)
    await _serve(failures, server(app, host, port, tls))


class _StorageFailures:
    """Ledger errors after which this process must exit."""

    def __init__(self) -> None:
        self.errors: list[StoreError] = []
        self.has_failed = asyncio.Event()

    def __call__(self, error: StoreError) -> None:
        log.error("storage failed; service exits and acknowledges nothing more", why=str(error))
        self.errors.append(error)
        self.has_failed.set()


async def _serve(failures: _StorageFailures, listener: uvicorn.Server) -> None:
    async def stop() -> None:
        await failures.has_failed.wait()
        listener.should_exit = True

    tune_memory()
    gc.enable()
    stopper = asyncio.create_task(stop(), name="storage failures")
    try:
        await listener.serve()
    finally:
        stopper.cancel()
    if failures.errors:
        raise failures.errors[0]
