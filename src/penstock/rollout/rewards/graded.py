# SPDX-License-Identifier: Apache-2.0
"""The reward of the scorer `code`, on a node: hidden tests against the program in a completion.

Owns how many are graded at once. Solution and tests run in separate sandboxes, with the grants of
`sandbox.tools`: never in a reward process, where the program could reach its secrets or forge its
result. A sandbox that fails is a failure, never a reward."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from penstock.errors import ConfigError, SandboxError
from penstock.rollout.isolation import Isolation
from penstock.rollout.rewards.failed import Failed
from penstock.rollout.tool_sandbox import grade_solution
from penstock.rollout.user_errors import shorten
from penstock.scorers.code import program_of, solution_source, test_ids
from penstock.types import FailureKind, Task


class GradedScorer:
    """Scores 1.0 if all tests of the task pass, else 0.0."""

    def __init__(self, isolation: Isolation) -> None:
        self._isolation = isolation
        self._turn = asyncio.Semaphore(os.cpu_count() or 1)

    async def score(self, completion: str, task: Task) -> float | Failed:
        where = f"scorer code, task {task.key}"
        try:
            source = await asyncio.to_thread(solution_of, completion, task.payload)
            tests = tests_of(task.payload)
            ids = test_ids(tests)
        except ConfigError as error:
            return Failed(kind=FailureKind.REWARD, detail=shorten(f"{where}: {error}"))
        if not source:
            return 0.0
        try:
            async with self._turn:
                verdict = await grade_solution(self._isolation, source, tests, ids=ids)
        except SandboxError as error:
            return Failed(kind=FailureKind.SANDBOX, detail=shorten(f"{where}: {error}"))
        return float(verdict.is_pass)

    async def run(self) -> None:
        """It has no process to serve."""


def solution_of(completion: str, payload: dict[str, Any]) -> str:
    """Source of the solution; empty if there is no program in the completion."""
    entry_point, starter = payload.get("entry_point") or "", payload.get("starter") or ""
    return solution_source(program_of(completion, entry_point=entry_point, starter=starter))


def tests_of(payload: dict[str, Any]) -> str:
    tests = payload.get("tests")
    if not isinstance(tests, str) or not tests.strip():
        raise ConfigError(
            f"the task has no text in the column `tests`, only {', '.join(payload) or 'nothing'}; "
            "add Python functions test_NAME(solution) to each task"
        )
    return tests
