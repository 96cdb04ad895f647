# SPDX-License-Identifier: Apache-2.0
"""The real dataflow service with keys and HTTP, as its own process, for a load.

`--slow-ms` makes every call sleep on the service's event loop: a benchmark whose ratio does not
fall then measures something else."""

from __future__ import annotations

import argparse
import socket
import time
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.config import ModelConfig, RunConfig, demo_config
from penstock.dataflow.service.build import build
from penstock.dataflow.service.server import build_server, surface
from penstock.wire.auth import Audience, Signer
from penstock.wire.serving import server, tune_memory

RUN = "benchmark"


def config(
    *,
    groups_per_batch: int,
    group_size: int,
    max_staleness: int,
    workflow: str = "",
    max_tokens: int = 0,
    stream: bool = False,
) -> RunConfig:
    """The demo's config with these; a `workflow` gives its own reward."""
    base = demo_config(0)
    training = base.training.model_copy(
        update={
            "groups_per_batch": groups_per_batch,
            "max_staleness": max_staleness,
            "steps": 1_000_000,
            "stream": stream,
        }
    )
    algorithm = base.algorithm.model_copy(update={"num_generations": group_size})
    lease = base.dataflow.lease.model_copy(update={"ttl_s": 120.0})
    dataflow = base.dataflow.model_copy(update={"lease": lease, "rules": ()})
    updates: dict[str, Any] = {
        "name": RUN,
        "models": {name: _with_long_window(model) for name, model in base.models.items()},
        "training": training,
        "algorithm": algorithm,
        "dataflow": dataflow,
    }
    if workflow:
        updates |= {"workflow": workflow, "reward": None}
    if max_tokens:
        updates["sampling"] = base.sampling.model_copy(update={"max_tokens": max_tokens})
    return base.model_copy(update=updates)


def _with_long_window(model: ModelConfig) -> ModelConfig:
    """A model whose window the service does not know: rows here are longer than the demo's."""
    return model.model_copy(update={"init": "models/of-the-benchmark"})


class DelayedApp:
    """The app, asleep for a while before each request."""

    def __init__(self, app: ASGIApp, seconds: float) -> None:
        self._app = app
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            time.sleep(self._seconds)  # noqa: ASYNC251  the loop itself must lose this time
        await self._app(scope, receive, send)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--groups-per-batch", type=int, default=64)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-staleness", type=int, default=1)
    parser.add_argument("--workflow", default="")
    parser.add_argument("--max-tokens", type=int, default=0)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--slow-ms", type=float, default=0.0)
    options = parser.parse_args()
    run = config(
        groups_per_batch=options.groups_per_batch,
        group_size=options.group_size,
        max_staleness=options.max_staleness,
        workflow=options.workflow,
        max_tokens=options.max_tokens,
        stream=options.stream,
    )
    verifier = Signer.create(options.folder / "keys", RUN).verifier(Audience.DATAFLOW)
    service = build(run, options.folder / "ledger")
    app = build_server(surface(service, run, "http://127.0.0.1:1"), verifier)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port: int = listener.getsockname()[1]
    print(f"http://127.0.0.1:{port}", flush=True)
    host = server(app, "127.0.0.1", port)
    if options.slow_ms:
        host.config.app = DelayedApp(app, options.slow_ms / 1e3)
    tune_memory()
    host.run(sockets=[listener])


if __name__ == "__main__":
    main()
