# SPDX-License-Identifier: Apache-2.0
"""The read-only weight server over HTTP, as an untrusted client sees it."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import AsyncGenerator
from pathlib import Path

import httpx2
import pytest
from starlette.routing import Route as StarletteRoute
from tests.unit.weights.snapshot_folders import write_folder
from tests.unit.weights.weight_servers import listening

from penstock.types import PolicyName
from penstock.weights.publish import put_snapshot
from penstock.weights.serving import server as module
from penstock.weights.serving.origin import Origin
from penstock.weights.serving.server import build, parse_range
from penstock.weights.store import DirectoryStore
from penstock.wire.auth import Audience, Role, Signer

BLOB = "model-00002-of-00002.safetensors"


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    return Signer.create(tmp_path / "keys", "run")


@pytest.fixture
async def http(tmp_path: Path, signer: Signer) -> AsyncGenerator[httpx2.AsyncClient]:
    write_folder(tmp_path / "hf")
    put_snapshot(tmp_path / "store", tmp_path / "hf", policy=PolicyName("p"), number=0)
    app = build(Origin(DirectoryStore(tmp_path / "store")), signer.verifier(Audience.WEIGHTS))
    async with listening(app) as url, httpx2.AsyncClient(base_url=url, timeout=60) as client:
        yield client


def bearer(signer: Signer, role: Role = Role.ROLLOUT, *, ttl_s: float = 3600) -> dict[str, str]:
    token = signer.mint(role, [Audience.WEIGHTS], ttl_s=ttl_s)
    return {"authorization": f"Bearer {token}"}


def blob_digest(tmp_path: Path) -> str:
    data = (tmp_path / "hf" / BLOB).read_bytes()
    return next(p.name for p in (tmp_path / "store/blobs").iterdir() if p.read_bytes() == data)


def manifest_digest(tmp_path: Path) -> str:
    return next((tmp_path / "store" / "manifests").iterdir()).stem


def paths(tmp_path: Path) -> list[str]:
    return [
        f"/v1/manifests/{manifest_digest(tmp_path)}",
        f"/v1/blobs/{blob_digest(tmp_path)}",
        f"/v1/deltas/{blob_digest(tmp_path)}?bytes=1&from={'0' * 64}",
        f"/v1/updates/{manifest_digest(tmp_path)}?from={'0' * 64}",
        "/metrics",
        "/openapi.json",
    ]


async def test_every_route_is_in_the_document_and_none_writes(
    tmp_path: Path, signer: Signer, http: httpx2.AsyncClient
) -> None:
    document = (await http.get("/openapi.json", headers=bearer(signer))).json()
    listed = {
        (method.upper(), path)
        for path, operations in document["paths"].items()
        for method in operations
    }
    app = build(Origin(DirectoryStore(tmp_path / "store")), signer.verifier(Audience.WEIGHTS))
    routed = {
        (method, route.path)
        for route in app.routes
        if isinstance(route, StarletteRoute)
        for method in (route.methods or ())
    }
    assert listed == routed - {("HEAD", "/healthz")}
    assert {method for method, _ in listed} == {"GET"}
    assert len(listed) == len(paths(tmp_path)) + 2, "healthz, and the list of revoked tokens"


async def test_each_route_refuses_all_but_its_readers(
    tmp_path: Path, signer: Signer, http: httpx2.AsyncClient
) -> None:
    elsewhere = Signer.create(tmp_path / "other-keys", "run")
    other_run = Signer.read(tmp_path / "keys", "another")
    for path in paths(tmp_path):
        refused = {Role.SESSION} if path == "/metrics" else {Role.SESSION, Role.READER}
        for role in set(Role) - refused:
            assert (await http.get(path, headers=bearer(signer, role))).status_code == 200
        wrong_audience = signer.mint(Role.ADMIN, [Audience.DATAFLOW], ttl_s=3600)
        expected = {
            401: [
                {},
                {"authorization": "Bearer nonsense"},
                bearer(elsewhere),
                bearer(signer, ttl_s=-1),
                bearer(other_run),
            ],
            403: [{"authorization": f"Bearer {wrong_audience}"}],
        }
        if path != "/openapi.json":
            expected[403].append(bearer(signer, Role.SESSION))
        for status, all_headers in expected.items():
            for headers in all_headers:
                answer = await http.get(path, headers=headers)
                assert (answer.status_code, path) == (status, path)
                assert answer.json()["error"]["code"] in ("unauthorized", "forbidden")
    assert (await http.get("/healthz")).status_code == 200


async def test_nothing_can_be_written(
    tmp_path: Path, signer: Signer, http: httpx2.AsyncClient
) -> None:
    before = sorted(path.name for path in (tmp_path / "store").rglob("*"))
    for path in paths(tmp_path):
        for method in ("POST", "PUT", "PATCH", "DELETE"):
            answer = await http.request(
                method, path, content=pickle.dumps([1]), headers=bearer(signer, Role.ADMIN)
            )
            assert answer.status_code == 405
    assert sorted(path.name for path in (tmp_path / "store").rglob("*")) == before


@pytest.mark.parametrize(
    "name",
    [
        "..",
        "%2e%2e%2f%2e%2e%2fkeys%2fsigning.key",
        "..%2fmanifests",
        "%00",
        "A" * 64,
        "a" * 63 + "%0a",
        "a" * 65,
        "%2fetc%2fpasswd",
    ],
)
@pytest.mark.parametrize("kind", ["manifests", "blobs"])
async def test_paths_cannot_escape_the_store(
    signer: Signer, http: httpx2.AsyncClient, kind: str, name: str
) -> None:
    answer = await http.get(f"/v1/{kind}/{name}", headers=bearer(signer))
    assert answer.status_code in (400, 404)


async def test_a_link_in_the_store_is_not_followed(
    tmp_path: Path, signer: Signer, http: httpx2.AsyncClient
) -> None:
    (tmp_path / "store" / "blobs" / ("a" * 64)).symlink_to(tmp_path / "keys" / "signing.key")
    os.mkfifo(tmp_path / "store" / "blobs" / ("b" * 64))
    for digit in "abc":
        answer = await http.get(f"/v1/blobs/{digit * 64}", headers=bearer(signer))
        assert answer.status_code == 404


async def test_a_damaged_manifest_is_not_found(
    tmp_path: Path, signer: Signer, http: httpx2.AsyncClient
) -> None:
    path = next((tmp_path / "store" / "manifests").iterdir())
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:-1])
    answer = await http.get(f"/v1/manifests/{path.stem}", headers=bearer(signer))
    assert answer.status_code == 404
    assert "damaged" in answer.json()["error"]["message"]


RANGES = [
    ("", 200, slice(None)),
    ("bytes=0-0", 206, slice(0, 1)),
    ("bytes=10-19", 206, slice(10, 20)),
    ("bytes=10-", 206, slice(10, None)),
    ("bytes=-7", 206, slice(-7, None)),
    ("bytes=-999999", 206, slice(None)),
    ("bytes=5-999999", 206, slice(5, None)),
    ("bytes=0-1,5-6", 200, slice(None)),
    ("lines=1-2", 200, slice(None)),
    ("bytes=b-a", 200, slice(None)),
]


@pytest.mark.parametrize(("asked", "status", "part"), RANGES)
async def test_ranges(
    tmp_path: Path,
    signer: Signer,
    http: httpx2.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    asked: str,
    status: int,
    part: slice,
) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 16)
    data = (tmp_path / "hf" / BLOB).read_bytes()
    answer = await http.get(
        f"/v1/blobs/{blob_digest(tmp_path)}", headers={"range": asked, **bearer(signer)}
    )
    assert (answer.status_code, answer.content) == (status, data[part])
    if status == 206:
        start, stop, _ = part.indices(len(data))
        assert answer.headers["content-range"] == f"bytes {start}-{stop - 1}/{len(data)}"


@pytest.mark.parametrize("asked", ["bytes=999999-", "bytes=9-3", "bytes=-0"])
async def test_a_range_outside_the_blob_is_416(
    tmp_path: Path, signer: Signer, http: httpx2.AsyncClient, asked: str
) -> None:
    size = (tmp_path / "hf" / BLOB).stat().st_size
    answer = await http.get(
        f"/v1/blobs/{blob_digest(tmp_path)}", headers={"range": asked, **bearer(signer)}
    )
    assert answer.status_code == 416
    assert answer.headers["content-range"] == f"bytes */{size}"
    assert answer.json()["error"]["code"] == "bad_request"


def test_no_range_reaches_outside_the_file() -> None:
    for size in (0, 1, 7):
        for first in range(9):
            for header in (f"bytes={first}-", f"bytes=-{first}", f"bytes={first}-{first + 2}"):
                byte_range = parse_range(header, size)
                assert byte_range is None or 0 <= byte_range[0] < byte_range[1] <= size


def is_open(path: Path) -> bool:
    descriptors = Path("/proc/self/fd").iterdir()
    return any(os.path.realpath(descriptor) == str(path) for descriptor in descriptors)


async def test_a_large_blob_is_streamed_and_a_reader_may_leave(
    tmp_path: Path, signer: Signer, http: httpx2.AsyncClient
) -> None:
    path = tmp_path / "store" / "blobs" / ("d" * 64)
    with path.open("wb") as file:
        file.truncate(1 << 30)
    url = f"/v1/blobs/{path.name}"
    async with http.stream("GET", url, headers=bearer(signer)) as answer:
        assert answer.headers["content-length"] == str(1 << 30)
        async for _ in answer.aiter_raw():
            assert is_open(path)
            break
    for _ in range(3000):
        if not is_open(path):
            break
        await asyncio.sleep(0.02)
    assert not is_open(path)
    text = (await http.get("/metrics", headers=bearer(signer))).text
    line = next(x for x in text.splitlines() if x.startswith("penstock_weights_sent_bytes_total"))
    assert 0 < float(line.split()[1]) < 1 << 27


async def test_metrics_count_reads(
    tmp_path: Path, signer: Signer, http: httpx2.AsyncClient
) -> None:
    for path in paths(tmp_path)[:2]:
        await http.get(path, headers=bearer(signer))
    text = (await http.get("/metrics", headers=bearer(signer, Role.READER))).text
    assert 'penstock_weights_requests_total{kind="blob",role="rollout"} 1.0' in text
    assert 'penstock_weights_requests_total{kind="manifest",role="rollout"} 1.0' in text
    refused = await http.get(paths(tmp_path)[0], headers=bearer(signer, Role.READER))
    assert refused.status_code == 403, "a reader's token is for figures, not for weights"


@pytest.mark.parametrize(
    "query", ["", "bytes=1", "bytes=1&from=../../keys", "bytes=-1&from={0}", "bytes=one&from={0}"]
)
async def test_questions_for_deltas_are_checked(
    tmp_path: Path, signer: Signer, http: httpx2.AsyncClient, query: str
) -> None:
    path = f"/v1/deltas/{blob_digest(tmp_path)}?{query.format('0' * 64)}"
    assert (await http.get(path, headers=bearer(signer))).status_code == 400
    assert (await http.get("/v1/deltas/..%2f..%2fkeys", headers=bearer(signer))).status_code >= 400
