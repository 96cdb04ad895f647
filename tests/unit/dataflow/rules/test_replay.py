# SPDX-License-Identifier: Apache-2.0
"""What is served again: which groups, how often, and within the bounds a host applies."""

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from tests.unit.dataflow.rules.rule_inputs import Assigned, candidate, draws, no_draw

from penstock.dataflow.rules import Replay, builtin_rules, make_rule
from penstock.types import Candidate, Hook


def replay(name: str, **options: object) -> Replay:
    return make_rule("replay", name, options, Assigned())


@pytest.mark.parametrize("name", builtin_rules()[Hook.REPLAY])
def test_carries_its_bounds(name: str) -> None:
    default = replay(name)
    assert (default.ratio, default.max_uses, default.max_staleness) == (0.3, 4, None)
    given = replay(name, ratio=0.5, max_uses=2, max_staleness=8)
    assert (given.ratio, given.max_uses, given.max_staleness) == (0.5, 2, 8)


@pytest.mark.parametrize("name", builtin_rules()[Hook.REPLAY])
@pytest.mark.parametrize("count", [0, 1, 5, 10, 30])
def test_gives_that_many_each_once(name: str, count: int) -> None:
    pool = [candidate(n, rewards=(0.0, n / 10)) for n in range(10)]
    chosen = replay(name).choose(pool, count, draws(count))
    assert len({group.group_id for group in chosen}) == len(chosen) == min(count, 10)


def test_newest_comes_first_and_needs_no_chance() -> None:
    pool = [candidate(n) for n in (3, 9, 1, 7)]
    assert [g.arrival for g in replay("newest").choose(pool, 3, no_draw)] == [9, 7, 3]


def test_uniform_is_uniform() -> None:
    pool = [candidate(n) for n in range(5)]
    draw, num_trials = draws(1), 10_000
    rule = replay("uniform")
    seen = Counter(g.arrival for _ in range(num_trials) for g in rule.choose(pool, 2, draw))
    expected = num_trials * 2 / 5
    assert sum((seen[n] - expected) ** 2 / (expected * 0.6) for n in range(5)) < 18.47


def test_prioritised_follows_the_distance_of_rewards() -> None:
    """First draws against the formula, chi-square of three degrees of freedom."""
    rewards = [(0.5, 0.5), (0.4, 0.6), (0.0, 0.0, 1.0), (0.0, 1.0)]
    distances = [0.0, 0.1, 4 / 9, 0.5]
    weights = [(distance + 1e-3) ** 0.6 for distance in distances]
    pool = [candidate(n, rewards=r) for n, r in enumerate(rewards)]
    draw, num_trials = draws(2), 20_000
    rule = replay("prioritised")
    seen = Counter(rule.choose(pool, 1, draw)[0].arrival for _ in range(num_trials))
    assert chi_square(seen, [num_trials * weight / sum(weights) for weight in weights]) < 16.27


def test_prioritised_draws_the_second_among_those_left() -> None:
    weights = [(distance + 1e-3) ** 0.6 for distance in (0.0, 0.05, 0.5)]
    pool = [candidate(n, rewards=r) for n, r in enumerate([(0.0, 0.0), (0.0, 0.1), (0.0, 1.0)])]
    draw, num_trials = draws(4), 20_000
    rule = replay("prioritised")
    seen = Counter(rule.choose(pool, 2, draw)[1].arrival for _ in range(num_trials))
    total = sum(weights)
    expected = [
        num_trials * sum(w / total * second / (total - w) for m, w in enumerate(weights) if m != n)
        for n, second in enumerate(weights)
    ]
    assert chi_square(seen, expected) < 13.82


def chi_square(seen: Counter[int], expected: Sequence[float]) -> float:
    return sum((seen[n] - e) ** 2 / e for n, e in enumerate(expected))


def test_prioritised_survives_the_largest_draw() -> None:
    pool = [candidate(n) for n in range(3)]
    assert len(replay("prioritised").choose(pool, 3, lambda: 1 - 2**-53)) == 3
    assert len(replay("uniform").choose(pool, 3, lambda: 1 - 2**-53)) == 3


@pytest.mark.parametrize("name", builtin_rules()[Hook.REPLAY])
def test_no_group_breaks_its_bounds_in_a_long_run(name: str) -> None:
    """A naive host filters by uses and staleness, the rule chooses; a list keeps the count."""
    chance, draw = random.Random(12), draws(3)
    rule = replay(name, ratio=0.5, max_uses=3, max_staleness=4)
    pool: dict[str, Candidate] = {}
    served: Counter[str] = Counter()
    replayed = 0
    for version in range(300):
        eligible = [
            group
            for group in pool.values()
            if group.uses < rule.max_uses and version - group.oldest <= (rule.max_staleness or 0)
        ]
        again = rule.choose(eligible, int(rule.ratio * 8), draw)
        fresh = [
            candidate(version * 8 + n, oldest=max(0, version - chance.randint(0, 2)))
            for n in range(8 - len(again))
        ]
        replayed += len(again)
        for group in [*fresh, *again]:
            served[group.group_id] += 1
            assert version - group.oldest <= 4
            pool[group.group_id] = candidate(
                group.arrival, oldest=group.oldest, uses=served[group.group_id]
            )
    assert max(served.values()) <= 3
    assert replayed >= 0.4 * 300 * 8
    assert {key: group.uses for key, group in pool.items()} == dict(served)
