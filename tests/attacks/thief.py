# SPDX-License-Identifier: Apache-2.0
"""Reads whatever it can reach and names the secrets that it found. Knows where everything lies.

Runs as a reward, a workflow command or a tool. Standard library only."""

import ctypes
import glob
import json
import os
import re
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

NAMES = ("token", "key", "cloud", "other", "parent", "engine", "metadata")
CANARY = re.compile(rb"CANARY-([a-z]+)-[0-9a-f]{8}")
CLONE_NEWUSER = 0x10000000


def steal(folder: str) -> list[str]:
    """The names of what it can read as it is, and after it tried to become root."""
    hints = json.loads((Path(folder) / "hints.json").read_text())
    found = _look_around(hints)
    _try_to_become_root()
    found += _look_around(hints)
    return sorted({match.decode() for match in CANARY.findall(bytes(found))})


def _look_around(hints: dict[str, Any]) -> bytearray:
    found = bytearray()
    for name, value in os.environ.items():
        found += f"{name}={value}\n".encode()
    paths = [*hints["files"], *glob.glob(f"{hints['run']}/**", recursive=True)]
    for process in glob.glob("/proc/[0-9]*"):
        paths += [f"{process}/environ", f"{process}/cmdline", *glob.glob(f"{process}/fd/*")]
        paths += [process + "/root" + path for path in hints["files"]]
    for path in paths:
        found += _read(path)
    for address in (hints["engine"], ("169.254.169.254", 80), ("127.0.0.1", hints["port"])):
        found += _ask(address)
    return found


def _try_to_become_root() -> None:
    for attempt in (lambda: os.setgid(0), lambda: os.setuid(0)):
        with suppress(OSError):
            attempt()
    ctypes.CDLL(None).unshare(CLONE_NEWUSER)


def _read(path: str) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            return os.read(descriptor, 1 << 20)
        finally:
            os.close(descriptor)
    except OSError:
        return b""


def _ask(address: str | tuple[str, int]) -> bytes:
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    try:
        with socket.socket(family) as call:
            call.settimeout(10)
            call.connect(address)
            call.sendall(b"GET / HTTP/1.0\r\n\r\n")
            return call.recv(4096)
    except OSError:
        return b""


if __name__ == "__main__":
    import sys

    print(json.dumps(steal(sys.argv[1])))
