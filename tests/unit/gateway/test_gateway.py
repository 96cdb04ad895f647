# SPDX-License-Identifier: Apache-2.0
"""Recording of a session's calls."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.unit.gateway.chatml import AB, END_ID, ids_of, write_snapshot

from penstock.errors import BadRequest, EngineError, NotFound, Unauthorized
from penstock.gateway.gateway import Gateway, Session
from penstock.gateway.generation import Completion, GenerationRequest
from penstock.gateway.renderer import Renderer
from penstock.types import (
    FinishReason,
    JsonObject,
    PolicyName,
    SamplingSpec,
    VersionSpan,
    log_probs,
    token_ids,
    view_ids,
    view_log_probs,
)

SOLVER, JUDGE = PolicyName("solver"), PolicyName("judge")


class FakeEngine:
    """Answers from a list and records its requests."""

    def __init__(self, *answers: Sequence[int], finish: FinishReason = FinishReason.STOP) -> None:
        self.answers = list(answers)
        self.finish = finish
        self.prompts: list[list[int]] = []
        self.specs: list[SamplingSpec] = []
        self.policies: list[PolicyName] = []

    async def __call__(self, request: GenerationRequest) -> Completion:
        self.prompts.append(list(request.prompt_ids))
        self.specs.append(request.sampling)
        self.policies.append(request.policy)
        await asyncio.sleep(0)
        if not self.answers:
            raise EngineError("no answer left")
        ids = self.answers.pop(0)
        return Completion(
            sampled_ids=token_ids(ids),
            logprobs=log_probs([-0.5] * len(ids)),
            spans=(VersionSpan(start=0, end=len(ids), incarnation=1, number=7),),
            finish=self.finish,
        )


@pytest.fixture
def renderer(tmp_path: Path) -> Renderer:
    return Renderer.load(write_snapshot(tmp_path))


def open_session(engine: FakeEngine, renderer: Renderer, *, seed: int = 1) -> Session:
    gateway = Gateway(engine)
    gateway.set_renderer(SOLVER, renderer)
    gateway.set_renderer(JUDGE, renderer)
    sampling = SamplingSpec(max_tokens=8)
    return gateway.open(policies=[SOLVER, JUDGE], sampling=sampling, seed=seed)


def user(text: str) -> JsonObject:
    return {"role": "user", "content": text}


def assistant(text: str) -> JsonObject:
    return {"role": "assistant", "content": text}


async def test_one_call_is_one_turn(renderer: Renderer) -> None:
    engine = FakeEngine([*ids_of("abc"), END_ID])
    session = open_session(engine, renderer)
    answer = await session.chat([user("hi")])
    (turn,) = session.turns()
    assert answer.text == "abc"
    assert (answer.turn, answer.finish) == (0, FinishReason.STOP)
    assert answer.usage.completion_tokens == 4
    assert answer.usage.prompt_tokens == len(engine.prompts[0])
    assert list(view_ids(turn.prompt_ids)) == engine.prompts[0]
    assert list(view_ids(turn.sampled_ids)) == [*ids_of("abc"), END_ID]
    assert list(view_log_probs(turn.logprobs)) == [-0.5] * 4
    assert turn.spans[0].number == 7
    assert turn.parent == -1
    assert turn.policy == SOLVER
    assert turn.sampling == engine.specs[0]
    assert turn.reached_agent
    assert 0 < turn.started_at <= turn.ended_at


async def test_the_next_call_extends_the_turn_with_its_sampled_ids(renderer: Renderer) -> None:
    sampled = [*ids_of("abc"), END_ID]
    assert renderer.encode("abc") != tuple(ids_of("abc")), "tokenised anew it would be other ids"
    engine = FakeEngine(sampled, ids_of("d"))
    session = open_session(engine, renderer)
    first = await session.chat([user("hi")])
    await session.chat([user("hi"), assistant(first.text), user("and")])
    one, two = session.turns()
    assert two.parent == 0
    rest = renderer.encode("\n<|im_start|>user\nand<|im_end|>\n<|im_start|>assistant\n")
    assert tuple(view_ids(two.prompt_ids)) == rest
    assert engine.prompts[1] == [*view_ids(one.prompt_ids), *sampled, *rest]


async def test_an_answer_cut_by_length_is_extended_too(renderer: Renderer) -> None:
    engine = FakeEngine(ids_of("abc"), ids_of("d"), finish=FinishReason.LENGTH)
    session = open_session(engine, renderer)
    await session.chat([user("hi")])
    await session.chat([user("hi"), assistant("abc"), user("x")])
    two = session.turns()[1]
    assert two.parent == 0
    assert view_ids(two.prompt_ids)[0] == END_ID, "the template closed the answer"


async def test_rewritten_history_starts_a_branch(renderer: Renderer) -> None:
    engine = FakeEngine([*ids_of("abc"), END_ID], ids_of("d"))
    session = open_session(engine, renderer)
    await session.chat([user("hi")])
    await session.chat([user("hi"), assistant("abx"), user("x")])
    two = session.turns()[1]
    assert two.parent == -1
    assert list(view_ids(two.prompt_ids)) == engine.prompts[1]
    assert AB in engine.prompts[1], "text nobody sampled is tokenised as text"


async def test_the_longest_context_wins_and_branches_share_it(renderer: Renderer) -> None:
    end = [END_ID]
    engine = FakeEngine(*([*ids_of(letter), *end] for letter in "abcd"))
    session = open_session(engine, renderer)
    await session.chat([user("q")])
    await session.chat([user("q"), assistant("a"), user("r")])
    await session.chat([user("q"), assistant("a"), user("r"), assistant("b"), user("s")])
    await session.chat([user("q"), assistant("a"), user("t")])
    assert [turn.parent for turn in session.turns()] == [-1, 0, 1, 0]


async def test_equal_answers_extend_the_newest(renderer: Renderer) -> None:
    engine = FakeEngine(ids_of("ab"), [AB], ids_of("c"))
    session = open_session(engine, renderer)
    await asyncio.gather(session.chat([user("q")]), session.chat([user("q")]))
    await session.chat([user("q"), assistant("ab"), user("r")])
    assert [turn.parent for turn in session.turns()] == [-1, -1, 1]


async def test_other_policies_and_unreached_answers_are_never_extended(renderer: Renderer) -> None:
    engine = FakeEngine(*([*ids_of("a"), END_ID] for _ in range(4)))
    session = open_session(engine, renderer)
    await session.chat([user("q")])
    await session.chat([user("q"), assistant("a"), user("r")], policy=JUDGE)
    session.mark_unreached(0)
    await session.chat([user("q"), assistant("a"), user("r")])
    turns = session.turns()
    assert [turn.parent for turn in turns] == [-1, -1, -1]
    assert [turn.policy for turn in turns] == [SOLVER, JUDGE, SOLVER]
    assert [turn.reached_agent for turn in turns] == [False, True, True]


async def test_seeds_follow_slot_and_ordinal(renderer: Renderer) -> None:
    seeds: list[list[int]] = []
    for slot_seed in (1, 1, 2):
        engine = FakeEngine(*[ids_of("a")] * 3)
        session = open_session(engine, renderer, seed=slot_seed)
        for _ in range(3):
            await session.chat([user("q")])
        seeds.append([spec.seed for spec in engine.specs])
    assert seeds[0] == seeds[1]
    assert len({*seeds[0], *seeds[2]}) == 6
    assert all(0 <= seed < 1 << 63 for seed in seeds[0] + seeds[2])


async def test_overrides_reach_the_engine_and_the_record(renderer: Renderer) -> None:
    engine = FakeEngine(ids_of("a"))
    session = open_session(engine, renderer)
    await session.chat(
        [user("q")], temperature=0.5, top_p=0.9, max_tokens=3, seed=42, stop="x", user="nobody"
    )
    expected = SamplingSpec(temperature=0.5, top_p=0.9, max_tokens=3, seed=42, stop=("x",))
    assert engine.specs == [expected]
    assert session.turns()[0].sampling == expected


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"temperature": "hot"},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"max_tokens": 0},
        {"max_tokens": 10**9},
        {"seed": 1 << 64},
        {"stop": [""]},
        {"stop": ["x"] * 17},
    ],
)
async def test_impossible_sampling_is_refused(renderer: Renderer, bad: dict[str, Any]) -> None:
    session = open_session(FakeEngine(ids_of("a")), renderer)
    with pytest.raises(BadRequest):
        await session.chat([user("q")], **bad)
    assert session.turns() == ()


async def test_a_stop_string_is_hidden_but_its_tokens_stay(renderer: Renderer) -> None:
    session = open_session(FakeEngine(ids_of("yes!no")), renderer)
    answer = await session.chat([user("q")], stop=["zz", "!"])
    assert answer.text == "yes"
    assert list(view_ids(session.turns()[0].sampled_ids)) == ids_of("yes!no")


async def test_an_aborted_answer_is_kept_and_raised(renderer: Renderer) -> None:
    session = open_session(FakeEngine(ids_of("a"), finish=FinishReason.ABORT), renderer)
    with pytest.raises(EngineError, match="engine aborted"):
        await session.chat([user("q")])
    (turn,) = session.turns()
    assert not turn.reached_agent


async def test_an_engine_error_records_nothing(renderer: Renderer) -> None:
    session = open_session(FakeEngine(), renderer)
    with pytest.raises(EngineError):
        await session.chat([user("q")])
    assert session.turns() == ()


async def test_unknown_models_and_empty_conversations(renderer: Renderer) -> None:
    session = open_session(FakeEngine(ids_of("a")), renderer)
    with pytest.raises(NotFound, match="this session has: solver, judge"):
        await session.chat([user("q")], policy=PolicyName("gpt"))
    with pytest.raises(BadRequest, match="0 messages"):
        await session.chat([])


async def test_a_policy_without_snapshot_says_so(renderer: Renderer) -> None:
    session = Gateway(FakeEngine()).open(policies=[SOLVER], sampling=SamplingSpec(), seed=0)
    with pytest.raises(EngineError, match="not loaded on this node"):
        await session.chat([user("q")])


async def test_close_returns_the_turns_and_ends_the_key(renderer: Renderer) -> None:
    gateway = Gateway(FakeEngine(ids_of("a"), ids_of("b")))
    gateway.set_renderer(SOLVER, renderer)
    session = gateway.open(policies=[SOLVER], sampling=SamplingSpec(), seed=0)
    other = gateway.open(policies=[SOLVER], sampling=SamplingSpec(), seed=0)
    assert session.api_key.startswith("sk-penstock-")
    assert len(session.api_key) == len("sk-penstock-") + 64
    assert len({session.api_key, other.api_key, session.id, other.id}) == 4
    await session.chat([user("q")])
    late = asyncio.create_task(session.chat([user("r")]))
    await asyncio.sleep(0)
    turns = gateway.close(session)
    assert len(turns) == 1
    with pytest.raises(Unauthorized):
        await late
    with pytest.raises(Unauthorized):
        await session.chat([user("q")])
    with pytest.raises(Unauthorized, match="expired session key"):
        gateway.find(session.api_key)
    assert gateway.find(other.api_key) is other
    with pytest.raises(Unauthorized):
        gateway.find(other.api_key, session.id)
