# SPDX-License-Identifier: Apache-2.0
"""No body, however it is made, runs code, takes memory beyond its cap or ends a service."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import gzip
import io
import json
import os
import pickle
import struct
import subprocess
import zipfile
import zlib
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route as StarletteRoute
from tests.attacks.in_process import Door, dataflow_door, weights_door
from tests.contract.test_weights_deltas import versions
from tests.unit.weights.relay_doubles import put_blob, read_all
from tests.unit.weights.weight_servers import listening, running_weight_server

from penstock.errors import BadRequest, TooLarge, Unreachable, WireError
from penstock.types import Trajectory
from penstock.weights.client import Puller
from penstock.weights.pulling import links
from penstock.weights.serving import upstreams
from penstock.weights.serving.piece_cache import PIECE_BYTES
from penstock.weights.serving.relay import Relay
from penstock.weights.store import DirectoryStore
from penstock.wire.auth import Role
from penstock.wire.client import connect
from penstock.wire.codec import JSON, MSGPACK, decode, encode

MAX_GROWTH_BYTES = 256 << 20
"""What one call may take at most, beyond what the process has: four times the largest body."""
REFUSED = {400, 404, 405, 409, 413, 415}


# --- C2: pickles ---------------------------------------------------------------------------------


class Call:
    """A pickle that calls a function when it is loaded."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._made = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._made


class Build:
    """A pickle that calls through the state of an object."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def __reduce__(self) -> tuple[Any, ...]:
        return (dict, (), self._state)


def payloads(canary: Path) -> list[Any]:
    """Each makes the canary when it is loaded."""
    text = str(canary)
    code = f"__import__('os').mkdir({text!r})"
    direct = [
        Call(os.mkdir, text),
        Call(subprocess.getoutput, f"mkdir {text}"),
        Call(os.makedirs, text),
        Call(subprocess.call, ["mkdir", text]),
        Call(subprocess.check_output, ["mkdir", text]),
        Call(getattr(builtins, "ev" + "al"), code),
        Call(getattr(builtins, "ex" + "ec"), code),
        Call(builtins.open, text, "w"),
        Call(Path.mkdir, canary),
    ]
    wrapped: list[Any] = [
        {"node_id": direct[0]},
        [direct[0]] * 3,
        {"deliveries": [{"payload": direct[1]}]},
        Build({"x": direct[0]}),
        (direct[0], {"boot_id": direct[1]}),
        {direct[0].__class__.__name__: direct[2]},
        Call(pickle.loads, pickle.dumps(direct[0])),
        Call(map, os.mkdir, [text]),
    ]
    return direct + wrapped


def pickles(canary: Path) -> list[bytes]:
    protocols = range(pickle.HIGHEST_PROTOCOL + 1)
    return [pickle.dumps(one, protocol) for one in payloads(canary) for protocol in protocols]


def is_there(canary: Path) -> bool:
    return canary.exists()


def bodies(door: Door) -> list[tuple[str, str]]:
    """(method, path) of every route that reads a body, parameters filled in."""
    found: list[tuple[str, str]] = []
    for route in door.app.routes:
        spec = getattr(getattr(route, "app", None), "spec", None)
        if spec is not None and (spec.request is not None or spec.is_streamed):
            found.append((spec.method, spec.path.replace("{", "x").replace("}", ".1")))
    return found


def test_the_pickles_are_malicious(tmp_path: Path) -> None:
    """The test of the test: there are 100, and loading one makes the canary."""
    found = pickles(tmp_path / "canary")
    assert len({*found}) >= 100
    pickle.loads(found[0])
    assert (tmp_path / "canary").is_dir()


@pytest.mark.parametrize("media_type", [MSGPACK, JSON, "application/octet-stream"])
async def test_100_pickles_at_every_endpoint(media_type: str, tmp_path: Path) -> None:
    """C2: every one is a 4xx at every route with a body, and no canary appears."""
    canary = tmp_path / "canary"
    made = pickles(canary)
    async with dataflow_door(tmp_path) as door:
        routes = bodies(door)
        assert len(routes) >= 15
        for method, path in routes:
            for content in made:
                answer = await door.call(method, path, content=content, media_type=media_type)
                assert answer.status_code in REFUSED, (method, path, answer.text)
    assert not is_there(canary)


async def test_pickles_at_the_weight_server(tmp_path: Path) -> None:
    """It reads no body at all, whatever the method."""
    canary = tmp_path / "canary"
    async with weights_door(tmp_path) as door:
        for content in pickles(canary)[:12]:
            for method in ("POST", "PUT", "PATCH", "DELETE"):
                for path in ("/v1/blobs/" + "0" * 64, "/v1/manifests/x", "/metrics"):
                    answer = await door.call(method, path, content=content)
                    assert answer.status_code in REFUSED
    assert not is_there(canary)


def test_pickles_as_a_trajectory_or_a_prompt(tmp_path: Path) -> None:
    """Inside a delivery, and as the JSON of an agent's request."""
    canary = tmp_path / "canary"
    for content in pickles(canary):
        with pytest.raises(BadRequest):
            decode(content, Trajectory)
        with pytest.raises(BadRequest):
            decode(content, dict[str, Any], media_type=JSON)
    assert not canary.exists()


