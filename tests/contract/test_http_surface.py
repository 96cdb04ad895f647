# SPDX-License-Identifier: Apache-2.0
"""Every route of the services is in the OpenAPI document, requires a valid token, and rejects
invalid bodies."""

from __future__ import annotations

import os
import pickle
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.routing import Route as StarletteRoute
from tests.contract.dataflow_server import serving, small_config

from penstock.dataflow.service.build import build
from penstock.dataflow.service.server import build_server, surface
from penstock.weights.serving.origin import Origin
from penstock.weights.serving.server import build as build_front
from penstock.weights.store import DirectoryStore
from penstock.wire.auth import Audience, Role, Signer

MUTATING = ("post", "put", "patch", "delete")


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    name: str
    app: Starlette
    http: httpx2.Client
    audience: Audience
    signer: Signer
    stranger: Signer
    """Signs with another key."""
    other_run: Signer

    def get(self, path: str, token: str) -> httpx2.Response:
        return self.call("get", path, token)

    def call(self, method: str, path: str, token: str, **kwargs: Any) -> httpx2.Response:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        headers |= kwargs.pop("headers", {})
        return self.http.request(method.upper(), path, headers=headers, **kwargs)

    def token(self, role: Role = Role.ADMIN, ttl_s: float = 600.0) -> str:
        return self.signer.mint(role, [self.audience], ttl_s=ttl_s)

    def operations(self) -> list[tuple[str, str, dict[str, Any]]]:
        """(method, path with the parameters filled in, operation) of the published document."""
        document = self.get("/openapi.json", self.token()).json()
        return [
            (method, path.replace("{", "x").replace("}", ".1"), operation)
            for path, methods in document["paths"].items()
            for method, operation in methods.items()
        ]


@pytest.fixture(params=["dataflow", "weights"])
def service(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[Service]:
    name = request.param
    config = small_config()
    signer = Signer.create(tmp_path / "keys", config.name)
    audience = Audience.DATAFLOW if name == "dataflow" else Audience.WEIGHTS
    verifier = signer.verifier(audience)
    if name == "dataflow":
        core = build(config, tmp_path / "ledger")
        app = build_server(surface(core, config, "http://127.0.0.1:1"), verifier)
    else:
        app = build_front(Origin(DirectoryStore(tmp_path / "weights")), verifier)
    with serving(app) as url, httpx2.Client(base_url=url, timeout=60) as http:
        yield Service(
            name=name,
            app=app,
            http=http,
            audience=audience,
            signer=signer,
            stranger=Signer.create(tmp_path / "strange", config.name),
            other_run=Signer(tmp_path / "keys", "another-run"),  # the same key under another name
        )


def test_the_document_lists_every_route_and_method(service: Service) -> None:
    document = service.get("/openapi.json", service.token()).json()
    listed = {(m.upper(), path) for path, methods in document["paths"].items() for m in methods}
    routed = {
        (method, route.path)
        for route in service.app.routes
        if isinstance(route, StarletteRoute)
        for method in route.methods or ()
    }
    assert len(service.app.routes) >= 4
    assert listed == routed - {("HEAD", "/healthz")}


def test_every_route_requires_a_valid_token(service: Service) -> None:
    other = Audience.WEIGHTS if service.audience is Audience.DATAFLOW else Audience.DATAFLOW
    bad = {
        "none": "",
        "rubbish": "penstock1.abc.def",
        "other key": service.stranger.mint(Role.ADMIN, [service.audience], ttl_s=3600),
        "other run": service.other_run.mint(Role.ADMIN, [service.audience], ttl_s=3600),
        "other audience": service.signer.mint(Role.ADMIN, [other], ttl_s=3600),
        "expired": service.token(ttl_s=-1),
    }
    checked = 0
    for method, path, operation in service.operations():
        if operation.get("security") == []:
            assert path == "/healthz" and service.get(path, "").status_code == 200
            continue
        for kind, token in bad.items():
            status = service.call(method, path, token).status_code
            assert status in (401, 403), f"{method} {path} with {kind}: {status}"
            checked += 1
        for role in Role:
            if role in operation["x-roles"]:
                continue
            status = service.call(method, path, service.token(role)).status_code
            assert status == 403, f"{method} {path} as {role}: {status}"
            checked += 1
    assert checked >= 6 * 4


class _Canary:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("canary-fired",))


def test_invalid_bodies_get_a_4xx_on_every_mutating_route(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bodies = {
        "random": os.urandom(300),
        "pickle": pickle.dumps(_Canary()),
        "deep": b"\x91" * 5000,
        "empty": b"",
    }
    types = ("application/msgpack", "application/json", "application/x-python-pickle")
    for method, path, operation in service.operations():
        if method not in MUTATING or "requestBody" not in operation:
            continue
        token = service.token(Role(operation["x-roles"][0]))
        for name, body in bodies.items():
            for media_type in types:
                answer = service.call(
                    method,
                    path,
                    token,
                    content=body,
                    headers={"content-type": media_type},
                )
                assert 400 <= answer.status_code < 500, f"{method} {path} {name} as {media_type}"
                assert answer.json()["error"]["message"]
        oversized = service.call(
            method,
            path,
            token,
            content=bytes((64 << 20) + 1),
            headers={"content-type": types[0]},
        )
        assert oversized.status_code == 413, f"{method} {path}"
    assert not (tmp_path / "canary-fired").exists()
