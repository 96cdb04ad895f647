# SPDX-License-Identifier: Apache-2.0
"""Lookups in a session's turn tree, and its memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.gateway import turn_tree
from penstock.gateway.turn_tree import ROOT, TurnTree
from penstock.types import (
    ExpertChoices,
    FinishReason,
    PolicyName,
    SamplingSpec,
    TokenIds,
    Turn,
    VersionSpan,
    log_probs,
    token_ids,
)

POLICY, OTHER = PolicyName("policy"), PolicyName("other")


def turn(prompt: list[int], sampled: list[int], parent: int = ROOT) -> Turn:
    return Turn(
        policy=POLICY,
        parent=parent,
        prompt_ids=token_ids(prompt),
        sampled_ids=token_ids(sampled),
        logprobs=log_probs([0.0] * len(sampled)),
        spans=(VersionSpan(start=0, end=len(sampled), incarnation=1, number=0),),
        sampling=SamplingSpec(),
        finish=FinishReason.STOP,
    )


def test_ids_are_matched_as_ids() -> None:
    tree = TurnTree()
    first = tree.add(turn([1, 2], [3]), "q", "a")
    second = tree.add(turn([4], [5, 6], first), "r", "b")
    assert tree.match_ids(POLICY, token_ids([1, 2, 3, 4, 5, 6, 7])) == (second, 24)
    assert tree.match_ids(POLICY, token_ids([1, 2, 3, 4, 5])) == (first, 12)
    assert tree.match_ids(POLICY, token_ids([2, 2, 3])) == (ROOT, 0)
    assert tree.match_ids(OTHER, token_ids([1, 2, 3])) == (ROOT, 0)
    assert tree.context_ids(second) == [1, 2, 3, 4, 5, 6]
    assert (tree[second].parent, tree[first].parent) == (first, ROOT)


def test_of_equal_contexts_an_agent_continues_its_own() -> None:
    tree = TurnTree()
    for agent in ("0", "1", ""):
        tree.add(replace(turn([1], [2]), agent=agent), "q", "a")
    for agent, own in (("0", 0), ("1", 1), ("", 2), ("2", 2)):
        assert tree.match(POLICY, "qa!", agent) == (own, 2)
        assert tree.match_ids(POLICY, token_ids([1, 2, 3]), agent) == (own, 8)
    longer = tree.add(replace(turn([3], [4], 0), agent="0"), "r", "b")
    assert tree.match(POLICY, "qarb", "1") == (longer, 4), "the longest context comes first"


def test_turns_with_the_same_prompt_share_its_memory() -> None:
    tree = TurnTree()
    for _ in range(3):
        tree.add(turn([1] * 1000, [2]), "q" * 1000, "a")
    one, two, three = tree.turns()
    assert one.prompt_ids is two.prompt_ids is three.prompt_ids


def num_bytes(num_turns: int) -> int:
    tree = TurnTree()
    parent = ROOT
    for at in range(num_turns):
        parent = tree.add(turn([at] * 100, [at] * 50, parent), "q" * 100, "a" * 50)
    stored: set[TokenIds] = {ids for t in tree.turns() for ids in (t.prompt_ids, t.sampled_ids)}
    return sum(map(len, stored))


def test_a_session_costs_memory_by_distinct_tokens() -> None:
    assert num_bytes(20) == 20 * 150 * 4
    assert num_bytes(40) == 2 * num_bytes(20)


LONG = {
    "ids": turn([1] * 250, [2]),
    "log-probs": turn([1], [2] * 125),
    "schema": replace(turn([1], [2]), sampling=SamplingSpec(json_schema="é" * 500)),
    "stop strings": replace(turn([1], [2]), sampling=SamplingSpec(stop=("x" * 250,) * 4)),
    "spans": replace(turn([1], [2]), spans=turn([1], [2]).spans * 30),
    "experts": replace(
        turn([1], [2]),
        experts=ExpertChoices(num_layers=48, num_chosen=8, num_experts=64, choices=b"0" * 1000),
    ),
}


@pytest.mark.parametrize("kind", LONG)
def test_all_that_a_turn_brings_into_a_row_fills_the_tree(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn_tree, "MAX_SESSION_BYTES", 10_000)
    tree, num_turns = TurnTree(), 0
    while not tree.is_full:
        tree.add(LONG[kind], "q", "a")
        num_turns += 1
    assert 5 <= num_turns <= 10, "of 1,000 bytes and more each; the same prompt counts again"
