# SPDX-License-Identifier: Apache-2.0
"""A policy that gets no batch raises an alarm with the cause: planted faults, real service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog
from benchmarks.local_run import MAX_SLOTS, LocalNode, LocalTrainer, Reward, run_config

from penstock.dataflow.core.leasing import Grant, LiveVersion
from penstock.dataflow.explain.starvation import MIN_GROUPS, NUM_BATCHES
from penstock.dataflow.ledger.recorded import open_recorded_run
from penstock.dataflow.records import FateRecord
from penstock.dataflow.service.build import build
from penstock.dataflow.service.coordinator import DataflowService
from penstock.dataflow.service.operators.status import status
from penstock.types import DropReason, NodeId, Outcome, OutcomeKind, PolicyName, Task, Trajectory

POLICY = PolicyName("policy")
GROUP_SIZE, GROUPS_PER_BATCH = 2, 4
SPREAD = ({"admit": "reward-spread"},)
SELDOM = 12
COMPLETED = Outcome(kind=OutcomeKind.COMPLETED)
MAX_FAILED_GROUPS = 16
"""MIN_ATTEMPTS of the failure limit, in groups of two slots whose first dead slot ends them."""
TRACE = 'File "reward.py", line 3\n' * 20 + "RuntimeError: judge unreachable"

FAILED = Outcome(kind=OutcomeKind.FAILED, reason="reward", detail=TRACE)


def warnings(logs: Sequence[Mapping[str, Any]]) -> list[str]:
    return [line["why"] for line in logs if str(line.get("why", "")).startswith("policy ")]


class PlantedNode(LocalNode):
    """A node whose attempts all end with the same outcome."""

    outcome: Outcome = COMPLETED
    seldom: str = ""
    """A policy that acts only in one of `every` tasks; in none if `every` is 0."""
    every: int = SELDOM

    def _attempt(self, task: Task, grant: Grant) -> Trajectory:
        made = super()._attempt(task, grant)
        if not self.every or task.seed % self.every:
            turns = tuple(turn for turn in made.turns if turn.policy != self.seldom)
            made = replace(made, turns=turns)
        reward = made.reward if self.outcome.has_reward else None
        return replace(made, outcome=self.outcome, reward=reward)

    async def _deliver(self, made: Sequence[Trajectory]) -> None:
        """A member that fails for good ends its group, so later members are not delivered."""
        holds = self.service.partition.holds
        for slot in range(GROUP_SIZE):
            own = [m for m in made if m.slot == slot]
            held = [m for m in own if holds(self.node_id, m.group_id, slot, m.epoch)]
            await super()._deliver(held)


def same(task: Task, grant: Grant, live: Sequence[LiveVersion]) -> float:
    return 0.0


def mixed(task: Task, grant: Grant, live: Sequence[LiveVersion]) -> float:
    return float(grant.slot % 2)


def seldom_mixed(task: Task, grant: Grant, live: Sequence[LiveVersion]) -> float:
    """Dynamic sampling keeps one group of seven."""
    return float(grant.slot % 2) if task.seed % 7 == 0 else 0.0


class Planted:
    """A run of the real service whose node has a fault."""

    max_slots = MAX_SLOTS

    def __init__(
        self,
        folder: Path,
        reward: Reward,
        outcome: Outcome = COMPLETED,
        rules: Sequence[Mapping[str, Any]] = SPREAD,
        policies: Sequence[str] = (POLICY,),
        groups_per_batch: int = GROUPS_PER_BATCH,
        limit: int | None = None,
    ) -> None:
        config = run_config(
            policies=policies,
            rules=rules,
            group_size=GROUP_SIZE,
            groups_per_batch=groups_per_batch,
            max_staleness=1,
        )
        [source] = config.sources
        sources = (source.model_copy(update={"limit": limit}),)
        self.service: DataflowService = build(
            config.model_copy(update={"sources": sources}), folder
        )
        self.trainers = [LocalTrainer(self.service, PolicyName(policy)) for policy in policies]
        self.trainer = self.trainers[-1]
        self.node = PlantedNode(self.service, reward)
        self.node.outcome = outcome

    async def start(self) -> None:
        for trainer in self.trainers:
            await trainer.take_over()
        await self.node.join()

    async def work(self, num_rounds: int) -> None:
        for _ in range(num_rounds):
            await self.node.work(self.max_slots)
            for trainer in self.trainers:
                if await trainer.batch() is not None:
                    await trainer.commit()
            await self.service.tick()

    async def quiet_until(self, number: int) -> None:
        """Train up to version `number`; no alarm may be raised meanwhile."""
        self.max_slots = GROUP_SIZE  # check after every group
        while self.trainer.number < number:
            with structlog.testing.capture_logs() as logs:
                await self.work(1)
            assert (warnings(logs), self.alarms) == ([], ())

    @property
    def alarms(self) -> tuple[str, ...]:
        return status(self.service, "run").alarms


async def alarm(planted: Planted) -> str:
    """The alarm of a run; the log repeats it whenever the number of groups doubles."""
    await planted.start()
    assert planted.alarms == ()
    found = planted.service.coordinator.consumers[POLICY].starvation
    logged: list[str] = []
    while len(logged) < 2:
        with structlog.testing.capture_logs() as logs:
            await planted.work(1)
        logged += warnings(logs)
        assert bool(logged) == bool(planted.alarms) == (found.num_groups >= MIN_GROUPS)
    [text] = planted.alarms
    assert found.num_groups >= 2 * max(NUM_BATCHES * GROUPS_PER_BATCH, MIN_GROUPS)
    assert logged[1] == text and text.startswith(f"policy {POLICY} gets no batch: ")
    planted.service.close()
    return text


async def test_equal_rewards(tmp_path: Path) -> None:
    text = await alarm(Planted(tmp_path, same))
    assert "uniform_reward), 0 of 4 are ready" in text
    assert "all answers in each group earned the same reward (0): check the reward" in text
    assert "penstock explain RUN p0-" in text


async def test_equal_rewards_because_every_answer_is_truncated(tmp_path: Path) -> None:
    cut = Outcome(kind=OutcomeKind.TRUNCATED, reason="length")
    text = await alarm(Planted(tmp_path, same, cut))
    assert (
        "truncated at the limit: answers are never finished, so raise sampling.max_tokens" in text
    )


async def test_answers_that_a_rule_rejects_for_their_length(tmp_path: Path) -> None:
    cut = Outcome(kind=OutcomeKind.TRUNCATED, reason="length")
    text = await alarm(Planted(tmp_path, mixed, cut, rules=({"admit": "overlong"},)))
    assert "overlong), 0 of 4" in text and "raise sampling.max_tokens" in text


async def test_rewards_that_always_fail(tmp_path: Path) -> None:
    """After a first success; a run without any ends before it starves."""
    planted = Planted(tmp_path, mixed)
    await planted.start()
    await planted.quiet_until(1)
    planted.node.outcome = FAILED
    while not planted.alarms:
        await planted.work(1)
    [text] = planted.alarms
    assert "failed_slots), " in text
    assert (
        "last error: failed: reward: RuntimeError: judge unreachable: fix that error first" in text
    )
    assert status(planted.service, "run").failed == ""
    planted.service.close()


async def test_a_run_whose_every_attempt_fails_starts_no_more_work(tmp_path: Path) -> None:
    planted = Planted(tmp_path, mixed, FAILED)
    await planted.start()
    with structlog.testing.capture_logs() as logs:
        while not (why := status(planted.service, "run").failed):
            await planted.work(1)
        issued = planted.service.coordinator.supply.shares()
        await planted.work(20)  # what was issued before may still end
    assert "Most common cause, in " in why and "failed: reward: RuntimeError: judge un" in why
    assert planted.service.coordinator.failure_limit.count.num_groups <= 4 * MAX_FAILED_GROUPS
    assert not planted.service.coordinator.open and issued
    assert [line["event"] for line in logs].count("no new work starts") == 1
    planted.service.close()


async def test_a_run_that_failed_goes_on_when_it_is_started_again(tmp_path: Path) -> None:
    planted = Planted(tmp_path, mixed, FAILED)
    await planted.start()
    while not status(planted.service, "run").failed:
        await planted.work(1)
    planted.service.close()
    resumed = Planted(tmp_path, mixed)
    resumed.node.node_id = NodeId("node-2")
    await resumed.start()
    while resumed.trainer.number < 1:
        await resumed.work(1)
    assert status(resumed.service, "run").failed == ""
    resumed.service.close()


async def test_a_healthy_run_has_no_alarm_and_a_batch_ends_one(tmp_path: Path) -> None:
    planted = Planted(tmp_path, mixed)
    await planted.start()
    while planted.trainer.number <= 2 * MIN_GROUPS // GROUPS_PER_BATCH:
        await planted.work(1)
        assert planted.alarms == ()
    planted.node.reward = same
    while not planted.alarms:
        await planted.work(1)
    planted.node.reward = mixed
    number = planted.trainer.number
    while planted.trainer.number == number:
        await planted.work(1)
    assert planted.alarms == ()
    planted.service.close()


async def test_healthy_dynamic_sampling_has_no_alarm_until_it_starves(tmp_path: Path) -> None:
    planted = Planted(tmp_path, seldom_mixed, groups_per_batch=8)
    await planted.start()
    await planted.quiet_until(8)
    planted.node.reward = same
    while not planted.alarms:
        await planted.work(1)
    found = planted.service.coordinator.consumers[POLICY].starvation
    assert 7 * MIN_GROUPS / 2 < found.num_groups <= 7 * MIN_GROUPS * 2
    planted.service.close()


async def test_a_run_that_breaks_raises_an_alarm_after_a_few_batches_worth(tmp_path: Path) -> None:
    planted = Planted(tmp_path, mixed)
    await planted.start()
    await planted.quiet_until(3)
    planted.node.reward = same
    while not planted.alarms:
        await planted.work(1)
    assert planted.service.coordinator.consumers[POLICY].starvation.num_groups <= 2 * MIN_GROUPS
    planted.service.close()


async def test_groups_in_which_only_others_act_do_not_count(tmp_path: Path) -> None:
    planted = Planted(tmp_path, mixed, policies=("a", "b"))
    planted.node.seldom = "b"
    await planted.start()
    await planted.quiet_until(5)
    planted.service.close()
    recorded = open_recorded_run(tmp_path)
    reasons = {one.reason for one in recorded.coordinator.read(FateRecord) if one.consumer == "b"}
    recorded.close()
    assert DropReason.ABSENT in reasons and DropReason.FAILED_SLOTS not in reasons


async def test_a_policy_that_never_acts_raises_an_alarm(tmp_path: Path) -> None:
    planted = Planted(tmp_path, mixed)
    planted.node.seldom, planted.node.every = POLICY, 0
    await planted.start()
    while not planted.alarms:
        await planted.work(1)
    assert "absent), 0 of 4 are ready; the group has no trainable turn" in planted.alarms[0]
    planted.service.close()


async def test_replayed_groups_count_as_supply(tmp_path: Path) -> None:
    again = {"replay": "uniform", "ratio": 0.7, "max_uses": 100, "max_staleness": 1000}
    planted = Planted(tmp_path, mixed, rules=(*SPREAD, again), groups_per_batch=8)
    await planted.start()
    await planted.quiet_until(6)
    planted.max_slots = 2 * GROUP_SIZE
    planted.node.reward = seldom_mixed
    consumer = planted.service.coordinator.consumers[POLICY]
    while consumer.num_admitted < consumer.num_fresh_needed:
        await planted.node.work(planted.max_slots)
    while consumer.starvation.num_groups < 100 * MIN_GROUPS and await planted.node.work(GROUP_SIZE):
        pass
    assert consumer.num_fresh_needed <= consumer.num_admitted < 8
    assert planted.alarms == ()
    assert await planted.trainer.batch() is not None
    planted.service.close()


async def test_a_run_out_of_tasks_has_ended_without_an_alarm(tmp_path: Path) -> None:
    planted = Planted(tmp_path, same, limit=60)
    await planted.start()
    while not status(planted.service, "run").finished:
        await planted.work(1)
    assert planted.service.coordinator.consumers[POLICY].starvation.num_groups == 60
    assert planted.alarms == ()
    planted.service.close()
