# SPDX-License-Identifier: Apache-2.0
"""An answer survives the loss of its engine: it continues from its tokens, or restarts where it
must, and never contradicts chunks that were already streamed."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.rollout.killable_engine import KillableEngine
from tests.unit.rollout.polling import eventually

from penstock.errors import EngineError, RequestRejected
from penstock.gateway.generation import Completion, GenerationRequest, TokenChunk
from penstock.rollout import engine_pool as module
from penstock.rollout.engine_pool import MAX_FAILURES, EnginePool
from penstock.seeds import derive
from penstock.types import (
    FinishReason,
    PolicyName,
    SamplingSpec,
    Version,
    VersionSpan,
    view_ids,
    view_log_probs,
)

POLICY = PolicyName("policy")
PROMPT = [5, 6, 7]
SPEC = SamplingSpec(max_tokens=12, seed=77)


def version(number: int) -> Version:
    return Version(policy=POLICY, incarnation=1, number=number)


def span(start: int, end: int, number: int) -> VersionSpan:
    return VersionSpan(start=start, end=end, incarnation=1, number=number)


def ids(answer: Completion) -> list[int]:
    return view_ids(answer.sampled_ids).tolist()


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BACKOFF_S", 0.001)
    monkeypatch.setattr(module, "POLL_S", 0.001)


async def loaded(
    snapshot: Path, numbers: tuple[int, ...] = (0, 0), hold_s: float = 5.0
) -> tuple[EnginePool, list[KillableEngine]]:
    """A pool whose engines serve these numbers, in the routing order of session "s"."""
    engines = [KillableEngine() for _ in numbers]
    pool = EnginePool(engines, hold_s=hold_s)
    await pool.load(snapshot, version(0))
    await pool(GenerationRequest(PROMPT, SPEC, policy=POLICY, session="s"))
    engines.sort(key=lambda engine: -len(engine.asked))
    for engine, number in zip(engines, numbers, strict=True):
        engine.load_fails = number < max(numbers)
        engine.asked.clear()
    if any(numbers):
        with pytest.raises(EngineError, match="no memory"):
            await pool.load(snapshot, version(max(numbers)))
    return pool, engines


async def test_an_answer_continues_from_its_own_tokens(snapshot: Path) -> None:
    pool, (first, second) = await loaded(snapshot, (0, 1))
    first.dies_after = 5
    heard: list[TokenChunk] = []
    answer = await pool(
        GenerationRequest(PROMPT, SPEC, policy=POLICY, session="s", on_chunk=heard.append)
    )
    assert first.asked == [(PROMPT, SPEC)]
    rest = replace(SPEC, max_tokens=7, seed=derive(77, 5))
    assert second.asked == [([*PROMPT, 3, 4, 5, 6, 7], rest)]
    assert ids(answer) == list(range(3, 15))
    assert list(view_log_probs(answer.logprobs)) == [-token / 8 for token in range(3, 15)]
    assert answer.spans == (span(0, 5, 0), span(5, 12, 1))
    assert answer.finish is FinishReason.LENGTH
    assert [token for chunk in heard for token in chunk.sampled_ids] == ids(answer)
    facts = pool.stats
    assert (facts.num_continued, facts.num_restarted, facts.num_tokens_kept) == (1, 0, 5)
    assert (facts.num_failed, facts.num_serving, facts.in_flight) == (0, 1, (0, 0))


async def test_an_answer_outlives_all_its_engines(snapshot: Path) -> None:
    pool, engines = await loaded(snapshot, (0, 0, 0, 0))
    for engine in engines:
        engine.dies_after = 3
    answer = await pool(GenerationRequest(PROMPT, SPEC, policy=POLICY, session="s"))
    assert ids(answer) == list(range(3, 15))
    assert answer.spans == (span(0, 12, 0),), "equal neighbours are one span"
    assert answer.finish is FinishReason.LENGTH
    asked = sorted((engine.asked[0] for engine in engines), key=lambda asked: len(asked[0]))
    assert [spec.max_tokens for _, spec in asked] == [12, 9, 6, 3]
    assert len({spec.seed for _, spec in asked}) == 4
    assert (pool.stats.num_continued, pool.stats.num_tokens_kept) == (3, 9)


@pytest.mark.parametrize("streams_nothing", [False, True])
async def test_what_was_not_heard_is_generated_again(snapshot: Path, streams_nothing: bool) -> None:
    pool, (first, second) = await loaded(snapshot)
    first.streams_nothing = streams_nothing
    first.dies_after = 5 if streams_nothing else 0
    answer = await pool(GenerationRequest(PROMPT, SPEC, policy=POLICY, session="s"))
    assert second.asked == [(PROMPT, SPEC)]
    assert ids(answer) == list(range(3, 15))
    assert (pool.stats.num_continued, pool.stats.num_restarted) == (0, 1)


STATEFUL = [replace(SPEC, stop=("end",)), replace(SPEC, json_schema="{}")]


@pytest.mark.parametrize("spec", STATEFUL)
async def test_a_stateful_answer_begins_again(snapshot: Path, spec: SamplingSpec) -> None:
    pool, (first, second) = await loaded(snapshot)
    first.dies_after = 5
    answer = await pool(GenerationRequest(PROMPT, spec, policy=POLICY, session="s"))
    assert second.asked == [(PROMPT, spec)]
    assert ids(answer) == list(range(3, 15))
    assert answer.spans == (span(0, 12, 0),)


@pytest.mark.parametrize("spec", STATEFUL)
async def test_what_an_agent_has_heard_is_not_contradicted(
    snapshot: Path, spec: SamplingSpec
) -> None:
    pool, (first, second) = await loaded(snapshot)
    first.dies_after = 5
    heard: list[TokenChunk] = []
    with pytest.raises(EngineError, match="5 streamed tokens"):
        await pool(
            GenerationRequest(PROMPT, spec, policy=POLICY, session="s", on_chunk=heard.append)
        )
    assert (len(heard), second.asked, pool.stats.num_failed) == (5, [], 1)
    await first.load(snapshot, version(0))
    first.dies_after = 0
    await pool(GenerationRequest(PROMPT, spec, policy=POLICY, session="s", on_chunk=heard.append))
    assert len(second.asked) == 1, "nothing was told, so nothing is contradicted"


async def test_an_engine_may_die_after_its_last_token(snapshot: Path) -> None:
    config = json.loads((snapshot / "config.json").read_text())
    (snapshot / "config.json").write_text(json.dumps({**config, "eos_token_id": 6}))
    pool, (first, second) = await loaded(snapshot)
    first.dies_after = 4
    answer = await pool(GenerationRequest(PROMPT, SPEC, policy=POLICY, session="s"))
    assert (ids(answer), answer.finish) == ([3, 4, 5, 6], FinishReason.STOP)
    await first.load(snapshot, version(0))
    first.dies_after = 12
    long = await pool(GenerationRequest([1] * 10, SPEC, policy=POLICY, session="s"))
    assert (len(ids(long)), long.finish, second.asked) == (12, FinishReason.LENGTH, [])


async def test_the_window_ends_an_answer_too(snapshot: Path) -> None:
    (snapshot / "config.json").write_text(json.dumps({"max_position_embeddings": 8}))
    pool, (first, second) = await loaded(snapshot)
    first.dies_after = 5
    answer = await pool(GenerationRequest(PROMPT, SPEC, policy=POLICY, session="s"))
    assert (len(ids(answer)), answer.finish, second.asked) == (5, FinishReason.LENGTH, [])


async def test_an_aborted_answer_goes_on_with_all_its_tokens(
    snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BACKOFF_S", 60.0)  # the first engine would be able again
    pool, (first, second) = await loaded(snapshot)
    first.gives_up_after = 5
    heard: list[TokenChunk] = []
    answer = await pool(
        GenerationRequest(PROMPT, SPEC, policy=POLICY, session="s", on_chunk=heard.append)
    )
    assert second.asked[0][0] == [*PROMPT, 3, 4, 5, 6, 7]
    assert ids(answer) == [token for chunk in heard for token in chunk.sampled_ids]
    assert ids(answer) == list(range(3, 15))
    assert answer.finish is FinishReason.LENGTH


async def test_a_given_up_engine_is_not_heard_any_more(snapshot: Path) -> None:
    pool, (first, _) = await loaded(snapshot)
    first.dies_after = 5
    heard: list[int] = []

    def feed(chunk: TokenChunk) -> None:
        heard.extend(chunk.sampled_ids)
        if len(heard) == 8:  # the second engine is generating
            first.chunk_callbacks[-1](
                TokenChunk(sampled_ids=[96], logprobs=[0.0], version=version(0))
            )

    answer = await pool(GenerationRequest(PROMPT, SPEC, policy=POLICY, session="s", on_chunk=feed))
    assert ids(answer) == heard == list(range(3, 15))


async def test_a_refusal_is_not_tried_again(snapshot: Path) -> None:
    pool, (first, second) = await loaded(snapshot)
    first.fails_with = RequestRejected("prompt too long")
    with pytest.raises(RequestRejected):
        await pool(GenerationRequest(PROMPT, SPEC, policy=POLICY, session="s"))
    assert (len(first.asked), len(second.asked), pool.stats.num_failed) == (1, 0, 0)


async def test_a_request_that_every_engine_fails_is_given_up(snapshot: Path) -> None:
    pool, engines = await loaded(snapshot)
    for engine in engines:
        engine.fails_with = EngineError("decoding failed")
    with pytest.raises(EngineError, match="decoding failed"):
        await pool(GenerationRequest(PROMPT, SPEC, policy=POLICY, session="s"))
    assert sum(len(engine.asked) for engine in engines) == MAX_FAILURES
    assert min(len(engine.asked) for engine in engines) >= 2, "it avoids who has just failed it"


async def test_a_dead_pool_holds_and_then_fails(snapshot: Path) -> None:
    pool, (only,) = await loaded(snapshot, (0,), hold_s=0.2)
    only.dies_after = 5
    loop = asyncio.get_running_loop()
    began_at = loop.time()
    with pytest.raises(EngineError, match=r"all 1 engines were unavailable for 0\.2 s.*reset"):
        await pool(GenerationRequest(PROMPT, SPEC, policy=POLICY, session="s"))
    assert loop.time() - began_at >= 0.2
    assert pool.live is None


async def test_a_held_answer_goes_on_when_an_engine_is_back(snapshot: Path) -> None:
    pool, (only,) = await loaded(snapshot, (0,), hold_s=30.0)
    only.dies_after = 5
    call = asyncio.create_task(pool(GenerationRequest(PROMPT, SPEC, policy=POLICY, session="s")))
    await eventually(lambda: only.live is None)
    await asyncio.sleep(0.02)
    assert not call.done()
    await pool.load(snapshot, version(4))
    answer = await call
    assert answer.spans == (span(0, 5, 0), span(5, 12, 4))
    assert ids(answer) == list(range(3, 15))


async def test_closing_ends_those_who_are_held(snapshot: Path) -> None:
    pool, (only,) = await loaded(snapshot, (0,), hold_s=30.0)
    only.dies_after = 5
    call = asyncio.create_task(pool(GenerationRequest(PROMPT, SPEC, policy=POLICY, session="s")))
    await eventually(lambda: only.live is None)
    await pool.close()
    with pytest.raises(EngineError):
        async with asyncio.timeout(60):
            await call


async def test_cancelling_passes_through(snapshot: Path) -> None:
    pool, (first, second) = await loaded(snapshot)
    long = replace(SPEC, max_tokens=10**6)
    call = asyncio.create_task(pool(GenerationRequest(PROMPT, long, policy=POLICY, session="s")))
    await eventually(lambda: first.asked)
    assert pool.stats.in_flight.count(1) == 1
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (first.num_cancelled, second.asked, pool.stats.in_flight) == (1, [], (0, 0))


async def test_nobody_sees_an_error_while_another_engine_lives(snapshot: Path) -> None:
    """Forty sessions, engines lost and restored in turn: every answer complete and right."""
    engines = [KillableEngine(token_s=0.002) for _ in range(3)]
    pool = EnginePool(engines)
    await pool.load(snapshot, version(0))
    calls = [
        asyncio.create_task(
            pool(
                GenerationRequest(
                    [1] * (1 + n), replace(SPEC, max_tokens=60), policy=POLICY, session=f"s{n}"
                )
            )
        )
        for n in range(40)
    ]
    num_kills = 0
    while not all(call.done() for call in calls):
        await asyncio.sleep(0.01)
        lost = engines[num_kills % 3]
        lost.live = None
        await asyncio.sleep(0.003)
        await pool.load(snapshot, version(0))
        await eventually(lambda lost=lost: lost.live is not None)
        num_kills += 1
    for n, answer in enumerate(await asyncio.gather(*calls)):
        assert ids(answer) == [at % 97 for at in range(1 + n, 61 + n)]
        assert answer.spans == (span(0, 60, 0),)
    assert pool.stats.num_failed == 0
    assert pool.stats.num_continued > 10
    assert num_kills > 2
