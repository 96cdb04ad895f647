# SPDX-License-Identifier: Apache-2.0
"""Salvaged answers: each is used once, and only for the same call."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

from penstock.gateway.salvaged_answers import SalvagedAnswers
from penstock.types import (
    FinishReason,
    PolicyName,
    SamplingSpec,
    Turn,
    VersionSpan,
    log_probs,
    token_ids,
    view_ids,
)

POLICY = PolicyName("policy")
SPEC = SamplingSpec(temperature=0.7, max_tokens=8)


def turn(
    prompt: list[int],
    sampled: list[int],
    *,
    parent: int = -1,
    seed: int = 1,
    finish: FinishReason = FinishReason.STOP,
) -> Turn:
    return Turn(
        policy=POLICY,
        parent=parent,
        prompt_ids=token_ids(prompt),
        sampled_ids=token_ids(sampled),
        logprobs=log_probs([-0.5] * len(sampled)),
        spans=(VersionSpan(start=0, end=len(sampled), incarnation=1, number=2),),
        sampling=replace(SPEC, seed=seed),
        finish=finish,
    )


def taken(
    salvaged: SalvagedAnswers, context: list[int], spec: SamplingSpec = SPEC
) -> list[int] | None:
    answer = salvaged.pop(POLICY, spec, context)
    return None if answer is None else view_ids(answer.sampled_ids).tolist()


def test_two_equal_calls_get_their_two_answers_in_order() -> None:
    salvaged = SalvagedAnswers([turn([1, 2], [5], seed=1), turn([1, 2], [6], seed=2)])
    assert [taken(salvaged, [1, 2]) for _ in range(3)] == [[5], [6], None]


def test_a_turn_is_found_by_its_full_context() -> None:
    salvaged = SalvagedAnswers([turn([1], [5]), turn([2], [6], parent=0)])
    assert taken(salvaged, [2]) is None
    assert taken(salvaged, [1, 5, 2]) == [6]
    assert taken(salvaged, [1]) == [5]


def test_a_long_conversation_costs_what_it_has_and_not_its_square() -> None:
    """A node of strangers names the turns that its repetition looks up."""
    turns = [turn([1] * 2_000, [5], parent=index - 1) for index in range(500)]
    tracemalloc.start()
    try:
        salvaged = SalvagedAnswers(turns)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 8 << 20  # all contexts together are a gigabyte
    assert taken(salvaged, ([1] * 2_000 + [5]) * 2 + [1] * 2_000) == [5]


def test_another_spec_or_policy_is_another_call() -> None:
    salvaged = SalvagedAnswers([turn([1], [5])])
    assert taken(salvaged, [1], replace(SPEC, temperature=0.8)) is None
    assert salvaged.pop(PolicyName("other"), SPEC, [1]) is None
    assert taken(salvaged, [1], replace(SPEC, seed=9)) == [5]


def test_an_aborted_answer_is_not_reused() -> None:
    salvaged = SalvagedAnswers(
        [turn([1], [5], finish=FinishReason.ABORT), turn([3], [6], parent=0)]
    )
    assert taken(salvaged, [1]) is None
    assert taken(salvaged, [1, 5, 3]) == [6]
