# SPDX-License-Identifier: Apache-2.0
"""A bare Starlette handler that answers a range of one file: what a batch costs without a ledger.

`GET /rows?rank=R&of=N` is the rank's part of the file."""

from __future__ import annotations

import asyncio
import os
import socket
import sys

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

descriptor = os.open(sys.argv[1], os.O_RDONLY) if __name__ == "__main__" else -1


async def rows(request: Request) -> Response:
    rank, of = int(request.query_params["rank"]), int(request.query_params["of"])
    size = os.fstat(descriptor).st_size // of
    return Response(await asyncio.to_thread(os.pread, descriptor, size, rank * size))


if __name__ == "__main__":
    app = Starlette(routes=[Route("/rows", rows)])
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    config = uvicorn.Config(
        app, loop="uvloop", access_log=False, log_config=None, timeout_keep_alive=75
    )
    uvicorn.Server(config).run(sockets=[listener])
