# SPDX-License-Identifier: Apache-2.0
"""A run under load for the benchmarks of scale: its processes as people start them, and one client
for each partition."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from benchmarks import run_folder
from benchmarks.client import Service
from benchmarks.run_folder import ServiceProcess
from benchmarks.service import config
from penstock.config import RunConfig
from penstock.dataflow.service.operators.messages import Status
from penstock.wire.codec import decode

GROUP_SIZE = 8
UP_S = 90.0


@dataclass(slots=True)
class World:
    """A run under load: its processes, and one client per partition, home's first."""

    processes: list[ServiceProcess]
    services: list[Service]

    @property
    def coordinator(self) -> Service:
        return self.services[0]

    def cpu_s(self) -> float:
        """To the nanosecond: the clock of the usual figures ticks every 10 ms."""
        return 1e-9 * sum(
            int(path.read_text().split()[0])
            for process in self.processes
            for path in Path(f"/proc/{process.server.pid}/task").glob("*/schedstat")
        )

    def link_bytes(self) -> dict[str, int]:
        """What each connection between home and a further partition has carried both ways, as the
        kernel counts it: HTTP with its headers, without those of packets."""
        home = urlsplit(self.coordinator.server.url).port
        words = ["ss", "--no-header", "--oneline", "-tnpi", f"( dport = :{home} )"]
        shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        found: dict[str, int] = {}
        for line in shown.splitlines():
            pid = re.search(r"pid=(\d+)", line)
            if pid and int(pid[1]) in {one.server.pid for one in self.processes}:
                numbers = re.findall(r"bytes_(?:sent|received):(\d+)", line)
                found[line.split()[3]] = sum(map(int, numbers))
        return found

    def check(self) -> None:
        for process in self.processes:
            process.check()


def scale_config(
    *, groups_per_batch: int, max_staleness: int = 0, memory_mb: int = 2048
) -> RunConfig:
    base = config(
        groups_per_batch=groups_per_batch, group_size=GROUP_SIZE, max_staleness=max_staleness
    )
    bounds = base.dataflow.bounds.model_copy(update={"memory_mb": memory_mb})
    return base.model_copy(update={"dataflow": base.dataflow.model_copy(update={"bounds": bounds})})


async def _until(process: ServiceProcess, service: Service, path: str) -> bytes:
    while True:
        try:
            return await service.raw("GET", path)
        except aiohttp.ClientConnectionError:
            process.check()
            if time.perf_counter() > process.began_at + UP_S:
                raise
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def world(path: Path, run: RunConfig, num_partitions: int) -> AsyncGenerator[World]:
    folder = run_folder.make(path, run, num_partitions=num_partitions)
    signer = run_folder.signer(folder)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        with contextlib.ExitStack() as stack:
            processes = [stack.enter_context(run_folder.running(folder, 0))]
            services = [Service(http=http, server=processes[0].server, signer=signer)]
            await _until(processes[0], services[0], "/v1/status")
            for index in range(1, num_partitions):
                processes.append(stack.enter_context(run_folder.running(folder, index)))
                services.append(Service(http=http, server=processes[index].server, signer=signer))
            here = World(processes=processes, services=services)
            await _joined(here, num_partitions)
            await here.coordinator.incarnate()
            for service in services:
                service.incarnation = here.coordinator.incarnation
            yield here


async def _joined(here: World, num_partitions: int) -> None:
    give_up_at = time.perf_counter() + UP_S
    while True:
        here.check()
        status = decode(await here.coordinator.raw("GET", "/v1/status"), Status)
        if len(status.partitions) == num_partitions - 1:
            return
        if time.perf_counter() > give_up_at:
            raise RuntimeError(f"{len(status.partitions)} partitions joined in {UP_S:g} s")
        await asyncio.sleep(0.1)
