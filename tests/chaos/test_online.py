# SPDX-License-Identifier: Apache-2.0
"""Agents from outside while a run trains: the service never stops, late rewards are trained or
counted, and nothing without a reward is.

Under a minute in CI, ten in a full campaign: PENSTOCK_ONLINE_S."""

from __future__ import annotations

import asyncio
import os
import random
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import pytest
from tests.chaos.results_table import begin
from tests.contract.dataflow_server import POLICY
from tests.contract.online_gateway import Agent, OnlineHarness, session_config, world

from penstock.dataflow.service.trainers.messages import CommitRequest

DURATION_S = float(os.environ.get("PENSTOCK_ONLINE_S", "2"))
AGENTS = 8
IDLE_S = 2.0
DEADLINE_S = 3.0

pytestmark = [pytest.mark.chaos, pytest.mark.alone, pytest.mark.timeout(1800 + 3 * DURATION_S)]


@dataclass(slots=True)
class Seen:
    rewarded: dict[str, float] = field(default_factory=dict[str, float])
    """Rewards that were accepted, by session."""
    unrewarded: set[str] = field(default_factory=set[str])
    trained: dict[str, float] = field(default_factory=dict[str, float])
    trained_twice: list[str] = field(default_factory=list[str])
    errors: list[str] = field(default_factory=list[str])
    num_answers: int = 0
    num_late: int = 0
    """Rewards that came too late, and were told so."""
    longest_s: float = 0.0
    """Of one call."""


async def live(made: OnlineHarness, seen: Seen, draw: random.Random, until: float) -> None:
    while time.monotonic() < until:
        try:
            agent = await made.open()
            for _ in range(draw.randint(1, 3)):
                began = time.monotonic()
                answer = await agent.say("ab")
                seen.longest_s = max(seen.longest_s, time.monotonic() - began)
                seen.num_answers += 1
                if answer != "ba":
                    seen.errors.append(f"{agent.id} heard {answer!r}")
            await finish(agent, seen, draw)
        except (AssertionError, httpx2.HTTPError) as error:
            seen.errors.append(f"{type(error).__name__}: {error}")


async def finish(agent: Agent, seen: Seen, draw: random.Random) -> None:
    """Rewarded at once, late, too late, or never."""
    wait_s = draw.choice([0.0, 0.0, 0.1, 0.4, 1.5 * DEADLINE_S, None])
    if wait_s is None:
        seen.unrewarded.add(agent.id)
        return
    await asyncio.sleep(wait_s)
    reward = round(draw.random(), 3)
    answer = await agent.tell("reward", {"reward": reward})
    if answer.status_code == 409:
        seen.num_late += 1
        seen.unrewarded.add(agent.id)
    elif answer.status_code != 200:
        seen.errors.append(answer.text)
    elif agent.is_recorded and answer.json()["state"] == "rewarded":
        seen.rewarded[agent.id] = reward


async def train(made: OnlineHarness, seen: Seen) -> None:
    """Each batch changes the version that the gateway serves."""
    trainer = made.trainer
    while True:
        manifest = await made.seal(wait_s=1.0)
        if manifest is None:
            continue
        for row in manifest.rows:
            if row.row_id in seen.trained:
                seen.trained_twice.append(row.row_id)
            seen.trained[row.row_id] = row.score
        trainer.seq, trainer.number = trainer.seq + 1, trainer.number + 1
        commit = CommitRequest(incarnation=trainer.incarnation, number=trainer.number)
        await asyncio.to_thread(trainer.client.commit, POLICY, trainer.seq, commit)
        await asyncio.to_thread(trainer.publish)


async def test_agents_from_outside_during_training(tmp_path: Path) -> None:
    figures, seen = begin("online sessions"), Seen()
    config = session_config(
        groups_per_batch=4,
        steps=1_000_000,
        max_staleness=8,
        idle_s=IDLE_S,
        reward_deadline_s=DEADLINE_S,
    )
    async with world(tmp_path, config, slot_pool_size=16) as made:
        training = asyncio.create_task(train(made, seen))
        until = time.monotonic() + DURATION_S
        await asyncio.gather(
            *(live(made, seen, random.Random(number), until) for number in range(AGENTS))
        )
        await asyncio.sleep(2 * DEADLINE_S)  # what nobody rewards expires
        await made.delivered()
        training.cancel()
        with suppress(asyncio.CancelledError):
            await training
        counts = made.counts
        status = await asyncio.to_thread(made.running.reader().status)
    figures.trials = counts["opened"]
    figures.acknowledged = seen.num_answers
    figures.lost += seen.errors
    figures.trained_twice += seen.trained_twice
    figures.lost += [
        f"{row_id} was trained with {reward}, its reward is {seen.rewarded.get(row_id)}"
        for row_id, reward in seen.trained.items()
        if seen.rewarded.get(row_id) != reward or row_id in seen.unrewarded
    ]
    figures.note = (
        f"{made.trainer.number} versions, {len(seen.trained)} sessions trained, "
        f"{counts.get('expired', 0)} expired, {counts.get('unrecorded', 0)} unrecorded, "
        f"{seen.num_late} rewards too late, longest call {1000 * seen.longest_s:.0f} ms, "
        f"waste {dict(status.wasted_tokens)}"
    )
    figures.require_clean()
    assert made.trainer.number >= 2 and counts.get("expired", 0) >= 1 and seen.trained
