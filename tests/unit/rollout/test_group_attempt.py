# SPDX-License-Identifier: Apache-2.0
"""Slots of one group attempted together give the rows that each gives alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.rollout.fake_dataflow import POLICY, facts, task
from tests.unit.rollout.test_attempt import NoTurns, loaded_engine

from penstock.dataflow.core.leasing import Grant
from penstock.errors import EngineError, RequestRejected
from penstock.gateway.gateway import Gateway
from penstock.gateway.generation import Completion, Generate, GenerationRequest
from penstock.gateway.renderer import Renderer
from penstock.rollout.attempt import AttemptRunner
from penstock.rollout.endpoint import Endpoint
from penstock.rollout.engine import AnswerLost, SpanLog
from penstock.rollout.engine_pool import EnginePools
from penstock.rollout.engines.scripted import ScriptedEngine
from penstock.rollout.group_attempt import GroupRunner
from penstock.rollout.isolation import Isolation
from penstock.rollout.recorder import Recorder
from penstock.rollout.rewards.scorer import SourceScorers
from penstock.types import (
    FailureKind,
    FinishReason,
    GroupId,
    NodeId,
    OutcomeKind,
    SamplingSpec,
    Task,
    Trajectory,
    Version,
    view_ids,
)
from penstock.wire.codec import encode

VERSION = Version(policy=POLICY, incarnation=1, number=0)
GRANTS = [
    Grant(group_id=GroupId("p0-7"), slot=slot, epoch=3, attempt=1, task=0, seed=100 + slot)
    for slot in range(6)
]


async def attempts(
    snapshot: Path,
    generate: Generate,
    *,
    together: bool = True,
    given: Task | None = None,
    start_to_close_s: float = 60.0,
    reward: str = "penstock.tasks.reverse:reward",
) -> list[Trajectory]:
    run_info = facts(sampling=SamplingSpec(max_tokens=3), start_to_close_s=start_to_close_s)
    scorer = SourceScorers(reward, {}, Isolation())
    gateway = Gateway(generate)
    gateway.set_renderer(POLICY, Renderer.load(snapshot))
    recorder = Recorder(NoTurns(), NodeId("n"))
    single = AttemptRunner(gateway, Endpoint(gateway), recorder, scorer, run_info, NodeId("n"))
    runner = GroupRunner(single, gateway, scorer, run_info)
    rows: list[Trajectory] = []
    found = given or task()
    assert all(runner.runs_together(grant, found) for grant in GRANTS)
    scoring = asyncio.create_task(scorer.run())
    try:
        if together:
            running = runner.run_together(GRANTS, found, lambda grant, row: rows.append(row))
            await asyncio.wait_for(running, 60)
        else:
            alone = asyncio.gather(*(runner.run(grant, found) for grant in GRANTS))
            rows += await asyncio.wait_for(alone, 60)
    finally:
        scoring.cancel()
        await asyncio.gather(scoring, return_exceptions=True)
    return sorted(rows, key=lambda row: row.slot)


def bits(rows: Sequence[Trajectory]) -> list[bytes]:
    """All but the times."""
    still = {"started_at": 0.0, "ended_at": 0.0}
    return [
        encode(replace(row, **still, turns=tuple(replace(turn, **still) for turn in row.turns)))
        for row in rows
    ]


async def test_rows_are_those_of_attempts_alone_byte_for_byte(snapshot: Path) -> None:
    engine = await loaded_engine(snapshot)
    rows = await attempts(snapshot, engine)
    assert [row.slot for row in rows] == list(range(6)) and {row.reward for row in rows} == {1.0}
    assert bits(rows) == bits(await attempts(snapshot, engine, together=False))


async def test_rows_of_a_model_are_those_of_attempts_alone_byte_for_byte(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from penstock.rollout.engines.hf import HfEngine
    from penstock.trainer.model_folders import init_model

    init_model("builtin:tiny-qwen3", folder := tmp_path / "model", seed=5)
    pools = EnginePools((POLICY,), HfEngine)
    await pools.load(folder, VERSION)
    try:
        rows = await attempts(folder, pools)
        assert len({turn.sampled_ids for row in rows for turn in row.turns}) > 1
        assert bits(rows) == bits(await attempts(folder, pools, together=False))
    finally:
        await pools.close()


class Unsteady(ScriptedEngine):
    """Its started answers end as told; calls are answered."""

    returns_lost = True

    def __init__(self, ends: Sequence[EngineError | None]) -> None:
        super().__init__()
        self.ends = list(ends)
        self.calls: list[GenerationRequest] = []
        self.started: list[asyncio.Future[Completion]] = []

    async def __call__(self, request: GenerationRequest) -> Completion:
        self.calls.append(request)
        return await super().__call__(request)

    def start(self, request: GenerationRequest) -> asyncio.Future[Completion]:
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.started.append(future)
        if self.ends and (error := self.ends.pop(0)) is not None:
            future.set_exception(error)
        return future


def lost(num_tokens: int) -> AnswerLost:
    ids, spans = [65] * num_tokens, SpanLog(VERSION)
    return AnswerLost("gone", spans.complete(ids, [-1.0] * num_tokens, FinishReason.ABORT))


async def pools_of(engine: ScriptedEngine, snapshot: Path) -> EnginePools:
    pools = EnginePools((POLICY,), lambda: engine)
    await pools.load(snapshot, VERSION)
    return pools


async def test_an_answer_that_its_engine_loses_goes_on_from_its_tokens(snapshot: Path) -> None:
    engine = Unsteady([lost(2) for _ in GRANTS])
    rows = await attempts(snapshot, await pools_of(engine, snapshot))
    assert [view_ids(row.turns[0].sampled_ids).tolist()[:2] for row in rows] == [[65, 65]] * 6
    assert {len(view_ids(row.turns[0].sampled_ids)) for row in rows} == {3}
    assert [request.sampling.max_tokens for request in engine.calls] == [1] * 6


async def test_a_refused_call_fails_its_slot_alone(snapshot: Path) -> None:
    engine = Unsteady([lost(1), RequestRejected("too much"), *([lost(1)] * 4)])
    rows = await attempts(snapshot, await pools_of(engine, snapshot))
    assert [row.outcome.reason for row in rows if row.reward is None] == [FailureKind.ENGINE]
    assert rows[1].outcome.detail.endswith("too much")


async def test_slots_without_an_answer_at_the_time_limit_fail(snapshot: Path) -> None:
    engine = Unsteady([lost(1)])
    rows = await attempts(snapshot, await pools_of(engine, snapshot), start_to_close_s=1.0)
    assert [row.outcome.reason for row in rows] == ["length"] + [FailureKind.DEADLINE] * 5
    assert all(future.cancelled() for future in engine.started[1:])


async def test_a_task_that_cannot_be_asked_fails_as_alone(snapshot: Path) -> None:
    engine, bad = await loaded_engine(snapshot), replace(task(), payload={"answer": "x"})
    rows = await attempts(snapshot, engine, given=bad)
    assert bits(rows) == bits(await attempts(snapshot, engine, together=False, given=bad))
    assert {row.outcome.kind for row in rows} == {OutcomeKind.FAILED}


async def test_a_reward_that_fails_is_no_reward(snapshot: Path) -> None:
    engine = await loaded_engine(snapshot)
    reward = "tests.unit.rollout.test_group_attempt:never"
    rows = await attempts(snapshot, engine, reward=reward)
    assert [row.reward for row in rows] == [None] * 6
    assert {row.outcome.reason for row in rows} == {FailureKind.REWARD}


def never(completions: Sequence[str], **_: object) -> list[float]:
    raise RuntimeError("no")


async def test_an_answer_without_a_text_fails_its_slot_alone(snapshot: Path) -> None:
    async def generate(request: GenerationRequest) -> Completion:
        ids = [-5] if request.sampling.seed % 2 else [65]
        return SpanLog(VERSION).complete(ids, [-1.0], FinishReason.STOP)

    rows = await attempts(snapshot, generate)
    assert bits(rows) == bits(await attempts(snapshot, generate, together=False))
    assert {row.outcome.kind for row in rows} == {OutcomeKind.FAILED, OutcomeKind.COMPLETED}
