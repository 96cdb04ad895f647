# SPDX-License-Identifier: Apache-2.0
"""One point of `async_overlap` on the clock: the real service behind HTTP in its own process, real
rollout nodes with `simulated` engines, and a trainer that sleeps. The run has no end, so there is a
filling and no draining."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import AsyncGenerator, Collection, Generator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from benchmarks.client import POLICY, Service
from benchmarks.harness import Server, process
from benchmarks.overlap_workload import BusyInterval, Window, Workload
from benchmarks.service import RUN
from penstock.dataflow.client.partitioned import PartitionedNodeClient
from penstock.dataflow.service.messages import Ack
from penstock.dataflow.service.trainers.messages import (
    BatchAnswer,
    BatchRequest,
    PublishRequest,
)
from penstock.gateway.generation import Completion, GenerationRequest
from penstock.rollout.context import Context
from penstock.rollout.delivery_queue import AckLog
from penstock.rollout.engines.simulated import LoadProfile, SimulatedEngine
from penstock.rollout.node import NodeDeps, build
from penstock.types import NodeId, PublishedVersion, Task, view_ids
from penstock.wire.auth import Audience, Role, Signer

ALPHABET = "abcdefghij>"
WARM_UP = 1
"""Commits before anything is counted."""


async def answer(task: Task, ctx: Context) -> float:
    """The workflow: one call, any reward."""
    await ctx.policy().chat([{"role": "user", "content": str(task.payload["prompt"])}])
    return float(ctx.seed % 2)


class _Timed(SimulatedEngine):
    """Notes what it works on; sleeping longer than an answer takes is not work."""

    def __init__(self, load: LoadProfile, busy_intervals: list[BusyInterval]) -> None:
        super().__init__(load)
        self._token_s = load.token_s
        self._spells = busy_intervals

    async def __call__(self, request: GenerationRequest) -> Completion:
        began_at = time.monotonic()
        seconds = math.inf
        try:
            completion = await super().__call__(request)
            seconds = (len(view_ids(completion.sampled_ids)) - 1) * self._token_s
            return completion
        finally:  # one that the end of the run stopped was at work until then
            self._spells.append(BusyInterval(began_at=began_at, seconds=seconds))


class Folder:
    """Weights that are there already."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def __call__(self, weights_url: str, target: PublishedVersion) -> Path:
        return self._folder

    def require_unchanged(self, folder: Path) -> None:
        return None

    def make_patch(self, base: Path, folder: Path) -> None:
        return None

    def prune_except(self, keep: Collection[str]) -> None:
        return None

    async def close(self) -> None:
        return None


def write_snapshot(folder: Path) -> Path:
    """The smallest that a node can serve: a token per letter."""
    folder.mkdir(parents=True)
    tokenizer = Tokenizer(WordLevel({c: at for at, c in enumerate(ALPHABET)}, unk_token=">"))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    (folder / "config.json").write_text(json.dumps({"vocab_size": len(ALPHABET)}))
    return folder


@contextlib.asynccontextmanager
async def _node(
    url: str, signer: Signer, folder: Path, name: str, capacity: int, engine: SimulatedEngine
) -> AsyncGenerator[None]:
    token = signer.mint(Role.ROLLOUT, [Audience.DATAFLOW], ttl_s=3600, subject=name)
    client = PartitionedNodeClient(url, token)
    ack_log = AckLog(folder / f"{name}.txt")
    deps = NodeDeps(
        ack_log=ack_log,
        dataflow=client,
        make_fetcher=lambda facts: Folder(folder / "snapshot"),
        make_engine=lambda facts, policy, seat: engine,
    )
    try:
        async with build(deps, node_id=NodeId(name), capacity=capacity) as node:
            running = asyncio.create_task(node.run())
            try:
                yield
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
    finally:
        await client.close()
        ack_log.close()


async def _sealed(trainer: Service, seq: int) -> None:
    """Wait for a batch, however long its answers take."""
    trainer.seq = seq
    body = BatchRequest(consumer=POLICY, seq=seq, incarnation=trainer.incarnation)
    while (await trainer.call("POST", "/v1/batches", body, BatchAnswer)).manifest is None:
        pass


