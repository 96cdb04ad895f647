# SPDX-License-Identifier: Apache-2.0
"""Free ports for the services of a run on this machine.

Owns where they are looked for. Opens nothing for longer than a test."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterable

from penstock.errors import LaunchError

LOOPBACK = "127.0.0.1"
PORTS = range(18_000, 32_000)
"""Below Linux's range for outgoing connections, so that none takes our port during a restart."""


def free_port(*, exclude: Iterable[int] = ()) -> int:
    taken = set(exclude)
    for port in random.sample(PORTS, k=200):
        if port not in taken and is_port_free(port):
            return port
    raise LaunchError(
        f"no free port between {PORTS.start} and {PORTS.stop}; stop programs that listen there"
    )


def is_port_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def wait_for_port(url: str, *, timeout_s: float, what: str) -> None:
    """Wait for a previous service of this run to release its port; raise if it stays in use."""
    port = int(url.rpartition(":")[2])
    deadline = time.monotonic() + timeout_s
    while not is_port_free(port):
        if time.monotonic() > deadline:
            raise LaunchError(
                f"port {port} of this run's {what} is in use by another program; stop it, change "
                "network.port if the config has it, or delete run/endpoints.json in the run folder "
                "to pick new ports"
            )
        time.sleep(0.05)
