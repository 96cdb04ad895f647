# SPDX-License-Identifier: Apache-2.0
"""GRESO against a script and against chance; the filter of solved tasks."""

import math
from typing import Any

import pytest
from tests.unit.dataflow.rules.rule_inputs import (
    Assigned,
    draws,
    group_of,
    judged,
    no_draw,
    row,
    scripted,
    task,
)

from penstock.dataflow.rules.greso import MAX_REJECTIONS, Greso
from penstock.dataflow.rules.solved_filter import SolvedFilter
from penstock.types import GroupId, PolicyName

EASY, HARD, MIXED = (1.0, 1.0), (0.0, 0.0), (0.0, 1.0)


def of_task(state: Assigned, key: str = "t") -> tuple[str, int]:
    entry = state[f"task {key}"]
    return entry["kind"], entry["z"]


def submit(rule: Greso, key: str = "t", ordinal: int = 0) -> None:
    assert rule.wants(task(key, ordinal=ordinal), lambda: 0.0)


def test_scripted_outcomes_give_the_exact_trace_of_z() -> None:
    state = Assigned()
    script = [EASY, EASY, HARD, HARD, HARD, MIXED, EASY, MIXED, MIXED, HARD]
    trace: list[tuple[str, int]] = []
    for issue, rewards in enumerate(script):
        rule = Greso.build(state, {})  # a restart before every step changes nothing
        submit(rule)
        rule.learn(judged(f"p0-{issue}", rewards), None)
        trace.append(of_task(state))
    assert trace == [
        ("easy", 1), ("easy", 2), ("hard", 1), ("hard", 2), ("hard", 3),
        ("", 0), ("easy", 1), ("", 0), ("", 0), ("hard", 1),
    ]  # fmt: skip


def adapt(options: dict[str, Any], shares: list[tuple[int, int, int]]) -> list[tuple[float, float]]:
    """p of easy and hard tasks after each version of (easy, hard, mixed) groups."""
    state = Assigned()
    rule = Greso.build(state, options)
    submit(rule, "first", ordinal=0)
    submit(rule, "first", ordinal=100)
    trace: list[tuple[float, float]] = []
    issue = 0
    for number, counts in enumerate([*shares, (0, 0, 1)]):
        for rewards, count in zip((EASY, HARD, MIXED), counts, strict=True):
            for _ in range(count):
                issue += 1
                rule.learn(judged(f"p0-{issue}", rewards, key=f"k{issue}", number=number), None)
        trace.append((state.get("p easy", 0.5), state.get("p hard", 0.5)))
    return trace[1:]


def test_p_follows_the_shares_of_each_version_exactly() -> None:
    # Thresholds 0.083 and 0.167: 1 of 12 easy is above, 2 of 12 hard is just below, 2 of 11 above.
    trace = adapt({}, [(1, 2, 9), (0, 2, 9), (12, 0, 0), (0, 0, 1)])
    flat = [p for pair in trace for p in pair]
    assert flat == pytest.approx([0.49, 0.51, 0.50, 0.50, 0.49, 0.51, 0.50, 0.52], abs=1e-12)


def test_p_stays_within_its_range() -> None:
    options = {"delta": 0.3, "p_min": 0.05, "p_max": 0.95}
    trace = adapt(options, [(1, 0, 0), (1, 0, 0), (1, 0, 0)])
    assert trace[-1] == pytest.approx((0.05, 0.95))


def test_p_rests_until_a_source_has_been_passed_over_once() -> None:
    state = Assigned()
    rule = Greso.build(state, {})
    submit(rule, "a", ordinal=0)
    submit(rule, "b", ordinal=1)
    submit(rule, "a", ordinal=0)  # asked again, not passed over
    for number in range(3):
        rule.learn(judged(f"p0-{number}", EASY, number=number), None)
    assert "p easy" not in state
    submit(rule, "a", ordinal=2)
    for number in range(3, 5):
        rule.learn(judged(f"p0-{number}", EASY, number=number), None)
    assert state["p easy"] == pytest.approx(0.48)


def test_original_thresholds_leave_the_middle_alone() -> None:
    options = {"easy_from": 0.98, "hard_to": 0.11}
    kinds: list[tuple[str, int]] = []
    for reward in (0.98, 0.979, 0.5, 0.111, 0.11):
        state = Assigned()
        Greso.build(state, options).learn(judged("p0-1", [reward] * 7), None)
        kinds.append(of_task(state))
    assert kinds == [("easy", 1), ("", 0), ("", 0), ("", 0), ("hard", 1)]


def test_copies_in_flight_raise_z_once() -> None:
    state = Assigned()
    rule = Greso.build(state, {})
    submit(rule)
    submit(rule)
    submit(rule)
    for group in ("p0-1", "p0-2", "p0-3"):
        rule.learn(judged(group, EASY), None)
    assert of_task(state) == ("easy", 1)
    submit(rule)
    rule.learn(judged("p0-4", EASY), None)
    assert of_task(state) == ("easy", 2)


