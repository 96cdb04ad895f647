# SPDX-License-Identifier: Apache-2.0
"""The real gateway with HTTP in front of a vLLM at an address, as its own process, for a load.

    python -m benchmarks.gateway_service URL FOLDER    of the engine, of the model it serves

A key that nobody has used opens a session; the oldest sessions are closed, as rollouts that end.
`--slow-ms` makes every request sleep on the gateway's event loop: a figure that does not worsen
then measures something else."""

from __future__ import annotations

import argparse
import asyncio
import socket
from collections import deque
from pathlib import Path

import uvloop

from benchmarks.local_run import quiet
from benchmarks.service import DelayedApp
from penstock.gateway.gateway import Gateway, Session
from penstock.gateway.renderer import Renderer
from penstock.gateway.server import build_app
from penstock.rollout.engines.vllm import RemoteServer, VllmEngine
from penstock.types import PolicyName, SamplingSpec, Version
from penstock.wire.serving import server, tune_memory

POLICY = PolicyName("policy")
MAX_SESSIONS = 256


class _AutoOpenSessions(Gateway):
    """Opens a session for whoever asks."""

    def __init__(self, engine: VllmEngine) -> None:
        super().__init__(engine)
        self._named: dict[str, Session] = {}
        self._keys: deque[str] = deque()

    def find(self, api_key: str, session_id: str | None = None) -> Session:
        session = self._named.get(api_key)
        if session is None:
            sampling = SamplingSpec(max_tokens=1_000)
            session = self.open(policies=[POLICY], sampling=sampling, seed=len(self._keys))
            self._named[api_key] = session
            self._keys.append(api_key)
            if len(self._keys) > MAX_SESSIONS:
                self.close(self._named.pop(self._keys.popleft()))
        return session


async def serve(url: str, folder: Path, slow_s: float) -> None:
    engine = VllmEngine(RemoteServer(url))
    await engine.load(folder, Version(policy=POLICY, incarnation=1, number=0))
    gateway = _AutoOpenSessions(engine)
    gateway.set_renderer(POLICY, Renderer.load(folder))
    app = build_app(gateway)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port: int = listener.getsockname()[1]
    host = server(app, "127.0.0.1", port)
    if slow_s:
        host.config.app = DelayedApp(app, slow_s)
    tune_memory()
    print(f"http://127.0.0.1:{port}", flush=True)
    await host.serve(sockets=[listener])
    await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--slow-ms", type=float, default=0.0)
    options = parser.parse_args()
    quiet()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(options.url, options.folder, options.slow_ms / 1e3))


if __name__ == "__main__":
    main()
