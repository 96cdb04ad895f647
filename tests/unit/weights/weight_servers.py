# SPDX-License-Identifier: Apache-2.0
"""Weight servers on loopback: the real one, and one that tampers with data."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute
from tests.unit.weights.snapshot_folders import write_folder

from penstock.types import PolicyName, PublishedVersion
from penstock.weights.deltas.chain import DeltaChain
from penstock.weights.manifest import parse_manifest
from penstock.weights.publish import StoredVersion, put_snapshot
from penstock.weights.serving.origin import Origin
from penstock.weights.serving.server import build
from penstock.weights.store import DirectoryStore
from penstock.weights.update import SERVER_KEPT_S, Update, pack_manifest
from penstock.wire.auth import Audience, Role, Signer
from penstock.wire.client import AsyncServiceClient, connect
from penstock.wire.codec import MSGPACK, encode
from penstock.wire.serving import Tls, server

POLICY = PolicyName("policy")
Tamper = Callable[[Request, bytes], Awaitable[bytes]]


@asynccontextmanager
async def listening(app: Starlette, tls: Tls | None = None) -> AsyncGenerator[str]:
    weight_server = server(app, "127.0.0.1", 0, tls, idle_s=SERVER_KEPT_S)
    task = asyncio.create_task(weight_server.serve())
    while not weight_server.started:
        assert not task.done(), "the server ended before it listened"
        await asyncio.sleep(0.005)
    host, port = weight_server.servers[0].sockets[0].getsockname()
    try:
        yield f"{'http' if tls is None else 'https'}://{host}:{port}"
    finally:
        weight_server.should_exit = True
        await task


@asynccontextmanager
async def running_weight_server(tmp_path: Path) -> AsyncGenerator[AsyncServiceClient]:
    """A client with a rollout token for a server over `tmp_path / "store"`."""
    signer = Signer.create(tmp_path / "keys", "run")
    token = signer.mint(Role.ROLLOUT, [Audience.WEIGHTS], ttl_s=3600)
    app = build(Origin(DirectoryStore(tmp_path / "store")), signer.verifier(Audience.WEIGHTS))
    async with listening(app) as url, connect(url, token) as caller:
        yield caller


def put(tmp_path: Path, seed: int = 0, number: int = 0) -> PublishedVersion:
    return put_folder(tmp_path, write_folder(tmp_path / f"hf-{seed}", seed), number)


def put_folder(
    tmp_path: Path, folder: Path, number: int, after: PublishedVersion | None = None
) -> PublishedVersion:
    """Deltas from `after` are stored too."""
    last = None
    if after is not None:
        last = StoredVersion(manifest_digest=after.manifest_digest, weights_digest="")
    stored = put_snapshot(tmp_path / "store", folder, policy=POLICY, number=number, after=last)
    return PublishedVersion(
        policy=POLICY, incarnation=1, number=number, manifest_digest=stored.manifest_digest
    )


@asynccontextmanager
async def tampering_server(store: Path, tamper: Tamper) -> AsyncGenerator[AsyncServiceClient]:
    """A hostile relay: passes the data of the store through `tamper`."""

    async def answer(request: Request) -> Response:
        if request.path_params["kind"] == "deltas":
            have = request.query_params["from"].split(",")
            size, target = int(request.query_params["bytes"]), request.path_params["digest"]
            chain = DeltaChain(steps=DirectoryStore(store).chain_to(target, size, have))
            return Response(await tamper(request, encode(chain)), media_type=MSGPACK)
        if request.path_params["kind"] == "updates":
            update = _update(store, request.path_params["digest"], request.query_params["from"])
            return Response(await tamper(request, update), media_type=MSGPACK)
        path = store / request.url.path.removeprefix("/v1/")
        if path.parent.name == "manifests":
            path = path.with_suffix(".json")
        data = path.read_bytes()
        asked = request.headers.get("range", "")
        if asked:
            first, last = asked.removeprefix("bytes=").split("-")
            data = data[int(first) : int(last) + 1]
        return Response(await tamper(request, data), status_code=206 if asked else 200)

    app = Starlette(routes=[StarletteRoute("/v1/{kind}/{digest}", answer)])
    async with listening(app) as url, connect(url, "none") as caller:
        yield caller


def _update(store: Path, digest: str, have: str) -> bytes:
    here = DirectoryStore(store)
    data = here.read_manifest(digest)
    chains = {
        file.blob: steps
        for file in parse_manifest(data).files
        if (steps := here.chain_to(file.blob, file.bytes, have.split(",")))
    }
    return encode(Update(manifest=pack_manifest(data), chains=chains))