def test_a_second_policys_view_counts_nothing() -> None:
    state = Assigned()
    rule = Greso.build(state, {})
    for issue in range(3):
        submit(rule)
        for policy in ("solver", "judge"):
            rule.learn(judged(f"p0-{issue}", HARD, policy=PolicyName(policy)), None)
    assert of_task(state) == ("hard", 3)
    assert state["count"]["all"] == 3


def test_a_task_is_uniform_only_if_it_is_so_for_every_policy() -> None:
    """The judge still learns from a task that the solver always solves, whoever is first."""
    for views in ((EASY, MIXED), (MIXED, EASY), (EASY, HARD)):
        state = Assigned()
        rule = Greso.build(state, {})
        submit(rule)
        for policy, rewards in zip(("solver", "judge"), views, strict=True):
            rule.learn(judged("p0-1", rewards, policy=PolicyName(policy)), None)
        assert of_task(state) == ("", 0)


def test_a_role_with_spread_makes_its_task_worth_another_try() -> None:
    state = Assigned()
    rule = Greso.build(state, {})
    submit(rule)
    rows = [row(1.0, a=1.0 - own, b=own) for own in (0.0, 1.0)]  # equal means, other roles
    rule.learn(group_of(rows, GroupId("p0-1")), None)
    assert of_task(state) == ("", 0)


@pytest.mark.parametrize(("rewards", "floor"), [(EASY, "floor_easy"), (HARD, "floor_hard")])
@pytest.mark.parametrize("z", [1, 2, 3])
def test_submit_rate_is_p_to_the_z(rewards: tuple[float, ...], floor: str, z: int) -> None:
    """Chi-square of one degree of freedom; 10.83 is its 0.999 quantile."""
    p, num_draws = 0.6, 20_000
    state = Assigned()
    rule = Greso.build(state, {"p": p, floor: 0.001})
    for issue in range(z):
        submit(rule)
        rule.learn(judged(f"p0-{issue}", rewards), None)
    draw = draws(z)
    submitted = sum(rule.wants(task("t"), draw) for _ in range(num_draws))
    expected = num_draws * p**z
    chi2 = (submitted - expected) ** 2 * (1 / expected + 1 / (num_draws - expected))
    assert chi2 < 10.83, (submitted, expected)


def test_the_floor_holds_however_long_the_run() -> None:
    state = Assigned()
    rule = Greso.build(state, {})
    for issue in range(50):
        submit(rule)
        rule.learn(judged(f"p0-{issue}", HARD), None)
    assert rule.wants(task("t"), scripted(0.2999))
    assert not rule.wants(task("t"), scripted(0.3))


def test_fresh_tasks_are_submitted_without_chance() -> None:
    state = Assigned()
    rule = Greso.build(state, {})
    assert rule.wants(task("t"), no_draw)
    rule.learn(judged("p0-1", MIXED), None)
    assert rule.wants(task("t"), no_draw)


def test_after_256_rejections_in_a_row_one_is_submitted() -> None:
    state = Assigned()
    rule = Greso.build(state, {})
    rule.learn(judged("p0-1", EASY), None)
    answers = [
        Greso.build(state, {}).wants(task("t"), lambda: 0.999)
        for _ in range(2 * MAX_REJECTIONS + 2)
    ]
    assert MAX_REJECTIONS == 256
    assert [at for at, is_wanted in enumerate(answers) if is_wanted] == [256, 513]


def test_solved_tasks_come_back_at_the_rate_of_revisits() -> None:
    state = Assigned()
    rule = SolvedFilter.build(state, {"revisit": 0.2})
    assert rule.wants(task("t"), no_draw)
    rule.learn(judged("p0-1", EASY), None)
    draw = draws(3)
    share = sum(rule.wants(task("t"), draw) for _ in range(20_000)) / 20_000
    assert share == pytest.approx(0.2, abs=3 * math.sqrt(0.16 / 20_000))


def test_a_task_is_solved_only_if_every_policy_solves_it() -> None:
    for views in ((EASY, HARD), (HARD, EASY)):
        state = Assigned()
        rule = SolvedFilter.build(state, {})
        rule.learn(judged("p0-1", EASY), None)
        for policy, rewards in zip(("solver", "judge"), views, strict=True):
            rule.learn(judged("p0-2", rewards, policy=PolicyName(policy)), None)
        assert state["t"]["p"] == pytest.approx(0.9), "the lower of the two counts, once"


def test_a_failed_revisit_brings_a_solved_task_back() -> None:
    state = Assigned()
    SolvedFilter.build(state, {}).learn(judged("p0-1", EASY), None)
    SolvedFilter.build(state, {}).learn(judged("p0-2", HARD), None)
    SolvedFilter.build(state, {}).learn(judged("p0-2", HARD), None)
    assert state["t"]["p"] == pytest.approx(0.9)
    assert SolvedFilter.build(state, {}).wants(task("t"), no_draw)
