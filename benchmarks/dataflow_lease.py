# SPDX-License-Identifier: Apache-2.0
"""Durable leases in batches of 32, from a table of 1,000,000 waiting rows, by 16 nodes at once."""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from statistics import median

import aiohttp

from benchmarks.client import NODE, Service
from benchmarks.harness import (
    CONNECTIONS,
    MIN_PAIRS,
    Round,
    load,
    log_line,
    process,
    result,
    scratch,
)
from benchmarks.service import RUN
from penstock.dataflow.service.nodes.messages import LeaseAnswer
from penstock.dataflow.service.operators.messages import Status
from penstock.types import NodeId
from penstock.wire.auth import Signer
from penstock.wire.codec import decode

ROWS = 1_000_000
GROUP_SIZE = 8
PER_CALL = 32
NODES = [NodeId(f"{NODE}.{index}") for index in range(CONNECTIONS)]


async def _wait_for_table(service: Service, groups: int) -> None:
    began_at = time.monotonic()
    while True:
        status = decode(await service.raw("GET", "/v1/status"), Status)
        if status.policies[0].issued >= groups:
            break
        if time.monotonic() > began_at + 300:
            raise RuntimeError(f"only {status.policies[0].issued} of {groups} groups were issued")
        await asyncio.sleep(0.5)
    log_line(f"{groups * GROUP_SIZE:,} rows wait after {time.monotonic() - began_at:.1f} s")


async def _round(service: Service, calls: int) -> Round:
    """Each connection speaks for a node of its own: a node has one request open at a time."""
    free = list(NODES)
    bodies = {
        node: [service.lease_body(node, PER_CALL) for _ in range(calls // 2)] for node in NODES
    }
    answers: list[bytes] = []

    async def call() -> None:
        node = free.pop()
        answers.append(await service.raw("POST", "/v1/leases", bodies[node].pop()))
        free.append(node)

    timed = await load(service.server, [call] * calls)
    granted = sum(len(decode(answer, LeaseAnswer).grants) for answer in answers)
    if granted != calls * PER_CALL:
        raise RuntimeError(f"{granted} leases granted, {calls * PER_CALL} asked for")
    log_line(
        f"{PER_CALL * timed.calls_per_s:8.0f} leases/s, p99 {timed.percentile_ms(0.99):5.1f} ms, "
        f"{1e6 * timed.cpu_s / timed.calls / PER_CALL:.1f} µs of processor time each"
    )
    return timed


async def measure(
    folder: Path, *, rows: int, rounds: int, calls: int, slow_ms: float
) -> list[Round]:
    signer = Signer.create(folder / "keys", RUN)
    groups = rows // GROUP_SIZE
    with process(
        "benchmarks.service",
        str(folder),
        *("--groups-per-batch", str(groups), "--group-size", str(GROUP_SIZE)),
        *("--max-staleness", "0", "--slow-ms", str(slow_ms)),
    ) as server:
        connector = aiohttp.TCPConnector(limit=CONNECTIONS)
        timeout = aiohttp.ClientTimeout(total=300)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
            service = Service(http=http, server=server, signer=signer)
            await service.incarnate()
            await _wait_for_table(service, groups)
            for node in NODES:
                await service.register(node)
            await _round(service, calls // 4)
            return [await _round(service, calls) for _ in range(rounds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, for a look")
    parser.add_argument("--folder", type=Path, help="where the service writes; the temp folder")
    parser.add_argument("--slow-ms", type=float, default=0.0, help="the service sleeps per call")
    options = parser.parse_args()
    rounds, calls = (4, 800) if options.quick else (MIN_PAIRS, 1600)
    with scratch(options.folder) as folder:
        timed = asyncio.run(
            measure(folder, rows=ROWS, rounds=rounds, calls=calls, slow_ms=options.slow_ms)
        )
    result(
        throughput_per_s=median(PER_CALL * r.calls_per_s for r in timed),
        p99_ms=median(r.percentile_ms(0.99) for r in timed),
        cpu_us=median(1e6 * r.cpu_s / r.calls / PER_CALL for r in timed),
        rows=ROWS,
        rounds=rounds,
    )


if __name__ == "__main__":
    main()
