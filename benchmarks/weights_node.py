# SPDX-License-Identifier: Apache-2.0
"""A node as weights see it, in a process of its own: pulls versions and loads them into an engine.

`weights_node.py URL CACHE`, the token in WEIGHTS_TOKEN: each line on stdin is an `Order`, answered
by an `Arrival` on stdout. The engine answers short prompts without end while it loads; the longest
time without an answer, beyond the usual, is the downtime."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from benchmarks.weights_messages import Arrival, Order, log_to_stderr
from penstock.gateway.generation import GenerationRequest
from penstock.rollout.engines.hf import HfEngine
from penstock.types import PublishedVersion, SamplingSpec, Version
from penstock.weights.client import Puller
from penstock.weights.update import KEPT_S
from penstock.wire.client import AsyncServiceClient

PROMPT = [1, 2, 3, 4]
WATCH_S = 2.0
"""Answers are watched so long before and after a load."""


class CountingCaller(AsyncServiceClient):
    num_bytes = 0

    async def request(self, method: str, path: str, *words: Any, **options: Any) -> Any:
        answer = await super().request(method, path, *words, **options)
        if path.startswith("/v1/blobs/"):
            self.num_bytes += len(answer.content)
        return answer


@asynccontextmanager
async def record_answer_times(engine: HfEngine, version: Version) -> AsyncGenerator[list[float]]:
    """Times at which answers came."""
    came_at: list[float] = []

    async def ask() -> None:
        spec = SamplingSpec(max_tokens=2)
        while True:
            await engine(GenerationRequest(PROMPT, spec, policy=version.policy, session="s"))
            came_at.append(time.monotonic())

    task = asyncio.create_task(ask())
    try:
        yield came_at
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Node:
    def __init__(self, caller: CountingCaller, cache: Path) -> None:
        self._caller = caller
        self._cache = cache
        self._pullers: dict[tuple[str, int], Puller] = {}
        self._engine: HfEngine | None = None

    async def execute(self, order: Order) -> Arrival:
        kind = order.transfer, order.num_ranges
        puller = self._pullers.setdefault(
            kind, Puller(self._cache, transfer=order.transfer, num_ranges=order.num_ranges)
        )
        self._caller.num_bytes = 0
        began_at = time.monotonic()
        folder = await puller.pull([self._caller], order.wanted)
        pull_s = time.monotonic() - began_at
        load_s = downtime_s = 0.0
        if order.is_loaded:
            load_s, downtime_s = await self._load(folder, order.wanted)
        return Arrival(
            pull_s=pull_s,
            fetched_bytes=self._caller.num_bytes,
            load_s=load_s,
            downtime_s=downtime_s,
        )

    async def _load(self, folder: Path, wanted: PublishedVersion) -> tuple[float, float]:
        version = Version(
            policy=wanted.policy, incarnation=wanted.incarnation, number=wanted.number
        )
        if self._engine is None:  # imports, and no rollouts to hold up; the next load counts
            self._engine = HfEngine()
            await self._engine.load(folder, version)
        async with record_answer_times(self._engine, version) as came_at:
            await asyncio.sleep(WATCH_S)
            began_at = time.monotonic()
            await self._engine.load(folder, version)
            load_s = time.monotonic() - began_at
            await asyncio.sleep(WATCH_S)
        gaps = [later - earlier for earlier, later in pairwise(came_at)]
        return load_s, max(gaps, default=0.0) - median(gaps or [0.0])


async def main(url: str, cache: Path) -> None:
    caller = CountingCaller(url, os.environ["WEIGHTS_TOKEN"], idle_s=KEPT_S)
    node = Node(caller, cache)
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        arrival = await node.execute(msgspec.json.decode(line, type=Order))
        print(msgspec.json.encode(arrival).decode(), flush=True)
    await caller.close()


if __name__ == "__main__":
    log_to_stderr()
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
