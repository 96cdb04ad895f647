# SPDX-License-Identifier: Apache-2.0
"""Services that answer in the process of a test, without sockets: hundreds of hostile requests in
the time of a few."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx2
from starlette.applications import Starlette
from tests.contract.dataflow_server import small_config

from penstock.config import RunConfig
from penstock.dataflow.service.build import build
from penstock.dataflow.service.server import build_server, surface
from penstock.weights.serving.origin import Origin
from penstock.weights.serving.server import build as build_weight_server
from penstock.weights.store import DirectoryStore
from penstock.wire.auth import Audience, Role, Signer
from penstock.wire.codec import MSGPACK, encode


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """The routes of one service."""

    app: Starlette
    http: httpx2.AsyncClient
    signer: Signer
    audience: Audience

    def token(self, role: Role, subject: str = "n") -> str:
        return self.signer.mint(role, [self.audience], ttl_s=3600, subject=subject)

    def role_for(self, method: str, path: str) -> Role:
        """An operator where the route lets one in, else a node."""
        found = cast(Any, self.app).route_table.find(method, path.partition("?")[0])
        roles = {Role.ADMIN} if found is None else found[0].spec.roles
        return Role.ADMIN if Role.ADMIN in roles else Role.ROLLOUT

    async def call(
        self,
        method: str,
        path: str,
        role: Role | None = None,
        *,
        body: object = None,
        content: bytes = b"",
        media_type: str = MSGPACK,
    ) -> httpx2.Response:
        """`body` is encoded; `content` is sent as it is."""
        token = self.token(role or self.role_for(method, path))
        headers = {"authorization": f"Bearer {token}", "content-type": media_type}
        content = content if body is None else encode(body)
        return await self.http.request(method, path, headers=headers, content=content)


@asynccontextmanager
async def dataflow_door(folder: Path, config: RunConfig | None = None) -> AsyncGenerator[Door]:
    config = config or small_config()
    signer = Signer.create(folder / "keys", config.name)
    service = build(config, folder / "ledger")
    verifier = signer.verifier(Audience.DATAFLOW)
    app = build_server(surface(service, config, "http://127.0.0.1:1"), verifier)
    async with _door(app, signer, Audience.DATAFLOW) as door:
        yield door


@asynccontextmanager
async def weights_door(folder: Path) -> AsyncGenerator[Door]:
    signer = Signer.create(folder / "keys", "run")
    source = Origin(DirectoryStore(folder / "store"))
    app = build_weight_server(source, signer.verifier(Audience.WEIGHTS))
    async with _door(app, signer, Audience.WEIGHTS) as door:
        yield door


@asynccontextmanager
async def _door(app: Starlette, signer: Signer, audience: Audience) -> AsyncGenerator[Door]:
    transport = httpx2.ASGITransport(app=app)
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=transport, base_url="http://in-process") as http,
    ):
        yield Door(app=app, http=http, signer=signer, audience=audience)