async def _train(trainer: Service, steps: int, train_s: float) -> list[float]:
    """When each batch was committed."""
    commits_at: list[float] = []
    for number in range(1, steps + 1):
        await _sealed(trainer, number)
        await asyncio.sleep(train_s)
        await commit_and_publish(trainer, number)
        commits_at.append(time.monotonic())
    return commits_at


async def commit_and_publish(trainer: Service, number: int) -> None:
    await trainer.commit(number=number)
    publish = PublishRequest(
        incarnation=trainer.incarnation,
        number=number,
        manifest_digest=f"{number:064}",
        weights_digest=str(number),
    )
    await trainer.call("POST", f"/v1/policies/{POLICY}/versions", publish, Ack)


@contextlib.asynccontextmanager
async def running_nodes(
    server: Server, signer: Signer, folder: Path, workload: Workload, token_s: float
) -> AsyncGenerator[tuple[Service, list[BusyInterval]]]:
    """The calls of a trainer that took over, and what the nodes at work write down."""
    busy_intervals: list[BusyInterval] = []
    load = LoadProfile(token_s=token_s, median_tokens=workload.median_tokens, spread=workload.sigma)
    async with contextlib.AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession())
        trainer = Service(http=http, server=server, signer=signer)
        await trainer.incarnate()
        for index in range(workload.num_nodes):
            capacity = len(range(index, workload.num_slots, workload.num_nodes))
            node = _node(
                server.url, signer, folder, f"node-{index}", capacity, _Timed(load, busy_intervals)
            )
            await stack.enter_async_context(node)
        yield trainer, busy_intervals


async def _run(
    server: Server, signer: Signer, folder: Path, workload: Workload, token_s: float
) -> tuple[list[float], list[BusyInterval]]:
    nodes = running_nodes(server, signer, folder, workload, token_s)
    async with nodes as (trainer, busy_intervals):
        commits_at = await _train(trainer, workload.steps, workload.train_s_at(token_s))
    return commits_at, busy_intervals


@dataclass(frozen=True, slots=True, kw_only=True)
class WallClockResult:
    fraction: float
    """Of the bound max(W / S, N T), from the end of the warm-up to the last commit."""
    gap_ms: float
    """Slot time beside its tokens, per answer."""


@contextlib.contextmanager
def running_service(
    folder: Path, workload: Workload, *words: str
) -> Generator[tuple[Server, Signer]]:
    """The service of such a run, and the key of its tokens; `words`: more of its arguments."""
    write_snapshot(folder / "snapshot")
    signer = Signer.create(folder / "keys", RUN)
    arguments = {
        "groups-per-batch": workload.groups_per_batch,
        "group-size": workload.group_size,
        "max-staleness": workload.max_staleness,
        "max-tokens": workload.max_tokens,
        "workflow": f"{__name__}:{answer.__name__}",
    }
    given = [f"--{name}={value}" for name, value in arguments.items()]
    with process("benchmarks.service", str(folder), *given, *words) as server:
        yield server, signer


def run_on_wall_clock(folder: Path, workload: Workload, *, token_s: float) -> WallClockResult:
    with running_service(folder, workload) as (server, signer):
        commits_at, busy_intervals = asyncio.run(_run(server, signer, folder, workload, token_s))
    window = Window(
        begin=commits_at[WARM_UP - 1],
        end=commits_at[-1],
        num_batches=len(commits_at) - WARM_UP,
    )
    slot_s = workload.num_slots * window.seconds
    busy_s = sum(spell.within(window.begin, window.end) for spell in busy_intervals)
    num_answers = busy_s / (workload.expected_tokens * token_s)
    fraction = window.fraction(
        busy_intervals, num_slots=workload.num_slots, train_s=workload.train_s_at(token_s)
    )
    return WallClockResult(fraction=fraction, gap_ms=1e3 * (slot_s - busy_s) / num_answers)
