# SPDX-License-Identifier: Apache-2.0
"""What a retry is offered of the attempts before it, and what it is not."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.dataflow.core.test_version_gate import A, gate, lineage

from penstock.dataflow.service.nodes.salvage import Salvage
from penstock.types import (
    FinishReason,
    GroupId,
    SamplingSpec,
    Turn,
    VersionSpan,
    log_probs,
    token_ids,
)
from penstock.wire.codec import encode

SLOT = (GroupId("p0-1"), 3)


def turn(*sampled: int, number: int = 3) -> Turn:
    return Turn(
        policy=A,
        parent=-1,
        prompt_ids=token_ids([1]),
        sampled_ids=token_ids(sampled),
        logprobs=log_probs([-0.5] * len(sampled)),
        spans=(VersionSpan(start=0, end=len(sampled), incarnation=1, number=number),),
        sampling=SamplingSpec(),
        finish=FinishReason.STOP,
    )


def salvage(*, max_attempts: int = 4, max_bytes: int = 10_000) -> Salvage:
    """Committed is 3, and rows may be one version old."""
    policies = gate(lineage(A, committed=3, published=3))
    return Salvage(
        policies, max_attempts=max_attempts, is_believed=lambda _: True, max_bytes=max_bytes
    )


def filled(kept: Salvage, *turns: Turn, epoch: int = 1) -> Salvage:
    for index, one in enumerate(turns):
        assert kept.record(SLOT, epoch, index, one, "n")
    return kept


def test_retries_get_all_then_all_but_the_last_then_nothing() -> None:
    turns = [turn(5), turn(6), turn(7)]
    kept = filled(salvage(), *turns)
    assert kept.offer(SLOT, 2, 1) == turns, "handed back, not lost"
    assert kept.offer(SLOT, 2, 2) == turns
    assert kept.offer(SLOT, 3, 3) == turns[:2]
    assert not kept.offer(SLOT, 4, 4)
    assert not filled(salvage(max_attempts=2), *turns).offer(SLOT, 2, 2)


def test_an_attempt_is_not_offered_its_own_turns() -> None:
    assert not filled(salvage(), turn(5)).offer(SLOT, 1, 1)


def test_the_fullest_attempt_counts() -> None:
    kept = filled(salvage(), turn(5), turn(6))
    filled(kept, turn(5), epoch=2)
    assert len(kept.offer(SLOT, 3, 2)) == 2


def test_a_turn_told_twice_or_after_a_lost_one_is_let_go() -> None:
    kept = filled(salvage(), turn(5))
    assert not kept.record(SLOT, 1, 0, turn(5), "n")
    assert not kept.record(SLOT, 1, 2, turn(7), "n")
    assert kept.offer(SLOT, 2, 2) == [turn(5)]


def test_turns_too_old_for_the_next_batch_are_not_offered() -> None:
    young, old = turn(5, number=2), turn(6, number=1)
    assert filled(salvage(), young, old, young).offer(SLOT, 2, 2) == [young]


def test_what_is_over_is_forgotten_and_memory_is_bounded() -> None:
    kept = filled(salvage(), turn(5))
    kept.retain({SLOT[0]})
    assert kept.offer(SLOT, 2, 2)
    kept.retain(())
    assert not len(kept)
    for slot in range(200):
        kept.record((GroupId("p0-2"), slot), 1, 0, turn(5), "n")
    assert len(kept) == 10_000 // len(encode(turn(5)))
    assert kept.offer((GroupId("p0-2"), 199), 2, 2)


def test_everything_in_a_turn_counts() -> None:
    kept = salvage()
    long = replace(turn(), sampling=SamplingSpec(json_schema=" " * 6000))
    for slot in range(20):
        kept.record((GroupId("p0-2"), slot), 1, 0, long, "n")
    assert len(kept) == 1
