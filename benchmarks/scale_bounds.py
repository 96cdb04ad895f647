# SPDX-License-Identifier: Apache-2.0
"""What must not grow under pressure: memory of a partition while its trainer is slow, and the lag
of the control loop while 2 MB trajectories arrive."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.client import NODE, Service, Tokens, check_stored, make_tokens
from benchmarks.harness import ROOT, log_line
from benchmarks.scale_run import World, scale_config, world
from penstock.dataflow.client.blobs import put_blob
from penstock.dataflow.service.nodes.messages import (
    Delivery,
    DeliveryRequest,
    LeaseAnswer,
)
from penstock.types import NodeId
from penstock.wire.client import AsyncServiceClient
from penstock.wire.codec import decode, encode, encode_json

CAP_MB = 512
NORMAL_BYTES, LARGE_BYTES = 72_000, 2 << 20
SLOW_S = 4.0
"""The trainer takes so long for a batch that nodes make in a fraction of it."""
SAMPLE_S = 0.25
PROBE = NodeId(f"{NODE}.probe")
IDLE_S = 2.0
UPLOADS = 4


# --- a slow trainer ---------------------------------------------------------------------------


async def memory(folder: Path, *, seconds: float) -> float:
    """Largest resident memory of home or its further partition, in MB."""
    tokens = make_tokens(NORMAL_BYTES)
    run = scale_config(groups_per_batch=32, max_staleness=40, memory_mb=CAP_MB)
    seen_mb: list[float] = []
    async with world(folder, run, 2) as here:
        for service in here.services:
            await service.register(service.node_id)
        floods = [_flood(service, tokens) for service in here.services]
        await _for(seconds, _train(here.coordinator), _watch(here, seen_mb), *floods)
    log_line(f"slow trainer for {seconds:g} s: at most {max(seen_mb):.0f} MB of {CAP_MB} MB")
    return max(seen_mb)


async def _for(seconds: float, *work: Awaitable[None]) -> None:
    """Until the time is over; a part that fails ends all."""
    tasks = [asyncio.ensure_future(part) for part in work]
    try:
        done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _train(service: Service) -> None:
    while True:
        await service.seal()
        await asyncio.sleep(SLOW_S)
        await service.commit(number=0, skipped="benchmark")


async def _flood(service: Service, tokens: Sequence[Tokens]) -> None:
    """A node that is faster than any trainer; it waits only when it gets no leases."""
    while True:
        body = service.lease_body(service.node_id, 64, wait_s=5.0)
        answer = decode(await service.raw("POST", "/v1/leases", body), LeaseAnswer)
        bodies = service.bodies(answer.grants, tokens, 8)
        answers = await asyncio.gather(
            *(service.raw("POST", "/v1/trajectories", one) for one in bodies)
        )
        check_stored(answers, len(answer.grants))


async def _watch(here: World, seen_mb: list[float]) -> None:
    while True:
        here.check()
        seen_mb.append(max(process.rss_mb() for process in here.processes))
        await asyncio.sleep(SAMPLE_S)


# --- large trajectories -----------------------------------------------------------------------


class Probe:
    """Heartbeats from another process; `stop` says how long each took, in seconds."""

    def __init__(self, service: Service) -> None:
        beat = service.beat_body(PROBE)
        words = (service.server.url, f"/v1/nodes/{PROBE}", service.node_token)
        self._child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.heartbeat_probe", *words, encode_json(beat)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )

    def stop(self) -> list[float]:
        out, _ = self._child.communicate()
        return json.loads(out)


@contextlib.contextmanager
def _probe(service: Service) -> Generator[list[float]]:
    """Filled when the block ends."""
    took_s: list[float] = []
    probe = Probe(service)
    try:
        yield took_s
    finally:
        took_s += probe.stop()


async def lag(folder: Path, *, num: int) -> tuple[float, float]:
    """p99 of a heartbeat in ms: with nothing else to do, and while large trajectories arrive."""
    num -= num % 8
    run = scale_config(groups_per_batch=num // 8)
    async with world(folder, run, 1) as here:
        service = here.coordinator
        await service.register(PROBE)
        await service.register(service.node_id)
        tokens = make_tokens(LARGE_BYTES, variants=4)
        grants = await service.lease(num)
        with _probe(service) as idle_s:
            await asyncio.sleep(IDLE_S)
        with _probe(service) as busy_s:
            began_at = time.perf_counter()
            deliveries = iter([service.delivery(grant, tokens) for grant in grants])
            caller = AsyncServiceClient(service.server.url, service.node_token)
            await asyncio.gather(*(_upload(service, caller, deliveries) for _ in range(UPLOADS)))
            seconds = time.perf_counter() - began_at
            await caller.close()
    idle_ms, busy_ms = _p99_ms(idle_s), _p99_ms(busy_s)
    log_line(
        f"{num} of 2 MB in {seconds:.1f} s: beats p99 {busy_ms:.1f} ms over {len(busy_s)}, "
        f"{idle_ms:.1f} ms when idle"
    )
    return idle_ms, busy_ms


async def _upload(
    service: Service, caller: AsyncServiceClient, deliveries: Iterator[Delivery]
) -> None:
    """As a node does with what is too large for a call: the bytes go ahead as a blob."""
    for delivery in deliveries:
        ref = await put_blob(caller, delivery.payload, deadline_s=60.0)
        small = replace(delivery, payload=memoryview(b""), blob=ref.digest)
        request = DeliveryRequest(
            node_id=service.node_id, boot_id=service.boot_id, deliveries=(small,)
        )
        check_stored([await service.raw("POST", "/v1/trajectories", encode(request))], 1)


def _p99_ms(took_s: Sequence[float]) -> float:
    ordered = sorted(took_s)
    return 1e3 * ordered[int(0.99 * len(ordered))]
