# SPDX-License-Identifier: Apache-2.0
"""Lifecycle of external sessions, with a fake clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.rollout.fake_dataflow import POLICY
from tests.unit.rollout.snapshot_files import write_snapshot

from penstock.errors import BadRequest, Conflict, Unauthorized
from penstock.gateway import online as module
from penstock.gateway.generation import Completion, GenerationRequest
from penstock.gateway.online import EndedSession, OnlineGateway, OnlineSession, SessionTerms, State
from penstock.gateway.renderer import Renderer
from penstock.types import (
    FinishReason,
    RowId,
    SamplingSpec,
    VersionSpan,
    log_probs,
    token_ids,
)
from penstock.wire.auth import Credential

TERMS = SessionTerms(reward_deadline_s=100.0, idle_s=10.0, default_reward=None)


class Engine:
    """Answers one token, when the gate is open."""

    def __init__(self) -> None:
        self.is_asked = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def __call__(self, request: GenerationRequest) -> Completion:
        self.is_asked.set()
        await self.may_answer.wait()
        return Completion(
            sampled_ids=token_ids([1]),
            logprobs=log_probs([0.0]),
            spans=(VersionSpan(start=0, end=1, incarnation=1, number=0),),
            finish=FinishReason.STOP,
        )


class Desk:
    """A gateway with a fake slot source."""

    def __init__(self, folder: Path, terms: SessionTerms = TERMS, num_places: int = 99) -> None:
        self.now = 1000.0
        self.engine = Engine()
        self.num_places = num_places
        self.num_taken = 0
        self.delivered: list[EndedSession] = []
        self.given_back: list[RowId] = []
        self.online = OnlineGateway(
            self.engine,
            self,
            terms,
            self,
            policies=[POLICY],
            sampling=SamplingSpec(),
            clock=lambda: self.now,
        )
        self.online.set_renderer(POLICY, Renderer.load(write_snapshot(folder)))

    def verify(self, token: str) -> Credential:
        raise Unauthorized("not here")

    def watch(self, token: str) -> Callable[[], bool]:
        raise Unauthorized("not here")

    @property
    def num_free(self) -> int:
        return self.num_places - self.num_taken

    def acquire_slot(self) -> RowId | None:
        if self.num_taken == self.num_places:
            return None
        self.num_taken += 1
        return RowId(f"p0-{self.num_taken}.0.1")

    def release_slot(self, row_id: RowId) -> None:
        self.given_back.append(row_id)

    def deliver(self, ended: EndedSession) -> None:
        self.delivered.append(ended)

    async def open_session(self, *, says: bool = True) -> OnlineSession:
        entry = self.online.open_session("owner")
        if says:
            await self.say(entry)
        return entry

    async def say(self, entry: OnlineSession) -> None:
        await self.online.find(entry.api_key).chat([{"role": "user", "content": "ab"}])

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.online.sweep()


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


async def test_idle_sessions_end_and_calls_keep_them_open(desk: Desk) -> None:
    entry = await desk.open_session()
    desk.pass_time(9.0)
    await desk.say(entry)
    desk.pass_time(9.0)
    assert entry.state is State.OPEN
    desk.pass_time(1.0)
    assert entry.state is State.WAITING
    with pytest.raises(Unauthorized):
        await desk.say(entry)
    desk.online.reward(entry, 0.5)
    assert [(e.row_id, e.reward, len(e.turns)) for e in desk.delivered] == [(entry.id, 0.5, 2)]


async def test_a_running_call_is_not_idle(desk: Desk) -> None:
    entry = await desk.open_session(says=False)
    desk.engine.may_answer.clear()
    calling = asyncio.create_task(desk.say(entry))
    await desk.engine.is_asked.wait()
    desk.pass_time(50.0)
    assert entry.state is State.OPEN
    desk.engine.may_answer.set()
    await calling
    desk.pass_time(9.0)
    assert entry.state is State.OPEN


async def test_a_stalled_gateway_extends_all_deadlines(desk: Desk) -> None:
    entry, waiting = await desk.open_session(), await desk.open_session()
    desk.online.end(waiting)
    desk.now += 1_000.0
    desk.online.extend_deadlines(1_000.0)
    desk.pass_time(9.0)
    assert (entry.state, waiting.state) == (State.OPEN, State.WAITING)
    desk.pass_time(1.0)
    assert entry.state is State.WAITING
    fresh = await desk.open_session()
    desk.online.extend_deadlines(1_000.0)
    desk.pass_time(10.0)
    assert fresh.state is State.WAITING, "what began after the stall gains nothing"


async def test_the_deadline_counts_from_the_opening(desk: Desk) -> None:
    entry = await desk.open_session()
    desk.online.end(entry)
    desk.pass_time(99.0)
    assert entry.state is State.WAITING and not desk.delivered
    desk.pass_time(1.0)
    assert entry.state is State.EXPIRED
    assert [ended.reward for ended in desk.delivered] == [None]
    with pytest.raises(Conflict):
        desk.online.reward(entry, 1.0)
    assert len(desk.delivered) == 1
    assert desk.online.counts["expired"] == 1


async def test_sessions_past_the_deadline_continue_unrecorded(desk: Desk) -> None:
    entry = await desk.open_session()
    for _ in range(20):
        desk.pass_time(9.0)
        await desk.say(entry)
    assert entry.state is State.OPEN and not entry.has_slot
    [ended] = desk.delivered
    assert ended.reward is None and len(ended.turns) == 12
    with pytest.raises(Conflict):
        desk.online.reward(entry, 1.0)
    with pytest.raises(Conflict, match="penstock forget"):
        desk.online.forget(entry)


async def test_an_empty_session_returns_its_slot(desk: Desk) -> None:
    entry = await desk.open_session(says=False)
    desk.online.end(entry)
    assert entry.state is State.EMPTY
    assert desk.given_back == [entry.id] and not desk.delivered


async def test_an_undelivered_answer_counts_as_empty(desk: Desk) -> None:
    entry = await desk.open_session()
    assert entry.session is not None
    entry.session.mark_unreached(0)
    with pytest.raises(Conflict):
        desk.online.reward(entry, 1.0)
    assert entry.state is State.EMPTY and not desk.delivered


async def test_without_a_slot_a_reward_has_no_effect(tmp_path: Path) -> None:
    desk = Desk(tmp_path, num_places=0)
    entry = await desk.open_session()
    desk.online.reward(entry, 1.0)
    assert entry.state is State.UNRECORDED and not desk.delivered and not desk.given_back
    assert desk.online.counts == {"opened": 1, "unrecorded": 1}


async def test_forgotten_or_dropped_sessions_are_not_delivered(desk: Desk) -> None:
    forgotten, dropped, open_still = [await desk.open_session() for _ in range(3)]
    desk.online.forget(forgotten)
    desk.online.end(dropped)
    desk.online.on_slot_dropped(RowId(dropped.id))
    desk.online.on_slot_dropped(RowId(open_still.id))
    for entry in (forgotten, dropped):
        with pytest.raises(Conflict):
            desk.online.reward(entry, 1.0)
    await desk.say(open_still)
    desk.online.reward(open_still, 1.0)
    assert open_still.state is State.UNRECORDED
    assert not desk.delivered and desk.given_back == [forgotten.id]


async def test_shutdown_delivers_only_rewarded_sessions(desk: Desk) -> None:
    rewarded, ended, talking = [await desk.open_session() for _ in range(3)]
    desk.online.reward(rewarded, 1.0)
    desk.online.end(ended)
    desk.online.close_all()
    assert [done.row_id for done in desk.delivered] == [rewarded.id]
    assert desk.given_back == [ended.id, talking.id]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2e9])
async def test_a_reward_is_a_number(desk: Desk, value: float) -> None:
    entry = await desk.open_session()
    with pytest.raises(BadRequest):
        desk.online.reward(entry, value)
    assert entry.state is State.OPEN


async def test_memory_of_past_sessions_is_bounded(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_FINISHED", 3)
    sessions = [await desk.open_session() for _ in range(6)]
    for entry in sessions:
        desk.online.reward(entry, 1.0)
        assert entry.session is None and not entry.turns
    known = [entry for entry in sessions if entry is desk.online._entries.get(entry.id)]  # pyright: ignore[reportPrivateUsage]
    assert known == sessions[3:]
    assert len(desk.online._by_name) == 3  # pyright: ignore[reportPrivateUsage]


async def test_a_session_whose_token_was_revoked_is_not_trained(desk: Desk) -> None:
    """Also if it only waits for a reward, and a default is due."""
    is_revoked = False
    entry = desk.online.open_session("owner", "", lambda: is_revoked)
    await desk.say(entry)
    desk.online.end(entry)
    is_revoked = True
    desk.pass_time(1.0)
    assert entry.state is State.DROPPED
    assert (desk.delivered, desk.given_back) == ([], [RowId(entry.id)])
