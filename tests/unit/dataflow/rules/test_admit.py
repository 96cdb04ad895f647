# SPDX-License-Identifier: Apache-2.0
"""May this closed group enter: each rule's refusals and their reasons."""

import random
from typing import Any

import pytest
from msgspec.structs import replace
from tests.unit.dataflow.rules.rule_inputs import Assigned, group_of, judged, row

from penstock.dataflow.rules import make_rule
from penstock.dataflow.rules.dedup import Dedup
from penstock.types import TURN_REWARD, DropReason, GroupId, JudgedGroup, OutcomeKind

CUT = OutcomeKind.TRUNCATED


def verdict(name: str, options: dict[str, Any], group: JudgedGroup) -> DropReason | None:
    return make_rule("admit", name, options, Assigned()).judge(group)


def mixed(num_truncated: int, num_rows: int) -> JudgedGroup:
    rows = [row(1.0, CUT) if n < num_truncated else row(0.0) for n in range(num_rows)]
    return group_of(rows, GroupId("p0-1"))


@pytest.mark.parametrize(
    ("rewards", "is_in"),
    [
        ((0.0, 1.0), True),
        ((1.0, 1.0), False),
        ((0.3,), False),
        ((0.5, 0.5 + 1e-7), False),
        ((0.5, 0.50001), True),
        ((-1.0, 0.0, 0.0), True),
    ],
)
def test_reward_spread(rewards: tuple[float, ...], is_in: bool) -> None:
    expected = None if is_in else DropReason.UNIFORM_REWARD
    assert verdict("reward-spread", {}, judged("p0-1", rewards)) == expected


def test_a_role_is_compared_with_itself() -> None:
    """The rows differ, and so do the two roles, but neither role differs from itself."""
    uniform = group_of([row(r, a=1.0, b=0.0) for r in (0.0, 1.0)], GroupId("p0-1"))
    assert verdict("reward-spread", {}, uniform) is DropReason.UNIFORM_REWARD
    one = group_of([row(0.5, a=1.0, b=r) for r in (0.0, 1.0)], GroupId("p0-1"))
    assert verdict("reward-spread", {}, one) is None
    opposed = group_of([row(0.5, a=1.0 - r, b=r) for r in (0.0, 1.0)], GroupId("p0-1"))
    assert verdict("reward-spread", {}, opposed) is None, "though the means over roles are equal"


def test_the_turns_of_a_role_may_differ_though_its_rows_do_not() -> None:
    rows = [replace(row(1.0), values={TURN_REWARD: mean}) for mean in (0.25, 0.75)]
    assert verdict("reward-spread", {}, group_of(rows, GroupId("p0-1"))) is None


def test_one_role_within_the_range_is_enough() -> None:
    group = group_of([row(0.5, a=1.0, b=0.1)] * 2, GroupId("p0-1"))
    assert verdict("reward-range", {"low": 0.9}, group) is None
    assert verdict("reward-range", {"low": 0.2, "high": 0.9}, group) is DropReason.REWARD_RANGE


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_accepted_share_of_bernoulli_tasks(p: float) -> None:
    """1 - p^n - (1-p)^n for groups of n."""
    chance, size, num_groups = random.Random(4), 8, 20_000
    rule = make_rule("admit", "reward-spread", {}, Assigned())
    admitted = sum(
        rule.judge(judged("p0-1", [float(chance.random() < p) for _ in range(size)])) is None
        for _ in range(num_groups)
    )
    expected = 1 - p**size - (1 - p) ** size
    spread = (expected * (1 - expected) / num_groups) ** 0.5
    assert abs(admitted / num_groups - expected) < 3.3 * spread


@pytest.mark.parametrize(
    ("num_truncated", "max_share", "is_in"), [(2, 0.5, True), (3, 0.5, False), (1, 0.0, False)]
)
def test_overlong(num_truncated: int, max_share: float, is_in: bool) -> None:
    expected = None if is_in else DropReason.OVERLONG
    assert verdict("overlong", {"max_share": max_share}, mixed(num_truncated, 4)) == expected


def test_outcome() -> None:
    assert verdict("outcome", {}, mixed(0, 4)) is None
    assert verdict("outcome", {}, mixed(1, 4)) is DropReason.OUTCOME
    assert verdict("outcome", {"allow": ["completed", "truncated"]}, mixed(1, 4)) is None


@pytest.mark.parametrize(
    ("low", "high", "is_in"),
    [(0.25, 0.25, True), (0.3, None, False), (None, 0.2, False), (None, 0.3, True)],
)
def test_reward_range(low: float | None, high: float | None, is_in: bool) -> None:
    group = judged("p0-1", (1.0, 0.0, 0.0, 0.0))
    expected = None if is_in else DropReason.REWARD_RANGE
    assert verdict("reward-range", {"low": low, "high": high}, group) == expected


def test_dedup_against_a_list() -> None:
    """Random tasks and verdicts, a restart before each: the same answers as the naive window."""
    chance, window = random.Random(5), 7
    state, admitted = Assigned(), list[str]()
    refused = 0
    for issue in range(3_000):
        group = judged(f"p0-{issue}", (0.0, 1.0), key=f"t{chance.randrange(15)}")
        rule = Dedup.build(state, {"window": window})
        answer = rule.judge(group)
        is_recent = group.task_key in admitted[-window:]
        assert answer == (DropReason.DUPLICATE if is_recent else None)
        by_another = DropReason.UNIFORM_REWARD if chance.random() < 0.3 else None
        rule.learn(group, answer or by_another)
        if answer is None and by_another is None:
            admitted.append(group.task_key)
        refused += answer is not None
    assert refused > 500
    assert len(state) == window + 1


def test_dedup_without_restarts_gives_the_same() -> None:
    chance = random.Random(6)
    kept, state = Dedup.build(Assigned(), {"window": 3}), Assigned()
    for issue in range(2_000):
        group = judged(f"p0-{issue}", (0.0,), key=f"t{chance.randrange(6)}")
        answer = Dedup.build(state, {"window": 3}).judge(group)
        assert kept.judge(group) == answer
        kept.learn(group, answer)
        Dedup.build(state, {"window": 3}).learn(group, answer)


def test_a_group_is_no_duplicate_of_itself() -> None:
    rule = Dedup.build(Assigned(), {})
    group = judged("p0-1", (0.0, 1.0))
    rule.learn(group, None)
    assert rule.judge(group) is None
