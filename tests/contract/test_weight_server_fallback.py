# SPDX-License-Identifier: Apache-2.0
"""Several weight servers in order of preference: a dead, silent or corrupting one costs a moment
and never a version; one that is still fetching is waited for."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from tests.contract.test_weights_deltas import WEIGHTS, versions, weights_file
from tests.contract.test_weights_ranges import Asked, put_one, spans_of
from tests.unit.weights.snapshot_folders import contents
from tests.unit.weights.weight_servers import listening, running_weight_server, tampering_server

from penstock.errors import Unreachable, WeightsError
from penstock.weights.client import Puller
from penstock.weights.pulling import links
from penstock.wire.client import AsyncServiceClient, connect


@asynccontextmanager
async def dead() -> AsyncGenerator[AsyncServiceClient]:
    """A closed port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    async with connect(f"http://127.0.0.1:{port}", "none") as caller:
        yield caller


async def test_a_dead_relay_costs_a_moment_and_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "TRY_TIMEOUT_S", 0.5)
    made = versions(tmp_path, 2)
    puller = Puller(tmp_path / "cache")
    async with running_weight_server(tmp_path) as origin, dead() as relay, asyncio.timeout(60):
        folders = [await puller.pull([relay, origin], made[0])]
        monkeypatch.setattr(links, "TRY_TIMEOUT_S", 1000.0)  # it is skipped now
        folders.append(await puller.pull([relay, origin], made[1]))
    for number, folder in enumerate(folders):
        assert contents(folder) == contents(tmp_path / f"hf-{number}")


async def test_a_silent_relay_costs_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "TRY_TIMEOUT_S", 0.2)
    monkeypatch.setattr(links, "IDLE_TIMEOUT_S", 0.2)
    wanted = put_one(tmp_path)

    async def hang(request: Request, data: bytes) -> bytes:
        if "/blobs/" in request.url.path:
            await asyncio.sleep(2)
        return data

    async with (
        running_weight_server(tmp_path) as origin,
        tampering_server(tmp_path / "store", hang) as relay,
        asyncio.timeout(60),
    ):
        folder = await Puller(tmp_path / "cache").pull([relay, origin], wanted)
    assert contents(folder) == contents(tmp_path / "hf-0")


@pytest.mark.parametrize("kind", ["manifests", "blobs", "deltas"])
async def test_a_corrupting_relay_costs_no_version(tmp_path: Path, kind: str) -> None:
    made = versions(tmp_path, 2)

    async def corrupt(request: Request, data: bytes) -> bytes:
        if request.path_params["kind"] == kind:
            return data[:-1] + bytes([data[-1] ^ 1])
        return data

    async with (
        running_weight_server(tmp_path) as origin,
        tampering_server(tmp_path / "store", corrupt) as relay,
    ):
        puller = Puller(tmp_path / "cache")
        for number, wanted in enumerate(made):
            folder = await puller.pull([relay, origin], wanted)
            assert contents(folder) == contents(tmp_path / f"hf-{number}")
        with pytest.raises(WeightsError if kind != "deltas" else AssertionError):
            await Puller(tmp_path / "alone").pull([relay], made[0])
            raise AssertionError("deltas are a hint")


async def test_the_next_server_sends_only_the_damaged_parts(tmp_path: Path) -> None:
    wanted = put_one(tmp_path)
    file = weights_file(tmp_path, wanted)
    start, end = spans_of(tmp_path / "hf-0" / WEIGHTS)["c.weight"]
    asked = Asked(file.blob)

    async def corrupt(request: Request, data: bytes) -> bytes:
        first = int(request.headers.get("range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        if file.blob in request.url.path and first + len(data) == file.bytes:
            return data[:-1] + bytes([data[-1] ^ 1])
        return data

    async with (
        tampering_server(tmp_path / "store", asked.note) as origin,
        tampering_server(tmp_path / "store", corrupt) as relay,
    ):
        folder = await Puller(tmp_path / "cache").pull([relay, origin], wanted)
    assert contents(folder) == contents(tmp_path / "hf-0")
    assert asked.num_bytes == end - start


async def test_blobs_arriving_at_a_relay_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers 503 with Retry-After; the origin is not contacted for blobs the relay will have
    soon."""
    monkeypatch.setattr(links, "TRY_TIMEOUT_S", 0.1)
    wanted = put_one(tmp_path)
    file = weights_file(tmp_path, wanted)
    asked = Asked(file.blob)
    come_at = asyncio.get_running_loop().time() + 1.0

    async def later(request: Request) -> Response:
        if "/blobs/" in request.url.path and asyncio.get_running_loop().time() < come_at:
            body = b'{"error": {"code": "unreachable", "message": "on its way"}}'
            return Response(body, 503, {"retry-after": "0.2"}, "application/json")
        path = tmp_path / "store" / request.url.path.removeprefix("/v1/")
        if path.parent.name == "manifests":
            return Response(path.with_suffix(".json").read_bytes())
        first, last = request.headers["range"].removeprefix("bytes=").split("-")
        return Response(path.read_bytes()[int(first) : int(last) + 1], 206)

    app = Starlette(routes=[Route("/v1/{kind}/{digest}", later)])
    async with (
        tampering_server(tmp_path / "store", asked.note) as origin,
        listening(app) as url,
        connect(url, "none") as relay,
    ):
        folder = await Puller(tmp_path / "cache").pull([relay, origin], wanted)
        assert contents(folder) == contents(tmp_path / "hf-0")
        assert asked.byte_ranges == []
        come_at += 1000
        monkeypatch.setattr(links, "PENDING_TIMEOUT_S", 0.5)
        with pytest.raises(Unreachable):
            monkeypatch.setattr(links, "RETRY_DEADLINE_S", 0.5)
            await Puller(tmp_path / "other").pull([relay], wanted)
        await Puller(tmp_path / "third").pull([relay, origin], wanted)
        assert asked.num_bytes == file.bytes
