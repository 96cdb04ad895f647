# SPDX-License-Identifier: Apache-2.0
"""A row of two versions, drawn again one version at a time by the real engine."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.rollout.engines.test_hf import version
from tests.unit.rollout.engines.tiny_qwen3 import VOCAB_SIZE, write_snapshot

from penstock.gateway.generation import Completion, GenerationRequest
from penstock.rollout.decoding.batch import Batch, Result, Row
from penstock.rollout.decoding.hf_decoder import HfDecoder
from penstock.rollout.engine import SpanLog
from penstock.rollout.engines.hf import HfEngine
from penstock.runs.redrawn_answers import RedrawnAnswers
from penstock.types import (
    GroupId,
    NodeId,
    Outcome,
    OutcomeKind,
    PolicyName,
    RowId,
    SamplingSpec,
    Trajectory,
    Turn,
    VersionSpan,
    token_ids,
    view_ids,
)

POLICY = PolicyName("policy")
NUM_TOKENS, SWAP_AT = 12, 5


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [write_snapshot(root / str(seed), seed=seed, end_id=VOCAB_SIZE) for seed in (0, 1)]


REQUEST = GenerationRequest(
    [1, 2, 3], SamplingSpec(max_tokens=NUM_TOKENS, seed=7), policy=POLICY, session="s"
)


def _drawn(models: list[Path], loop: asyncio.AbstractEventLoop) -> Completion:
    """An answer during which the weights changed."""
    decoder, done = HfDecoder(torch_threads=1), list[Result]()
    batch, row = Batch(decoder), Row(REQUEST, loop.create_future(), SpanLog(version(0)))
    for number, folder in enumerate(models):
        staged = decoder.stage(folder)
        staged.apply()
        batch.snapshot = staged.snapshot
        batch.resume(version(number))
        if not number:
            assert batch.admit(row, version(0)) is None
        for step in range((SWAP_AT, NUM_TOKENS - SWAP_AT)[number]):
            done += batch.step([] if number or step else [row])
    [(_, answer)] = done
    assert isinstance(answer, Completion)
    return answer


def _row(answer: Completion) -> Trajectory:
    turn = Turn(
        policy=POLICY,
        parent=-1,
        prompt_ids=token_ids(REQUEST.prompt_ids),
        sampled_ids=answer.sampled_ids,
        logprobs=answer.logprobs,
        spans=answer.spans,
        sampling=REQUEST.sampling,
        finish=answer.finish,
    )
    return Trajectory(
        row_id=RowId("p0-1.0.1"),
        group_id=GroupId("p0-1"),
        slot=0,
        epoch=1,
        attempt=1,
        node_id=NodeId("evil"),
        turns=(turn,),
        reward=None,
        outcome=Outcome(kind=OutcomeKind.COMPLETED),
    )


async def test_tokens_after_a_swap_are_drawn_again_from_where_it_was(models: list[Path]) -> None:
    """Each version of a row repeats bit for bit; a token of either that was changed is found when
    that version is checked."""
    answer = _drawn(models, asyncio.get_running_loop())
    assert [(span.start, span.number) for span in answer.spans] == [(0, 0), (SWAP_AT, 1)]
    for number, folder in enumerate(models):
        engine = HfEngine(max_rows=1)
        await engine.load(folder, version(number))
        again = RedrawnAnswers(engine)
        for changed_at in (-1, 0, NUM_TOKENS - 1):
            ids = view_ids(answer.sampled_ids).tolist()
            if changed_at >= 0:
                ids[changed_at] = (ids[changed_at] + 1) % VOCAB_SIZE
            said = replace(answer, sampled_ids=token_ids(ids))
            again.expect(_row(said), {POLICY: version(number)})
            is_same = (await again(REQUEST)).sampled_ids == said.sampled_ids
            # A change of the first token may change those that the second version draws.
            if (changed_at, number) != (0, 1):
                is_other_version = (changed_at >= SWAP_AT) != (number == 1)
                assert is_same == (changed_at < 0 or is_other_version), (number, changed_at)
        await engine.close()


def _spans(*pieces: tuple[int, int, int]) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(start=a, end=b, incarnation=1, number=n) for a, b, n in pieces)


async def test_an_answer_in_many_pieces_costs_one_generation() -> None:
    """A span per token would be a generation per token, and the check would never end."""
    calls: list[int] = []
    ids = list(range(40))

    async def generate(request: GenerationRequest) -> Completion:
        calls.append(len(request.given))
        return Completion.of(ids, [-0.5] * len(ids), version(0), is_cut=True)

    for pieces, num_calls in (
        ([(at, at + 1, 0) for at in range(40)], 1),  # neighbours of one version are one piece
        ([(at, at + 1, at % 2) for at in range(40)], 1),
        ([(0, 10, 0), (10, 20, 1), (20, 40, 0)], 2),
    ):
        answer = await generate(REQUEST)
        said = replace(answer, spans=_spans(*pieces))
        again = RedrawnAnswers(generate)
        again.expect(_row(said), {POLICY: version(0)})
        calls.clear()
        assert (await again(REQUEST)).sampled_ids == answer.sampled_ids
        assert len(calls) == num_calls, pieces


async def test_an_answer_without_tokens_is_drawn_again() -> None:
    """It names no version, so nothing of it would be checked: a node could silence any agent."""

    async def generate(request: GenerationRequest) -> Completion:
        return Completion.of([5, 6, 7], [-0.5] * 3, version(0), is_cut=False)

    silent = Completion.of([], [], version(0), is_cut=False)
    again = RedrawnAnswers(generate)
    again.expect(_row(replace(silent, spans=())), {POLICY: version(0)})
    assert (await again(REQUEST)).sampled_ids == token_ids([5, 6, 7])


async def test_an_answer_that_goes_on_after_the_engine_ended_it_differs() -> None:
    """A cut behind the end token would hide that the engine stopped there."""

    async def generate(request: GenerationRequest) -> Completion:
        ids = [5, 6, 7] if len(request.given) < 3 else [5, 6, 7, 8, 9]
        return Completion.of(ids, [-0.5] * len(ids), version(0), is_cut=False)

    longer = Completion.of([5, 6, 7, 8, 9], [-0.5] * 5, version(0), is_cut=False)
    for pieces in ([(0, 3, 0), (3, 5, 0)], [(0, 3, 0), (3, 5, 1)]):
        again = RedrawnAnswers(generate)
        said = replace(longer, spans=_spans(*pieces))
        again.expect(_row(said), {POLICY: version(0)})
        assert (await again(REQUEST)).sampled_ids != said.sampled_ids, pieces
