# SPDX-License-Identifier: Apache-2.0
"""HTTP routes for external sessions: open, show, reward, end, forget. They are added to the
dialects' routes.

A session accepts its keys, the token that opened it, and operators' tokens. The agent's key shows
and ends its session; it neither rewards nor forgets it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.errors import Forbidden, WireError
from penstock.gateway.online import OnlineGateway, OnlineSession
from penstock.gateway.server import SESSION, build_app, read_key
from penstock.observe.metric_names import PROMETHEUS
from penstock.types import JsonObject
from penstock.wire.codec import JSON, decode, encode_json
from penstock.wire.server import error_response, read_body

T = TypeVar("T")
MAX_BODY_BYTES = 64 << 10
Handler = Callable[[Request], Awaitable[JsonObject | bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenBody:
    """`POST /sessions`."""

    name: str = ""
    """Name used in the path; defaults to the session id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardBody:
    """`POST /sessions/{id}/reward`."""

    reward: float
    reason: str = ""
    """Free text for humans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineRoute:
    """One route of external sessions."""

    method: str
    path: str
    callers: str
    """Whose credentials it accepts."""
    summary: str


_JUDGES = "the session's reward key, the token that opened it, gateway, admin"
_ITS_OWN = f"the session's key, {_JUDGES}"
ONLINE_ROUTES = (
    OnlineRoute(
        method="POST",
        path="/sessions",
        callers="session, gateway, admin",
        summary="Open a session; returns its id, its key, its reward key and base URL.",
    ),
    OnlineRoute(
        method="GET",
        path="/sessions",
        callers="gateway, admin",
        summary="Counts since the start: opened, recorded, rewarded, expired, and so on.",
    ),
    OnlineRoute(
        method="GET",
        path="/metrics",
        callers="gateway, admin",
        summary="The same counts, and the sessions that are open, for Prometheus.",
    ),
    OnlineRoute(method="GET", path=SESSION, callers=_ITS_OWN, summary="The state of a session."),
    OnlineRoute(
        method="DELETE",
        path=SESSION,
        callers=_JUDGES,
        summary="Forget a session that the run does not have yet.",
    ),
    OnlineRoute(
        method="POST",
        path=f"{SESSION}/reward",
        callers=_JUDGES,
        summary="Set the reward and end the session; the first reward is final.",
    ),
    OnlineRoute(
        method="POST",
        path=f"{SESSION}/end",
        callers=_ITS_OWN,
        summary="End the session; its reward may follow later.",
    ),
)
"""The routes in the order of their handlers in `OnlineRoutes.routes`."""


def build_online_app(online: OnlineGateway) -> Starlette:
    """The gateway's app plus the routes of external sessions."""
    app = build_app(online)
    app.router.routes += OnlineRoutes(online).routes()
    return app


class _Collector:
    def __init__(self, online: OnlineGateway) -> None:
        self._online = online

    def collect(self) -> Iterator[Metric]:
        known = PROMETHEUS["penstock_gateway_sessions"]
        events = CounterMetricFamily(known.name, known.meaning, labels=known.labels)
        for event, number in sorted(self._online.counts.items()):
            events.add_metric([event], number)
        known = PROMETHEUS["penstock_gateway_open_sessions"]
        yield from (events, GaugeMetricFamily(known.name, known.meaning, self._online.num_open))


class OnlineRoutes:
    def __init__(self, online: OnlineGateway) -> None:
        self._online = online

    async def open(self, request: Request) -> JsonObject:
        caller = self._online.admit(read_key(request))
        body = await _read(request, OpenBody)
        entry = self._online.open_session(caller.owner, body.name, caller.is_revoked)
        base_url = f"{str(request.base_url).rstrip('/')}/sessions/{entry.id}/v1"
        keys = {"api_key": entry.api_key, "reward_key": entry.reward_key}
        return {**self._describe(entry), **keys, "base_url": base_url}

    async def reward(self, request: Request) -> JsonObject:
        entry = self._lookup(request, needs_judge=True)
        body = await _read(request, RewardBody)
        self._online.reward(entry, body.reward, body.reason)
        return self._describe(entry)

    def _on_session(
        self, act: Callable[[OnlineSession], None] | None = None, *, needs_judge: bool = False
    ) -> Handler:
        """Act on the session in the path, then describe it."""

        async def handle(request: Request) -> JsonObject:
            entry = self._lookup(request, needs_judge=needs_judge)
            if act is not None:
                act(entry)
            return self._describe(entry)

        return handle

    async def counts(self, request: Request) -> JsonObject:
        self._require_operator(request)
        return dict(self._online.counts)

    async def metrics(self, request: Request) -> bytes:
        self._require_operator(request)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(self._online))
        return generate_latest(registry)

    def _require_operator(self, request: Request) -> None:
        if not self._online.admit(read_key(request)).is_operator:
            raise Forbidden("session counts need a gateway or admin token")

    def routes(self) -> list[Route]:
        handlers = (
            self.open,
            self.counts,
            self.metrics,
            self._on_session(),
            self._on_session(self._online.forget, needs_judge=True),
            self.reward,
            self._on_session(self._online.end),
        )
        return [
            _route(declared.method, declared.path, handler)
            for declared, handler in zip(ONLINE_ROUTES, handlers, strict=True)
        ]

    def _lookup(self, request: Request, *, needs_judge: bool) -> OnlineSession:
        return self._online.lookup(
            request.path_params["session_id"], token=read_key(request), needs_judge=needs_judge
        )

    def _describe(self, entry: OnlineSession) -> JsonObject:
        return {
            "id": entry.id,
            "name": entry.name,
            "state": entry.state,
            "is_recorded": entry.has_slot,
            "reward": entry.reward,
            "reward_deadline_s": self._online.terms.reward_deadline_s,
            "idle_s": self._online.terms.idle_s,
        }


def _route(method: str, path: str, handler: Handler) -> Route:
    async def handle(request: Request) -> Response:
        try:
            found = await handler(request)
            is_text = isinstance(found, bytes)
            body, kind = (found, CONTENT_TYPE_LATEST) if is_text else (encode_json(found), JSON)
            return Response(body, media_type=kind)
        except WireError as error:
            return error_response(error)

    return Route(path, handle, methods=[method])


async def _read(request: Request, kind: type[T]) -> T:
    body = await read_body(request, MAX_BODY_BYTES)
    return decode(body or b"{}", kind, media_type=JSON)
