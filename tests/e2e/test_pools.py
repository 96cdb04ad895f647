# SPDX-License-Identifier: Apache-2.0
"""Pools of real nodes with `simulated` engines, and the real service over HTTP: each policy gets
its arithmetic share. Trainers here only commit and publish, so that nodes are the bottleneck."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from benchmarks.overlap_real import Folder, write_snapshot
from tests.contract.dataflow_server import RunningDataflow, dataflow

from penstock.config import RunConfig, demo_config
from penstock.dataflow.client.dataflow import StatusClient, TrainerClient
from penstock.dataflow.client.partitioned import PartitionedNodeClient
from penstock.dataflow.service.trainers.messages import (
    BatchRequest,
    CommitRequest,
    IncarnationRequest,
    PublishRequest,
)
from penstock.rollout.context import Context
from penstock.rollout.delivery_queue import AckLog
from penstock.rollout.engines.simulated import LoadProfile, SimulatedEngine
from penstock.rollout.node import NodeDeps, build
from penstock.types import NodeId, PolicyName, Task
from penstock.wire.auth import Role

CAPACITY = 8
ANSWER_S = 2.0
"""Long, so that answers take the time of a node, and not this machine's work for them."""


async def play(task: Task, ctx: Context) -> float:
    """One call of the policy that the source is for."""
    await ctx.policy(task.source).chat([{"role": "user", "content": "ab>"}])
    return float(ctx.seed % 2)


def run_config(batches: Mapping[str, int]) -> RunConfig:
    """A policy with a source of its own for each of these, by groups in its batches."""
    values: dict[str, Any] = demo_config(0).model_dump(mode="json")
    [model] = values["models"].values()
    values |= {
        "models": {
            name: model | {"engine": "simulated", "training": {"groups_per_batch": groups}}
            for name, groups in batches.items()
        },
        "sources": [
            {"name": name, "task": "penstock.tasks.reverse", "policies": [name]} for name in batches
        ],
        "workflow": f"{__name__}:play",
        "reward": None,
    }
    values["algorithm"]["num_generations"] = 2
    values["sampling"]["max_tokens"] = 2
    values["training"] |= {"steps": 1_000_000, "max_staleness": 2}
    values["dataflow"]["lease"]["ttl_s"] = 600.0
    return RunConfig.model_validate(values)


@dataclass
class Committer:
    """The trainer of one policy, in a thread: it takes batches, learns nothing and publishes."""

    running: RunningDataflow
    policy: PolicyName
    steps: int = 0
    failure: BaseException | None = None
    _is_over: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._client = TrainerClient(self.running.url, self.running.token(Role.TRAINER))
        body = IncarnationRequest(request_id=self.policy, expected=0, number=0, seq=0)
        self._incarnation = self._client.incarnate(self.policy, body).incarnation
        self._publish(0)
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        self._client.close()
        if self.failure is not None:
            raise self.failure

    def _work(self) -> None:
        try:
            while not self._is_over.is_set():
                self._step(self.steps + 1)
        except Exception as error:
            self.failure = error

    def _step(self, number: int) -> None:
        wanted = BatchRequest(
            consumer=self.policy, seq=number, incarnation=self._incarnation, wait_s=1.0
        )
        if self._client.batch(wanted).manifest is None:
            return
        commit = CommitRequest(incarnation=self._incarnation, number=number)
        self._client.commit(self.policy, number, commit)
        self._publish(number)
        self.steps = number

    def _publish(self, number: int) -> None:
        body = PublishRequest(
            incarnation=self._incarnation,
            number=number,
            manifest_digest=f"{number:064}",
            weights_digest=str(number),
        )
        self._client.publish(self.policy, body)


@asynccontextmanager
async def node(
    running: RunningDataflow, folder: Path, name: str, policy: PolicyName
) -> AsyncGenerator[None]:
    """A node that serves one policy."""
    client = PartitionedNodeClient(running.url, running.node_token(name))
    ack_log = AckLog(folder / f"{name}.txt")
    load = LoadProfile(first_token_s=ANSWER_S, spread=0.2)
    deps = NodeDeps(
        ack_log=ack_log,
        dataflow=client,
        make_fetcher=lambda facts: Folder(folder / "snapshot"),
        make_engine=lambda facts, policy, seat: SimulatedEngine(load),
        policies=(policy,),
    )
    try:
        async with build(deps, node_id=NodeId(name), capacity=CAPACITY) as made:
            working = asyncio.create_task(made.run())
            try:
                yield
            finally:
                working.cancel()
                await asyncio.gather(working, return_exceptions=True)
    finally:
        await client.close()
        ack_log.close()


async def groups_of(
    folder: Path, nodes: Mapping[str, int], batches: Mapping[str, int], until: tuple[str, int]
) -> dict[str, float]:
    """Groups that each policy got while one of them trained so many steps, after its first."""
    write_snapshot(folder / "snapshot")
    with dataflow(folder, run_config(batches)) as running:
        reader = running.reader()
        async with AsyncExitStack() as stack:
            committers = {name: Committer(running, PolicyName(name)) for name in batches}
            for committer in committers.values():
                stack.callback(committer.close)
            for name, number in nodes.items():
                for index in range(number):
                    one = node(running, folder, f"{name}-{index}", PolicyName(name))
                    await stack.enter_async_context(one)
            policy, steps = until
            await _reached(committers, policy, 1)
            before = await asyncio.to_thread(_groups, reader, batches)
            await _reached(committers, policy, 1 + steps)
            after = await asyncio.to_thread(_groups, reader, batches)
    return {name: after[name] - before[name] for name in batches}


async def _reached(committers: Mapping[str, Committer], policy: str, steps: int) -> None:
    while committers[policy].steps < steps:
        assert all(one.failure is None for one in committers.values())
        await asyncio.sleep(0.1)


def _groups(reader: StatusClient, batches: Mapping[str, int]) -> dict[str, float]:
    """Groups in batches, and those that wait for one."""
    return {
        one.policy: float((one.number + one.sealed) * batches[one.policy] + one.ready)
        for one in reader.status().policies
    }


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_pools_of_9_and_3_nodes_and_batches_of_256_and_128(tmp_path: Path) -> None:
    """Groups come by nodes, 9 to 3; steps by groups per batch, so 1.5 of one for one of the
    other."""
    batches = {"big": 256, "small": 128}
    found = await groups_of(tmp_path, {"big": 9, "small": 3}, batches, ("big", 4))
    assert found["big"] / found["small"] == pytest.approx(3.0, rel=0.1), found
    steps = {name: groups / batches[name] for name, groups in found.items()}
    assert steps["big"] / steps["small"] == pytest.approx(1.5, rel=0.1), steps


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_eight_policies_share_by_nodes(tmp_path: Path) -> None:
    names = [f"p{n}" for n in range(8)]
    nodes = {name: 2 if at % 2 else 1 for at, name in enumerate(names)}
    found = await groups_of(tmp_path, nodes, dict.fromkeys(names, 16), ("p1", 10))
    total = sum(found.values())
    for name in names:
        assert found[name] / total == pytest.approx(nodes[name] / 12, rel=0.1), found
