# SPDX-License-Identifier: Apache-2.0
"""A service with 1,000,000 live rows is killed and started again: seconds until it answers a lease,
and until it has sealed a batch."""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from uuid import uuid4

import aiohttp

from benchmarks import big_ledger, run_folder
from benchmarks.client import POLICY, Service
from benchmarks.harness import log_line, result, scratch
from benchmarks.service import config
from penstock.dataflow.service.nodes.messages import LeaseAnswer
from penstock.dataflow.service.operators.messages import Status
from penstock.dataflow.service.trainers.messages import (
    IncarnationAnswer,
    IncarnationRequest,
)
from penstock.wire.codec import decode

GROUP_SIZE = 8
GROUPS_PER_BATCH = 64
OPEN_GROUPS = 250
"""About so many more run when the service is killed, with leases on half of them."""
IMPORTS = (
    "import uvloop, penstock.runs.service_process, penstock.dataflow.service.server, "
    "penstock.fleet.run_folder"
)
GIVE_UP_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Seconds from the start of the process."""

    first_lease_s: float
    ready_s: float
    cpu_s: float
    rss_mb: float
    python_s: float
    """Of an interpreter that only imports what the service imports, just before."""


async def _wait_listening(
    process: run_folder.ServiceProcess, service: Service, method: str, path: str
) -> None:
    """Ask until somebody listens: as every client does while a service is away."""
    while True:
        try:
            await service.raw(method, path)
            return
        except aiohttp.ClientConnectionError:
            process.check()
            if time.perf_counter() > process.began_at + GIVE_UP_S:
                raise
            await asyncio.sleep(0.005)


async def _wait_first_lease(
    process: run_folder.ServiceProcess, service: Service, num: int
) -> float:
    """Seconds until a node that was there before has new leases."""
    body = service.lease_body(service.node_id, num)
    while True:
        try:
            answer = decode(await service.raw("POST", "/v1/leases", body), LeaseAnswer)
        except aiohttp.ClientConnectionError:
            process.check()
            if time.perf_counter() > process.began_at + GIVE_UP_S:
                raise
            await asyncio.sleep(0.005)
            continue
        if not answer.grants:
            raise RuntimeError("the first lease request was answered without a lease")
        return time.perf_counter() - process.began_at


def _python_s(folder: run_folder.RunFolder) -> float:
    began_at = time.perf_counter()
    environment = run_folder.environment(folder)
    subprocess.run([sys.executable, "-c", IMPORTS], env=environment, check=True)
    return time.perf_counter() - began_at


async def _run_until_killed(
    folder: run_folder.RunFolder, service: Service, num_groups: int
) -> None:
    """Work is open and leased when it is killed."""
    with run_folder.running(folder) as process:
        await _wait_listening(process, service, "GET", "/v1/status")
        request = IncarnationRequest(request_id="first", expected=0, number=0, seq=0)
        path = f"/v1/policies/{POLICY}/incarnations"
        answer = await service.call("POST", path, request, IncarnationAnswer)
        service.incarnation = answer.incarnation
        await service.register(service.node_id)
        await service.lease(OPEN_GROUPS * GROUP_SIZE // 2)
        status = decode(await service.raw("GET", "/v1/status"), Status)
        found = status.policies[0].ready
        if found != num_groups:
            raise RuntimeError(f"{found} groups came back, {num_groups} were admitted")


async def _restart(folder: run_folder.RunFolder, service: Service) -> Start:
    python_s = await asyncio.to_thread(_python_s, folder)
    with run_folder.running(folder) as process:
        first_lease_s = await _wait_first_lease(process, service, GROUP_SIZE)
        if await service.seal() != GROUPS_PER_BATCH * GROUP_SIZE:
            raise RuntimeError("the first batch is not whole")
        ready_s = time.perf_counter() - process.began_at
        start = Start(
            first_lease_s=first_lease_s,
            ready_s=ready_s,
            cpu_s=process.server.cpu_s(),
            rss_mb=process.rss_mb(),
            python_s=python_s,
        )
    log_line(
        f"lease after {start.first_lease_s:5.2f} s, batch after {start.ready_s:5.2f} s, "
        f"{start.cpu_s:5.2f} s of processor, {start.rss_mb:4.0f} MB | imports alone "
        f"{start.python_s:4.2f} s"
    )
    return start


async def measure(folder: Path, *, rows: int, starts: int) -> list[Start]:
    num_groups = rows // GROUP_SIZE
    max_staleness = (num_groups + OPEN_GROUPS) // GROUPS_PER_BATCH - 1
    run = run_folder.make(
        folder / "run",
        config(
            groups_per_batch=GROUPS_PER_BATCH, group_size=GROUP_SIZE, max_staleness=max_staleness
        ),
    )
    began_at = time.perf_counter()
    big_ledger.fill(run.path / "ledger", num_groups=num_groups, group_size=GROUP_SIZE)
    log_line(f"{rows:,} rows written in {time.perf_counter() - began_at:.1f} s")
    timeout = aiohttp.ClientTimeout(total=GIVE_UP_S)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        coordinator = run_folder.Server(url=run.endpoints().dataflow, pid=0)
        service = Service(http=http, server=coordinator, signer=run_folder.signer(run))
        service.boot_id = uuid4().hex
        await _run_until_killed(run, service, num_groups)
        return [await _restart(run, service) for _ in range(starts)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rows and starts, for a look")
    parser.add_argument("--folder", type=Path, help="where the ledger lies; the temp folder")
    parser.add_argument("--rows", type=int, help="live rows; 1,000,000, or 200,000 when quick")
    options = parser.parse_args()
    rows: int = options.rows or (200_000 if options.quick else 1_000_000)
    with scratch(options.folder) as folder:
        starts = asyncio.run(measure(folder, rows=rows, starts=3 if options.quick else 10))
    result(
        first_lease_s=median(start.first_lease_s for start in starts),
        ready_s=median(start.ready_s for start in starts),
        cpu_s=median(start.cpu_s for start in starts),
        rss_mb=median(start.rss_mb for start in starts),
        python_start_s=median(start.python_s for start in starts),
        rows=rows,
        starts=len(starts),
    )


if __name__ == "__main__":
    main()
