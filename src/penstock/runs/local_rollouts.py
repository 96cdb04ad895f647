# SPDX-License-Identifier: Apache-2.0
"""Rollouts in this process, for `penstock check` and `penstock try`.

Owns the wiring of a node's own parts (gateway, endpoint, attempts) without a dataflow service:
nothing is leased, recorded or delivered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

from penstock.dataflow.core.leasing import Grant
from penstock.dataflow.service.nodes.messages import RecordRequest, RunInfo
from penstock.dataflow.sources import slot_seeds
from penstock.gateway.gateway import Gateway
from penstock.rollout.attempt import AttemptRunner
from penstock.rollout.endpoint import Endpoint
from penstock.rollout.isolation import Isolation
from penstock.rollout.recorder import Recorder
from penstock.rollout.rewards.scorer import RewardScorer
from penstock.rollout.tools.servers import open_tools
from penstock.types import GroupId, NodeId, RowId, Task, Trajectory, Turn

NODE = NodeId("local")
Rollout = Callable[[Task, int], Awaitable[Trajectory]]
"""One attempt at a task. The number tells apart several attempts at one task."""


class _NoRecords:
    """Keeps no turns of unfinished attempts: there is one process to lose."""

    async def record(self, body: RecordRequest) -> None: ...

    async def recorded(self, node_id: NodeId, row_id: RowId, secret: str) -> tuple[Turn, ...]:
        return ()


@asynccontextmanager
async def local_rollouts(
    run_info: RunInfo,
    gateway: Gateway,
    scorer: RewardScorer | None,
    isolation: Isolation,
) -> AsyncGenerator[Rollout]:
    """A function that makes rollouts as a node does, while the context is open."""
    endpoint = Endpoint(gateway)
    recorder = Recorder(_NoRecords(), NODE)
    tools = await open_tools(run_info, isolation)
    runner = AttemptRunner(gateway, endpoint, recorder, scorer, run_info, NODE, isolation, tools)
    serving = asyncio.create_task(endpoint.run(), name="gateway")
    try:
        yield partial(_attempt, runner)
    finally:
        await runner.close()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await tools.close()


async def _attempt(runner: AttemptRunner, task: Task, number: int) -> Trajectory:
    *_, seed = slot_seeds(task.seed, range(number, number + 1))
    grant = Grant(
        group_id=GroupId(f"local-{task.source}-{task.ordinal}"),
        slot=number,
        epoch=1,
        attempt=1,
        task=0,
        seed=seed,
    )
    return await runner.run(grant, task)
