# SPDX-License-Identifier: Apache-2.0
"""Sub-agents of a workflow: their paths, seeds and tasks, and how one runs to its end.

A sub-agent is a workflow with a separate task, inside the attempt of its parent. Its turns are
turns of the attempt, under its path. Owns the deadline; the gateway counts tokens, calls and depth.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from blake3 import blake3

from penstock.bounds import MAX_AGENT_CHARS
from penstock.errors import BudgetExceeded, WorkflowError
from penstock.seeds import derive
from penstock.types import JsonObject, Task
from penstock.wire.codec import encode_json

SPAWNS = 1 << 40
"""Number of the stream of seeds for sub-agents; lower numbers are the seeds of calls."""


def child_path(parent: str, number: int) -> str:
    """The path of the parent's sub-agent with this number, like `0.2`."""
    path = f"{parent}.{number}" if parent else str(number)
    if len(path) > MAX_AGENT_CHARS:
        raise BudgetExceeded(
            f"sub-agent {parent} cannot spawn: the path of its sub-agent has {len(path)} "
            f"characters, and {MAX_AGENT_CHARS} are recorded; give ctx.spawn a budget with "
            "max_depth",
            limit="depth",
        )
    return path


def child_seed(seed: int, number: int) -> int:
    """The seed of the sub-agent with this number, whatever its parent called before."""
    return derive(derive(seed, SPAWNS), number)


def child_task(payload: JsonObject | Task, parent: Task | None, seed: int) -> Task:
    """The task of a sub-agent: of its parent's source, with another payload."""
    if isinstance(payload, Task):
        return payload
    return Task(
        key=blake3(encode_json(payload)).hexdigest()[:32],
        source=parent.source if parent else "",
        ordinal=parent.ordinal if parent else 0,
        payload=payload,
        workflow="",
        seed=seed,
    )


async def within(deadline_s: float | None, attempt: Awaitable[Any], agent: str) -> Any:
    """What a sub-agent returns; raises BudgetExceeded at its deadline."""
    limit = asyncio.timeout(deadline_s)
    try:
        async with limit:
            return await attempt
    except TimeoutError:
        if not limit.expired():
            raise
        raise BudgetExceeded(
            f"sub-agent {agent} did not end within deadline_s={deadline_s:g}; give ctx.spawn more "
            "time, or a task that takes less",
            limit="time",
        ) from None


def without_result(agent: str) -> WorkflowError:
    """The error for a sub-agent that returned None and received no answer."""
    return WorkflowError(
        f"sub-agent {agent} returned nothing and received no answer; return a result, or call the "
        "model with `await ctx.policy().chat(messages)`"
    )
