# SPDX-License-Identifier: Apache-2.0
"""A bare Starlette handler that keeps each body in memory and gives it back: what HTTP costs."""

from __future__ import annotations

import socket

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

bodies: dict[str, bytes] = {}


async def rows(request: Request) -> Response:
    name = request.path_params["name"]
    if request.method == "GET":
        return Response(bodies.pop(name))
    bodies[name] = await request.body()
    return Response(b"kept")


if __name__ == "__main__":
    app = Starlette(routes=[Route("/rows/{name}", rows, methods=["GET", "POST"])])
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    config = uvicorn.Config(
        app, loop="uvloop", access_log=False, log_config=None, timeout_keep_alive=75
    )
    uvicorn.Server(config).run(sockets=[listener])