# --- C9: bombs -----------------------------------------------------------------------------------


def _zip(data: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x", data)
    return made.getvalue()


ZEROS = bytes(64 << 20)
HEAD = b"\x84\xa7node_id\xa1n\xa7boot_id\xa1b\xa8capacity\x01\xa8policies"
"""A registration in msgpack up to its last value."""
JSON_HEAD = b'{"node_id":"n","boot_id":"b","capacity":1,"policies":'
BOMBS: dict[str, tuple[bytes, str]] = {
    "deep lists in JSON": (b"[" * 500_000, JSON),
    "deep objects in JSON": (b'{"a":' * 150_000, JSON),
    "deep lists in a field": (JSON_HEAD + b"[" * 400_000, JSON),
    "deep lists in msgpack": (b"\x91" * 900_000, MSGPACK),
    "deep maps in msgpack": (b"\x81\xa1a" * 300_000, MSGPACK),
    "deep lists in an unknown field": (b"\x81\xa1x" + b"\x91" * 900_000, MSGPACK),
    "a list of 4 billion": (HEAD + b"\xdd\xff\xff\xff\xff", MSGPACK),
    "a map of 4 billion": (b"\xdf\xff\xff\xff\xff", MSGPACK),
    "a text of 4 GB": (b"\xdb\xff\xff\xff\xff", MSGPACK),
    "bytes of 4 GB": (b"\xc6\xff\xff\xff\xff", MSGPACK),
    "an extension of 4 GB": (HEAD + b"\xc9\xff\xff\xff\xff\x01", MSGPACK),
    "a number of a million digits": (b'{"capacity":' + b"9" * 900_000 + b"}", JSON),
    "an exponent without end": (b'{"capacity":1e999999999}', JSON),
    "a negative exponent": (b'{"capacity":1e-999999999}', JSON),
    "100,000 unknown fields": (
        json.dumps({f"f{n}": n for n in range(60_000)}).encode(),
        JSON,
    ),
    "one field 100,000 times": (b"{" + b",".join([b'"node_id":"n"'] * 70_000) + b"}", JSON),
    "900,000 texts": (HEAD + b"\xdd\x00\x0d\xbb\xa0" + b"\xa0" * 900_000, MSGPACK),
    "300,000 texts in JSON": (JSON_HEAD + b"[" + b",".join([b'""'] * 300_000) + b"]}", JSON),
    "one text of 900 kB": (JSON_HEAD + b'["' + b"x" * 900_000 + b'"]}', JSON),
    "gzip": (gzip.compress(ZEROS), JSON),
    "deflate": (zlib.compress(ZEROS), MSGPACK),
    "zip": (_zip(ZEROS), MSGPACK),
    "UTF-16": (('{"node_id":"n"}' * 10_000).encode("utf-16"), JSON),
    "a time beyond all times": (
        HEAD + b"\xc7\x0c\xff" + struct.pack(">Iq", 0, 1 << 62),
        MSGPACK,
    ),
}


@contextmanager
def bounded_memory() -> Generator[None]:
    """Fail if the process took more than the cap meanwhile; the peak is reset before."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _memory("VmRSS")
    yield
    assert _memory("VmHWM") - before < MAX_GROWTH_BYTES


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) << 10


def test_there_are_20_bombs() -> None:
    assert len(BOMBS) >= 20


@pytest.mark.parametrize("name", BOMBS)
async def test_a_bomb_is_refused_within_its_memory(name: str, tmp_path: Path) -> None:
    """C9: a 4xx, memory within the cap, and the service goes on."""
    content, media_type = BOMBS[name]
    async with dataflow_door(tmp_path) as door:
        with bounded_memory():
            answer = await door.call("POST", "/v1/nodes", content=content, media_type=media_type)
        assert answer.status_code in (400, 413), answer.text[:200]
        assert len(answer.content) < 10_000, "an error does not repeat the bomb"
        quota = await door.call("PUT", "/v1/spaces/sound", body={"quota_bytes": 5})
        assert quota.status_code == 200


async def test_a_compressed_body_is_not_unpacked(tmp_path: Path) -> None:
    """A content-encoding changes nothing: the bytes are no message."""
    async with dataflow_door(tmp_path) as door:
        for encoding, content in (
            ("gzip", gzip.compress(ZEROS)),
            ("deflate", zlib.compress(ZEROS)),
        ):
            headers = {
                "authorization": f"Bearer {door.token(Role.ROLLOUT)}",
                "content-encoding": encoding,
                "content-type": JSON,
            }
            with bounded_memory():
                answer = await door.http.post("/v1/nodes", headers=headers, content=content)
            assert answer.status_code == 400


async def test_a_body_without_a_length_stops_at_its_limit(tmp_path: Path) -> None:
    """Pieces without end, with no length announced or a wrong one: 413 after the limit."""
    num_sent = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal num_sent
        for _ in range(1_000):
            num_sent += 1
            yield bytes(1 << 16)

    async with dataflow_door(tmp_path) as door:
        headers = {"authorization": f"Bearer {door.token(Role.ROLLOUT)}", "content-type": MSGPACK}
        with bounded_memory():
            answer = await door.http.post("/v1/nodes", headers=headers, content=pieces())
        assert answer.status_code == 413


async def test_many_tiny_texts_in_the_largest_body(tmp_path: Path) -> None:
    """The largest body of any call, all of one-byte texts: each would become an object."""
    head = b"\x84\xa7node_id\xa1n\xa7boot_id\xa1b\xaadeliveries\x90\xa8released\xdd"
    num = 40 << 20
    content = head + struct.pack(">I", num) + b"\xa0" * num
    async with dataflow_door(tmp_path) as door:
        with bounded_memory():
            answer = await door.call("POST", "/v1/trajectories", content=content)
        assert answer.status_code == 400


def test_a_trajectory_of_a_million_turns_or_spans() -> None:
    """Each part of a row has its length, before anything of it is built."""
    with bounded_memory():
        for field in (b"\xa5turns", b"\xa5spans"):
            content = b"\x81" + field + b"\xdd\xff\xff\xff\xff" + b"\x80" * 1_000_000
            with pytest.raises(BadRequest):
                decode(content, Trajectory)


def _packed_zeros() -> bytes:
    pack = zlib.compressobj(1, wbits=31)
    return b"".join(pack.compress(ZEROS) for _ in range(8)) + pack.flush()


@pytest.mark.parametrize("status", [200, 404, 500])
async def test_a_relay_cannot_send_a_bomb(status: int, tmp_path: Path) -> None:
    """A hostile relay answers about deltas with half a gigabyte, packed, as a result or as an
    error: a node unpacks nothing."""
    first, second = versions(tmp_path, 2)
    bomb, store = _packed_zeros(), DirectoryStore(tmp_path / "store")

    async def explode(request: Request) -> Response:
        if "/manifests/" in request.url.path:
            return Response(store.read_manifest(request.url.path.rpartition("/")[2]))
        packed = {"content-encoding": "gzip"}
        return Response(bomb, status, media_type=MSGPACK, headers=packed)

    app = Starlette(routes=[StarletteRoute("/{path:path}", explode)])
    puller = Puller(tmp_path / "cache", transfer="delta")
    async with (
        running_weight_server(tmp_path) as origin,
        listening(app) as url,
        connect(url, "none") as relay,
    ):
        await puller.pull([origin], first)
        with bounded_memory():
            folder = await puller.pull([relay, origin], second)
    assert folder.name == second.manifest_digest


@pytest.mark.parametrize("what", ["manifests", "deltas", "blobs"])
async def test_a_relay_that_drips_does_not_hold_up_a_version(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never silent, never done: the node turns to the weight server."""
    monkeypatch.setattr(links, "PENDING_TIMEOUT_S", 0.5)
    first, second = versions(tmp_path, 2)
    store = DirectoryStore(tmp_path / "store")

    async def drip() -> AsyncIterator[bytes]:
        while True:
            yield b"{"
            await asyncio.sleep(0.05)

    async def serve(request: Request) -> Response:
        if what != "manifests" and "/manifests/" in request.url.path:
            return Response(store.read_manifest(request.url.path.rpartition("/")[2]))
        if f"/{what}/" not in request.url.path:
            return Response(status_code=404)
        return StreamingResponse(drip(), media_type=MSGPACK, headers={"content-length": "60000"})

    app = Starlette(routes=[StarletteRoute("/{path:path}", serve)])
    puller = Puller(tmp_path / "cache", transfer="delta")
    async with (
        running_weight_server(tmp_path) as origin,
        listening(app) as url,
        connect(url, "none") as relay,
    ):
        await puller.pull([origin], first)
        async with asyncio.timeout(120):
            folder = await puller.pull([relay, origin], second)
    assert folder.name == second.manifest_digest


@pytest.mark.parametrize("what", ["manifests", "blobs"])
async def test_an_upstream_that_drips_does_not_hold_up_a_relay(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never silent, never done: the relay turns to the weight server, and to this one last."""
    monkeypatch.setattr(upstreams, "START_S", 0.5)
    monkeypatch.setattr(upstreams, "MIN_BYTES_PER_S", 1 << 30)
    digest, data = put_blob(tmp_path / "store", 3 * PIECE_BYTES)
    manifest = DirectoryStore(tmp_path / "store").put_manifest(b"{}")
    num_dripping = 0

    async def drip(start: int) -> AsyncIterator[bytes]:
        for at in range(start, len(data)):
            yield data[at : at + 1]
            await asyncio.sleep(0.05)

    async def serve(request: Request) -> Response:
        nonlocal num_dripping
        first, _, last = request.headers.get("range", "bytes=0-59999")[6:].partition("-")
        is_first_piece = what == "blobs" and first == "0"
        if f"/{what}/" not in request.url.path:
            return Response(status_code=404)
        span = {"content-range": f"bytes {first}-{last}/{len(data)}"}
        if is_first_piece:  # it is the pieces after it that come slowly
            return Response(data[: int(last) + 1], 206, headers=span)
        num_dripping += 1
        span["content-length"] = str(int(last) + 1 - int(first))
        return StreamingResponse(drip(int(first)), 206, headers=span)

    app = Starlette(routes=[StarletteRoute("/{path:path}", serve)])
    async with (
        running_weight_server(tmp_path) as origin,
        listening(app) as url,
        connect(url, "none") as hostile,
    ):
        relay = Relay([hostile, origin], tmp_path / "relay", max_bytes=64 << 20)
        try:
            async with asyncio.timeout(120):
                if what == "manifests":
                    assert await relay.manifest(manifest) == b"{}"
                else:
                    assert await read_all(relay, digest) == data
        finally:
            await relay.close()
    assert 1 <= num_dripping <= 3, "pieces that were asked for before it was found out"


async def test_an_error_of_a_relay_has_a_size() -> None:
    """An endless refusal, with or without a declared length, is not read; neither by a node nor by
    a relay that streams from another one."""

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(512):
            yield ZEROS[: 1 << 20]

    async def refuse(request: Request) -> Response:
        declared = {"content-length": str(512 << 20)} if "declared" in request.url.path else {}
        return StreamingResponse(endless(), 404, headers=declared)

    app = Starlette(routes=[StarletteRoute("/{path:path}", refuse)])
    async with listening(app) as url, connect(url, "none") as relay:
        for path in ("/declared", "/chunked"):
            with bounded_memory(), pytest.raises(Unreachable):
                await relay.request("GET", path, deadline_s=0.0, max_response_bytes=1000)
            with bounded_memory(), pytest.raises(WireError, match="the limit is"):
                async with relay.stream(path, headers={}):
                    pass


@pytest.mark.parametrize("code", [b"200 OK", b"404 Not Found"])
async def test_chunks_do_not_hide_behind_a_small_length(code: bytes) -> None:
    """With both headers, chunks are what is read."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        both = b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(b"HTTP/1.1 " + code + b"\r\n" + both)
        with contextlib.suppress(ConnectionError):
            for _ in range(32):
                writer.write(b"100000\r\n" + bytes(1 << 20) + b"\r\n")
                await writer.drain()
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with connect(f"http://127.0.0.1:{port}", "none") as relay:
            with bounded_memory(), pytest.raises((TooLarge, Unreachable), match="unknown length"):
                await relay.request("GET", "/x", deadline_s=0.0, max_response_bytes=1000)


def test_an_error_does_not_repeat_what_it_refuses() -> None:
    """A megabyte of rubbish is not sent back, nor written to a log."""
    with pytest.raises(BadRequest) as refused:
        decode(encode({"row_id": "x" * 1_000_000}), Trajectory)
    assert len(str(refused.value)) < 1_000
