# SPDX-License-Identifier: Apache-2.0
"""The reward `penstock.scorers.code:reward` on a node: graded in sandboxes, never in a reward
process."""

from __future__ import annotations

import asyncio
import shutil
from typing import Any

import pytest

from penstock.rollout.isolation import Isolation, IsolationSettings
from penstock.rollout.rewards.failed import Failed
from penstock.rollout.rewards.scorer import SourceScorers
from penstock.scorers.code import REWARD, assert_tests
from penstock.types import FailureKind, Task

RIGHT = "```python\ndef add(a, b):\n    return a + b\n```"
TESTS = assert_tests(["assert add(1, 2) == 3"])


def task(**payload: Any) -> Task:
    return Task(key="k", source="programs", ordinal=0, payload=payload, workflow="", seed=0)


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
async def test_a_source_with_this_reward_is_graded() -> None:
    scorer = SourceScorers("", {"programs": REWARD}, Isolation())
    serving = asyncio.create_task(scorer.run())
    try:
        assert await scorer.score(RIGHT, task(tests=TESTS)) == 1.0
        assert await scorer.score(RIGHT.replace("+", "-"), task(tests=TESTS)) == 0.0
        assert await scorer.score("", task(tests=TESTS)) == 0.0
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def test_without_tests_there_is_no_reward() -> None:
    scorer = SourceScorers(REWARD, {}, Isolation())
    for payload in ({"prompt": "?"}, {"tests": "x = 1"}):
        result = await scorer.score(RIGHT, task(**payload))
        assert isinstance(result, Failed) and result.kind is FailureKind.REWARD
        assert "tests" in result.detail and "task k" in result.detail


async def test_a_sandbox_that_fails_is_no_reward() -> None:
    nowhere = Isolation(IsolationSettings(backend="container", image=""))
    result = await SourceScorers(REWARD, {}, nowhere).score(RIGHT, task(tests=TESTS))
    assert isinstance(result, Failed) and result.kind is FailureKind.SANDBOX
