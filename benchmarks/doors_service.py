# SPDX-License-Identifier: Apache-2.0
"""One real service with its door, as its own process, for a flood.

    python -m benchmarks.doors_service dataflow|weights|gateway FOLDER

Its lines on stdout: its URL, the path of a cheap authorised call, and the key for it."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import cast

from starlette.applications import Starlette

from benchmarks.service import RUN, config
from penstock.dataflow.service.build import build as build_dataflow
from penstock.dataflow.service.server import build_server, surface
from penstock.gateway.gateway import Gateway
from penstock.gateway.generation import Generate
from penstock.gateway.server import build_app
from penstock.types import PolicyName, SamplingSpec
from penstock.weights.serving.origin import Origin
from penstock.weights.serving.server import build as build_weights
from penstock.weights.store import DirectoryStore
from penstock.wire.auth import Audience, Role, Signer
from penstock.wire.serving import server, tune_memory

KINDS = ("dataflow", "weights", "gateway")


def build(kind: str, folder: Path) -> tuple[Starlette, str, str]:
    """The app, the path of a cheap call, and its key."""
    signer = Signer.create(folder / "keys", RUN)
    if kind == "gateway":
        gateway = Gateway(cast(Generate, None))  # nobody asks it to generate
        session = gateway.open(
            policies=[PolicyName("policy")], sampling=SamplingSpec(max_tokens=8), seed=0
        )
        return build_app(gateway), "/v1/models", session.api_key
    audience = Audience(kind)
    token = signer.mint(Role.ADMIN, [audience], ttl_s=3600, subject="operator")
    verifier = signer.verifier(audience)
    if kind == "weights":
        return build_weights(Origin(DirectoryStore(folder)), verifier), "/openapi.json", token
    run = config(groups_per_batch=64, group_size=8, max_staleness=1)
    service = build_dataflow(run, folder / "ledger")
    facade = surface(service, run, "http://127.0.0.1:1")
    return build_server(facade, verifier), "/openapi.json", token


def main() -> None:
    app, path, key = build(sys.argv[1], Path(sys.argv[2]))
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    port: int = listener.getsockname()[1]
    print(f"http://127.0.0.1:{port}", path, key, flush=True)
    tune_memory()
    server(app, "127.0.0.1", port).run(sockets=[listener])


if __name__ == "__main__":
    main()
