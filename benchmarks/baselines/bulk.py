# SPDX-License-Identifier: Apache-2.0
"""Bytes over one bare TCP connection: `bulk.py serve HOST PORT` sends zeros to whoever comes;
`bulk.py read HOST PORT SECONDS` prints how many bytes per second came in that time."""

from __future__ import annotations

import contextlib
import socket
import sys
import time

PIECE = bytes(1 << 16)


def serve(host: str, port: int) -> None:
    with socket.create_server((host, port)) as listener:
        print("ready", flush=True)
        while True:
            peer, _ = listener.accept()
            with peer, contextlib.suppress(OSError):
                while True:
                    peer.sendall(PIECE)


def read(host: str, port: int, seconds: float) -> float:
    began_at = time.monotonic()
    num_bytes = 0
    with socket.create_connection((host, port)) as peer:
        while (took_s := time.monotonic() - began_at) < seconds:
            num_bytes += len(peer.recv(1 << 16))
    return num_bytes / took_s


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], int(sys.argv[3]))
    else:
        print(read(sys.argv[2], int(sys.argv[3]), float(sys.argv[4])), flush=True)
