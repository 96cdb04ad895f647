# SPDX-License-Identifier: Apache-2.0
"""Real Ray clusters on this machine: a control store and several raylets, with authentication."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import psutil

TOKEN = secrets.token_hex(32)


class RayCluster:
    """One head, which the driver is beside, and hosts that may come, hang and go."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self.address = str(cluster.address)

    def add(self, host: str, **labels: str) -> Any:
        return self._cluster.add_node(num_cpus=3, labels={"host": host, **labels})

    def host_of(self, pid: int, hosts: dict[str, Any]) -> str:
        """The host whose raylet started the worker that started this service."""
        ancestors = {process.pid for process in psutil.Process(pid).parents()}
        return next(name for name, host in hosts.items() if raylet_of(host) in ancestors)

    def kill_store(self) -> None:
        os.kill(self._cluster.head_node.all_processes["gcs_server"][0].process.pid, signal.SIGKILL)


def raylet_of(host: Any) -> int:
    return host.all_processes["raylet"][0].process.pid


def kill_raylet(host: Any) -> None:
    os.kill(raylet_of(host), signal.SIGKILL)


def workers_of(host: Any) -> list[psutil.Process]:
    """The raylet and the keepers that it started, without their services."""
    raylet = psutil.Process(raylet_of(host))
    return [raylet, *raylet.children()]


@contextmanager
def ray_cluster() -> Generator[RayCluster]:
    before = {**os.environ}
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN)
    from ray.cluster_utils import Cluster  # reads the environment now

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        made = RayCluster(cluster)
        os.environ["RAY_ADDRESS"] = made.address
        yield made
    finally:
        cluster.shutdown()
        os.environ.clear()
        os.environ.update(before)
