# SPDX-License-Identifier: Apache-2.0
"""A bare Starlette handler that appends each body to a file and fdatasyncs in groups."""

from __future__ import annotations

import asyncio
import os
import queue
import socket
import sys
import threading
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

bodies: queue.SimpleQueue[tuple[bytes, asyncio.Future[None]]] = queue.SimpleQueue()


def write_groups(path: Path) -> None:
    """The next group forms while the running one syncs."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    while True:
        group = [bodies.get()]
        while not bodies.empty():
            group.append(bodies.get())
        for body, _ in group:
            os.write(descriptor, body)
        os.fdatasync(descriptor)
        group[0][1].get_loop().call_soon_threadsafe(answer, group)


def answer(group: list[tuple[bytes, asyncio.Future[None]]]) -> None:
    for _, done in group:
        done.set_result(None)


async def deliver(request: Request) -> Response:
    done = asyncio.get_running_loop().create_future()
    bodies.put((await request.body(), done))
    await done
    return Response(b"stored")


if __name__ == "__main__":
    threading.Thread(target=write_groups, args=(Path(sys.argv[1]) / "bodies",), daemon=True).start()
    app = Starlette(routes=[Route("/v1/trajectories", deliver, methods=["POST"])])
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    config = uvicorn.Config(
        app, loop="uvloop", access_log=False, log_config=None, timeout_keep_alive=75
    )
    uvicorn.Server(config).run(sockets=[listener])
