# SPDX-License-Identifier: Apache-2.0
"""Runs an agent on a task of tests/harbor_tasks as a node does, without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.dataflow.sources.harbor import HarborSpec, read_task
from penstock.errors import EngineError
from penstock.gateway.gateway import Gateway
from penstock.gateway.generation import Completion, GenerationRequest
from penstock.rollout.endpoint import Endpoint
from penstock.rollout.harbor.trial import Agent, Trial, run_trial
from penstock.rollout.isolation import Isolation
from penstock.tasks.harbor import HarborTask, TaskFile

TASKS = Path(__file__).parents[2] / "harbor_tasks"
NAMES = sorted(path.name for path in TASKS.iterdir())


async def no_model(request: GenerationRequest) -> Completion:
    raise EngineError("no model here")


def task(name: str, **changes: Any) -> HarborTask:
    folder = TASKS / name
    return replace(read_task(folder, HarborSpec(path=str(folder))), **changes)


def with_test(given: HarborTask, script: str, **files: str) -> HarborTask:
    """The same task with another verifier."""
    tests = {"test.sh": script, **files}
    return replace(given, tests={path: TaskFile(text=text) for path, text in tests.items()})


async def attempt(given: HarborTask, argv: Sequence[str], isolation: Isolation) -> Trial:
    endpoint = Endpoint(Gateway(no_model))
    agent = Agent(argv=argv, instruction="Do it.", endpoint=endpoint, api_key="key", seed=7)
    serving = asyncio.create_task(endpoint.run())
    try:
        return await run_trial(isolation, given, agent, row_id="row")
    finally:
        await asyncio.sleep(0)  # it closes its sockets once it runs
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def attempt_script(given: HarborTask, script: str) -> Trial:
    return await attempt(given, ["sh", "-c", script], Isolation())
