# SPDX-License-Identifier: Apache-2.0
"""A record that breaks the contract is refused by name, whatever a node claims."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.dataflow.service.nodes.validate import summarise
from penstock.types import (
    FinishReason,
    GroupId,
    NodeId,
    Outcome,
    OutcomeKind,
    PolicyName,
    RowId,
    RowSummary,
    SamplingSpec,
    Trajectory,
    Turn,
    VersionSpan,
    log_probs,
    token_ids,
)

POLICY = PolicyName("p")
LONG = token_ids([1]) * 100_000


def span(start: int, end: int, number: int = 0, incarnation: int = 1) -> VersionSpan:
    return VersionSpan(start=start, end=end, incarnation=incarnation, number=number)


def turn(**changes: Any) -> Turn:
    sound = Turn(
        policy=POLICY,
        parent=-1,
        prompt_ids=token_ids([1, 2]),
        sampled_ids=token_ids([3, 4, 5]),
        logprobs=log_probs([-0.1, -0.2, 0.0]),
        spans=(span(0, 2, 1), span(2, 3, 2)),
        sampling=SamplingSpec(),
        finish=FinishReason.STOP,
    )
    return replace(sound, **changes)


def trajectory(*turns: Turn, **changes: Any) -> Trajectory:
    sound = Trajectory(
        row_id=RowId("g.0.1"),
        group_id=GroupId("g"),
        slot=0,
        epoch=1,
        attempt=1,
        node_id=NodeId("n"),
        turns=turns or (turn(),),
        reward=1.0,
        outcome=Outcome(kind=OutcomeKind.COMPLETED),
    )
    return replace(sound, **changes)


def is_published(policy: PolicyName, incarnation: int, number: int) -> bool:
    return policy == POLICY and incarnation == 1 and number < 5


def test_a_sound_record_tells_tokens_and_age() -> None:
    later = turn(parent=0, spans=(span(0, 3, 4),))
    unread = turn(spans=(span(0, 3, 0),), reached_agent=False)
    assert summarise(trajectory(turn(), later, unread), "d", is_published) == RowSummary(
        row_id=RowId("g.0.1"),
        digest="d",
        reward=1.0,
        outcome=OutcomeKind.COMPLETED,
        sampled={POLICY: 6},
        versions={POLICY: ((1, 1), (1, 2), (1, 4))},
        compute_cost={POLICY: (10, 100)},
    )


def test_tokens_are_counted_by_role_only_where_one_is_named() -> None:
    other = PolicyName("judge")
    turns = [turn(role="solve"), turn(), turn(policy=other), turn(role="x", reached_agent=False)]

    def always(policy: PolicyName, incarnation: int, number: int) -> bool:
        return True

    verdict = summarise(trajectory(*turns), "d", always)
    assert isinstance(verdict, RowSummary)
    assert verdict.sampled == {POLICY: 6, other: 3}
    assert verdict.roles == {POLICY: {"solve": 3, "": 3}}
    assert verdict.compute_cost == {POLICY: (10, 50), other: (5, 25)}


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        (trajectory(turn(role="r" * 65)), "at most 64"),
        (trajectory(reward=None), "needs a finite reward"),
        (trajectory(reward=float("nan")), "needs a finite reward"),
        (trajectory(outcome=Outcome(kind=OutcomeKind.FAILED)), "failure is not a reward"),
        (trajectory(turn(parent=0)), "does not come before"),
        (trajectory(turn(sampled_ids=token_ids([3, 4]))), "one float32 log-prob"),
        (trajectory(turn(prompt_ids=b"abc")), "4 bytes each"),
        (trajectory(turn(logprobs=log_probs([-0.1, 0.5, -1]))), "at most 0"),
        (trajectory(turn(logprobs=log_probs([-0.1, float("nan"), -1]))), "finite"),
        (trajectory(turn(logprobs=log_probs([-0.1, -1e38, -1]))), "at least"),
        (trajectory(reward=1e300), "finite reward"),
        (trajectory(turn(prompt_ids=LONG), *[turn(parent=0)] * 50), "unfold to"),
        (trajectory(turn(sampled_ids=token_ids([3, -4, 5]))), "negative"),
        (trajectory(turn(spans=(span(0, 1), span(2, 3)))), "without gap"),
        (trajectory(turn(spans=(span(0, 2), span(1, 3)))), "without gap"),
        (trajectory(turn(spans=(span(0, 2),))), "spans cover 2 of 3"),
        (trajectory(turn(spans=(span(0, 3, 7),))), "never published"),
        (trajectory(turn(policy=PolicyName("q"))), "never published"),
    ],
)
def test_what_breaks_the_contract_is_named(record: Trajectory, complaint: str) -> None:
    verdict = summarise(record, "d", is_published)
    assert isinstance(verdict, str) and complaint in verdict
