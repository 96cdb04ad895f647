# SPDX-License-Identifier: Apache-2.0
"""Runs that never get a batch say so and why: planted causes, on the real service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog
from benchmarks.local import LocalNode, LocalTrainer, Reward, run_config

from penstock.dataflow.build import build
from penstock.dataflow.protocol import Grant, LiveVersion
from penstock.dataflow.service import Dataflow
from penstock.dataflow.told.fruitless import MIN_GROUPS, NUM_BATCHES
from penstock.dataflow.told.status import status
from penstock.types import Outcome, OutcomeKind, PolicyName, Task, Trajectory

POLICY = PolicyName("policy")
GROUP_SIZE, GROUPS_PER_BATCH = 2, 4
SPREAD = ({"admit": "reward-spread"},)
COMPLETED = Outcome(kind=OutcomeKind.COMPLETED)
TRACE = 'File "reward.py", line 3\n' * 20 + "RuntimeError: judge unreachable"


class PlantedNode(LocalNode):
    """Every attempt of it ends so."""

    outcome: Outcome = COMPLETED

    def _attempt(self, task: Task, grant: Grant) -> Trajectory:
        made = super()._attempt(task, grant)
        reward = made.reward if self.outcome.has_reward else None
        return replace(made, outcome=self.outcome, reward=reward)

    async def _deliver(self, made: Sequence[Trajectory]) -> None:
        """One member that failed for good ends its group: another one would be late."""
        holds = self.service.partition.holds
        for slot in range(GROUP_SIZE):
            own = [m for m in made if m.slot == slot]
            held = [m for m in own if holds(self.node_id, m.group_id, slot, m.epoch)]
            await super()._deliver(held)


def same(task: Task, grant: Grant, live: Sequence[LiveVersion]) -> float:
    return 0.0


def told_apart(task: Task, grant: Grant, live: Sequence[LiveVersion]) -> float:
    return float(grant.slot % 2)


class Planted:
    """A run of the real service whose node has a fault."""

    def __init__(
        self,
        folder: Path,
        reward: Reward,
        outcome: Outcome = COMPLETED,
        rules: Sequence[Mapping[str, Any]] = SPREAD,
    ) -> None:
        config = run_config(
            rules=rules, group_size=GROUP_SIZE, groups_per_batch=GROUPS_PER_BATCH, max_staleness=1
        )
        self.service: Dataflow = build(config, folder)
        self.trainer = LocalTrainer(self.service, POLICY)
        self.node = PlantedNode(self.service, reward)
        self.node.outcome = outcome

    async def start(self) -> None:
        await self.trainer.take_over()
        await self.node.join()

    async def work(self, num_rounds: int) -> None:
        for _ in range(num_rounds):
            await self.node.work()
            if await self.trainer.batch() is not None:
                await self.trainer.commit()
            await self.service.tick()

    @property
    def alarms(self) -> tuple[str, ...]:
        return status(self.service, "run").alarms


async def alarm(planted: Planted) -> str:
    """What is told in the end; the log tells the same, at each doubling."""
    await planted.start()
    assert planted.alarms == ()
    told: list[str] = []
    while len(told) < 2:
        with structlog.testing.capture_logs() as logs:
            await planted.work(1)
        told += [line["why"] for line in logs if line["event"] == "no batch is sealed"]
        assert bool(told) == bool(planted.alarms)
    [text] = planted.alarms
    found = planted.service.home.consumers[POLICY].fruitless
    assert found.num_groups >= 2 * max(NUM_BATCHES * GROUPS_PER_BATCH, MIN_GROUPS)
    assert told[1] == text and text.startswith(f"policy {POLICY} gets no batch: ")
    planted.service.close()
    return text


async def test_equal_rewards(tmp_path: Path) -> None:
    text = await alarm(Planted(tmp_path, same))
    assert "uniform_reward), 0 of 4 are ready" in text
    assert "all answers earned the same (0): check the reward" in text
    assert "penstock explain RUN p0-" in text


async def test_equal_rewards_because_every_answer_is_cut(tmp_path: Path) -> None:
    cut = Outcome(kind=OutcomeKind.TRUNCATED, reason="length")
    text = await alarm(Planted(tmp_path, same, cut))
    assert "cut at their limit: no answer is finished: raise sampling.max_tokens" in text


async def test_answers_that_a_rule_refuses_for_their_length(tmp_path: Path) -> None:
    cut = Outcome(kind=OutcomeKind.TRUNCATED, reason="length")
    text = await alarm(Planted(tmp_path, told_apart, cut, rules=({"admit": "overlong"},)))
    assert "overlong), 0 of 4" in text and "raise sampling.max_tokens" in text


async def test_rewards_that_always_fail(tmp_path: Path) -> None:
    failed = Outcome(kind=OutcomeKind.FAILED, reason="reward", detail=TRACE)
    text = await alarm(Planted(tmp_path, told_apart, failed))
    assert "failed_slots), 0 of 4" in text
    assert "the last: failed: reward: RuntimeError: judge unreachable: mend that first" in text


async def test_a_healthy_run_says_nothing_and_a_batch_ends_the_alarm(tmp_path: Path) -> None:
    planted = Planted(tmp_path, told_apart)
    await planted.start()
    while planted.trainer.number <= 2 * MIN_GROUPS // GROUPS_PER_BATCH:
        await planted.work(1)
        assert planted.alarms == ()
    planted.node.reward = same
    while not planted.alarms:
        await planted.work(1)
    planted.node.reward = told_apart
    number = planted.trainer.number
    while planted.trainer.number == number:
        await planted.work(1)
    assert planted.alarms == ()
    planted.service.close()
