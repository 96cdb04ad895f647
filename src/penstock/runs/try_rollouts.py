# SPDX-License-Identifier: Apache-2.0
"""Makes a few rollouts without training: no services, no run folder, nothing kept.

Owns the choice of tasks. The policy's own engine answers, with the newest checkpoint of a run
folder or the initial weights, or an OpenAI-compatible server. Workflow and reward run as on a
node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

from penstock.config import RunConfig
from penstock.dataflow.service.build import run_info
from penstock.dataflow.service.build_sources import build_source
from penstock.dataflow.sources import slot_seeds
from penstock.errors import ConfigError
from penstock.runs.local_gateway import (
    TextServerAddress,
    cancel,
    open_gateway,
    open_rollouts,
    wait_or_raise,
)
from penstock.runs.local_rollouts import Rollout
from penstock.runs.logged_gateway import LoggedGateway
from penstock.runs.service_process import add_import_paths
from penstock.runs.target import RunTarget
from penstock.types import JsonObject, Task

MAX_CONCURRENT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedRollout:
    source: str
    ordinal: int
    """Position of the task in its source."""
    task: JsonObject
    messages: tuple[JsonObject, ...]
    """The conversation in OpenAI's chat format."""
    reward: float | None
    """None if the rollout failed."""
    outcome: str
    """completed, truncated or failed."""
    reason: str
    detail: str
    """The cause of a failure."""


async def try_rollouts(
    target: RunTarget, count: int, server: TextServerAddress | None = None
) -> AsyncGenerator[TriedRollout]:
    """Make `count` rollouts of the first tasks of the sources in turn; yield each in that order.

    server: answers instead of the policy's own engine."""
    config = target.config
    add_import_paths(target.python_path)
    tasks = list(_tasks(config, count))
    info = run_info(config)
    async with AsyncExitStack() as resources:
        gateway = await resources.enter_async_context(open_gateway(target, info, server))
        rollouts = open_rollouts(target, info, gateway)
        rollout, scoring = await resources.enter_async_context(rollouts)
        limit = asyncio.Semaphore(MAX_CONCURRENT)
        attempts = [
            asyncio.create_task(_attempt(rollout, gateway, task, number, limit))
            for task, number in tasks
        ]
        resources.push_async_callback(cancel, *attempts)
        for attempt in attempts:
            await wait_or_raise(attempt, scoring)
            yield await attempt


async def _attempt(
    rollout: Rollout, gateway: LoggedGateway, task: Task, number: int, limit: asyncio.Semaphore
) -> TriedRollout:
    async with limit:
        trajectory = await rollout(task, number)
    [seed] = slot_seeds(task.seed, range(number, number + 1))
    return TriedRollout(
        source=task.source,
        ordinal=task.ordinal,
        task=task.payload,
        messages=tuple(gateway.sessions[seed].messages()),
        reward=trajectory.reward,
        outcome=trajectory.outcome.kind,
        reason=trajectory.outcome.reason,
        detail=trajectory.outcome.detail,
    )


def _tasks(config: RunConfig, count: int) -> Iterator[tuple[Task, int]]:
    """(task, number of the attempt at it): from the sources in turn, from the start again where one
    has too few."""
    sources = [build_source(config, source) for source in config.sources if source.session is None]
    if not sources:
        raise ConfigError(
            "sources: there are no tasks to try, only sessions of external agents; add a source "
            "with task: to try a workflow"
        )
    for index in range(count):
        source, turn = sources[index % len(sources)], index // len(sources)
        limit = source.limit
        ordinal, number = (turn, 0) if limit is None else (turn % limit, turn // limit)
        yield source.task(ordinal, seed=config.seed, workflow=""), number
