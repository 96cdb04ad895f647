# SPDX-License-Identifier: Apache-2.0
"""One answer scored by a hostile reward, in the processes that a node has for it."""

from __future__ import annotations

import asyncio

from tests.unit.rollout.fake_dataflow import task

from penstock.rollout.isolation import Isolation
from penstock.rollout.rewards.scorer import Failed, Scorer


async def score_once(reward: str, isolation: Isolation) -> float | Failed:
    """What `module:function` gives, or how it failed; its processes have ended."""
    scorer = Scorer(reward, isolation)
    serving = asyncio.create_task(scorer.run())
    try:
        return await scorer.score("x", task())
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
