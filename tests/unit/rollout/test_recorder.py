# SPDX-License-Identifier: Apache-2.0
"""A retried attempt continues from the turns that the lost one recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.rollout.fake_dataflow import POLICY, facts, task
from tests.unit.rollout.polling import eventually
from tests.unit.rollout.test_attempt import GRANT

from penstock.dataflow.core.leasing import Grant
from penstock.dataflow.service.nodes.messages import RecordRequest
from penstock.gateway.gateway import Gateway
from penstock.gateway.generation import Completion, GenerationRequest
from penstock.gateway.renderer import Renderer
from penstock.rollout import recorder as module
from penstock.rollout.attempt import AttemptRunner
from penstock.rollout.endpoint import Endpoint
from penstock.rollout.engines.scripted import ScriptedEngine
from penstock.rollout.recorder import Recorder
from penstock.types import (
    ExpertChoices,
    FinishReason,
    GroupId,
    NodeId,
    RowId,
    SamplingSpec,
    Trajectory,
    Turn,
    Version,
    log_probs,
    token_ids,
    view_ids,
)

TEN_TURNS = "tests.unit.rollout.user_workflows:ten_turns"
NODE = NodeId("n")


class Kept:
    """A dataflow that keeps the turns of one slot."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.num_reused = 0

    async def record(self, body: RecordRequest) -> None:
        for told in body.turns:
            assert told.row_id.startswith("p0-7.2.")
            if told.index == len(self.turns):
                self.turns.append(told.turn)
            self.num_reused += told.is_reused

    async def recorded(self, node_id: NodeId, row_id: RowId, secret: str) -> tuple[Turn, ...]:
        return tuple(self.turns)


class Counting:
    """Samples different tokens at each call, and hangs from a given call on."""

    def __init__(self, hangs_at: int = 1000) -> None:
        self.num_calls = 0
        self.hangs_at = hangs_at
        self._engine = ScriptedEngine(lambda _, spec: [spec.seed % 7, self.num_calls % 9, 3])

    async def load(self, snapshot: Path) -> None:
        await self._engine.load(snapshot, Version(policy=POLICY, incarnation=1, number=0))

    async def __call__(self, request: GenerationRequest) -> Completion:
        self.num_calls += 1
        if self.num_calls >= self.hangs_at:
            await asyncio.sleep(1000)
        return await self._engine(request)


async def attempt(
    snapshot: Path, kept: Kept, engine: Counting, grant: Grant, *, until: int | None = None
) -> Trajectory | None:
    """One attempt by a node; the node is lost once `until` turns were recorded."""
    await engine.load(snapshot)
    gateway = Gateway(engine)
    gateway.set_renderer(POLICY, Renderer.load(snapshot))
    recorder = Recorder(kept, NODE)
    run_info = facts(workflow=TEN_TURNS, sampling=SamplingSpec(max_tokens=3))
    attempts = AttemptRunner(gateway, Endpoint(gateway), recorder, None, run_info, NODE)
    recording = asyncio.create_task(recorder.run())
    running = asyncio.create_task(attempts.run(grant, task()))
    try:
        if until is None:
            return await asyncio.wait_for(running, 60)
        await eventually(lambda: len(kept.turns) >= until)
        return None
    finally:
        running.cancel()
        recording.cancel()
        await asyncio.gather(running, recording, return_exceptions=True)


def sampled(turns: Sequence[Turn]) -> list[list[int]]:
    return [view_ids(turn.sampled_ids).tolist() for turn in turns]


async def test_only_the_unfinished_turn_is_generated_again(
    snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RECORD_S", 0.01)
    kept = Kept()
    await attempt(snapshot, kept, Counting(hangs_at=8), GRANT, until=7)
    lost = list(kept.turns)
    again = Grant(group_id=GroupId("p0-7"), slot=2, epoch=4, attempt=2, task=0, seed=11,
                  num_recorded=7)  # fmt: skip
    kept.turns.clear()
    kept.turns += lost
    engine = Counting()
    row = await attempt(snapshot, kept, engine, again)
    assert row is not None and len(row.turns) == 10
    assert engine.num_calls == 3
    assert sampled(row.turns[:7]) == sampled(lost)
    same = [index for index in range(10) if row.turns[index].parent == -1]
    assert len(same) == 3 and len({row.turns[i].prompt_ids for i in same[1:]}) == 1
    assert len({row.turns[i].sampled_ids for i in same[1:]}) == 2, "equal calls, two samples"


async def test_an_attempt_that_ends_soon_is_only_delivered(snapshot: Path) -> None:
    kept = Kept()
    row = await attempt(snapshot, kept, Counting(), GRANT)
    assert row is not None and len(row.turns) == 10
    assert not kept.turns


def empty_turn() -> Turn:
    return Turn(
        policy=POLICY,
        parent=-1,
        prompt_ids=token_ids([1]),
        sampled_ids=token_ids([]),
        logprobs=log_probs([]),
        spans=(),
        sampling=SamplingSpec(),
        finish=FinishReason.STOP,
    )


async def test_a_turn_is_sent_once_it_has_waited_and_never_after_its_attempt() -> None:
    recorder = Recorder(Kept(), NODE)
    turn = empty_turn()
    async with recorder.track(GRANT) as (_, on_turn):
        on_turn(0, turn, False)
        assert not recorder.take()
        on_turn(1, turn, False)
        assert [sent.index for sent in recorder.take()] == [0]
    assert not recorder.take()


LONG = {
    "ids": replace(empty_turn(), prompt_ids=token_ids([1] * 250)),
    "schema": replace(empty_turn(), sampling=SamplingSpec(json_schema="x" * 1000)),
    "stop strings": replace(empty_turn(), sampling=SamplingSpec(stop=("x" * 250,) * 4)),
    "experts": replace(
        empty_turn(),
        experts=ExpertChoices(num_layers=2, num_chosen=5, num_experts=9, choices=b"0" * 1000),
    ),
}


@pytest.mark.parametrize("kind", LONG)
async def test_calls_are_bounded_by_all_that_turns_have(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 10_000)
    recorder = Recorder(Kept(), NODE)
    async with recorder.track(GRANT) as (_, on_turn):
        for index in range(40):
            on_turn(index, LONG[kind], False)
        assert not recorder.take()
        first, second = recorder.take(), recorder.take()
    assert 5 <= len(first) <= 11
    assert [sent.index for sent in (*first, *second)] == [*range(len(first) + len(second))]
