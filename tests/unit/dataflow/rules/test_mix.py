# SPDX-License-Identifier: Apache-2.0
"""Which source next: shares are kept, turns are taken, and difficulty draws work to itself."""

from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.dataflow.rules.rule_inputs import Assigned, draws, judged, no_draw

from penstock.dataflow.rules import Mix, make_rule
from penstock.types import SourceShare


def serve(rule: Mix, weights: Mapping[str, float], num_picks: int) -> Counter[str]:
    served: Counter[str] = Counter()
    for _ in range(num_picks):
        served[rule.pick(shares(weights, served), no_draw)] += 1
    return served


def shares(weights: Mapping[str, float], served: Mapping[str, int]) -> list[SourceShare]:
    return [SourceShare(name=n, weight=w, served=served.get(n, 0)) for n, w in weights.items()]


@given(
    weights=st.dictionaries(st.text(max_size=3), st.floats(0.01, 100), min_size=1, max_size=6),
    num_picks=st.integers(0, 300),
)
def test_stride_is_never_off_by_more_than_the_number_of_sources(
    weights: dict[str, float], num_picks: int
) -> None:
    served = serve(make_rule("mix", "weights", {}, Assigned()), weights, num_picks)
    for name, weight in weights.items():
        fair = num_picks * weight / sum(weights.values())
        assert abs(served[name] - fair) <= len(weights)


def test_round_robin_takes_turns_through_restarts_and_endings() -> None:
    state = Assigned()
    picked: list[str] = []
    for left in ["abc", "abc", "ac", "ac", "abc", "abc", "abc"]:
        rule = make_rule("mix", "round-robin", {}, state)
        picked.append(rule.pick(shares(dict.fromkeys(left, 1.0), {}), no_draw))
    assert "".join(picked) == "abcabca"


def learn_many(state: Assigned, options: dict[str, object], successes: Mapping[str, float]) -> Mix:
    rule = make_rule("mix", "curriculum", options, state)
    for issue in range(200):
        for source, success in successes.items():
            group = judged(f"{source}-{issue}", [success], source=source)
            getattr(rule, "learn")(group, None)  # noqa: B009 - not a part of the hook
    return rule


def test_curriculum_prefers_the_half_solved_by_its_formula() -> None:
    rule = learn_many(Assigned(), {}, {"solved": 1.0, "half": 0.5, "hopeless": 0.0})
    sources = shares({"solved": 1.0, "half": 1.0, "hopeless": 2.0}, {})
    draw = draws(1)
    picked = Counter(rule.pick(sources, draw) for _ in range(20_000))
    worth = {"solved": 0.05, "half": 0.30, "hopeless": 0.10}
    for name, value in worth.items():
        assert picked[name] / 20_000 == pytest.approx(value / 0.45, abs=0.012)


def test_curriculum_shares_success_by_difficulty_and_counts_a_group_once() -> None:
    state = Assigned()
    rule = make_rule("mix", "curriculum", {"difficulty": {"a": 1, "b": 1}, "decay": 0.5}, state)
    learn = getattr(rule, "learn")  # noqa: B009 - not a part of the hook
    learn(judged("p0-1", [1.0], source="a"), None)
    learn(judged("p0-1", [1.0], source="a"), None)
    assert state["difficulty 1"]["p"] == 0.75
    learn(judged("p0-2", [0.0], source="b"), None)
    assert state["difficulty 1"]["p"] == 0.375


def test_an_untried_source_is_as_attractive_as_can_be() -> None:
    rule = learn_many(Assigned(), {}, {"solved": 1.0})
    sources = shares({"solved": 1.0, "new": 1.0}, {})
    draw = draws(2)
    picked = Counter(rule.pick(sources, draw) for _ in range(2_000))
    assert picked["new"] / 2_000 == pytest.approx(0.30 / 0.35, abs=0.03)


def test_the_same_draws_give_the_same_picks() -> None:
    logs: list[list[str]] = []
    for _ in range(2):
        rule = learn_many(Assigned(), {}, {"a": 0.2, "b": 0.7})
        draw = draws(7)
        logs.append([rule.pick(shares({"a": 1.0, "b": 1.0}, {}), draw) for _ in range(100)])
    assert logs[0] == logs[1]
    assert set(logs[0]) == {"a", "b"}
