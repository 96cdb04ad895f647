# SPDX-License-Identifier: Apache-2.0
"""Which ready groups go next: order, expiry against FIFO, and balance of tokens."""

import random
from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.dataflow.rules.rule_inputs import Assigned, candidate

from penstock.dataflow.rules import Select, builtin_rules, make_rule
from penstock.types import Candidate, Hook

CANDIDATES = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.integers(0, 500),
        st.lists(st.floats(-1, 1), min_size=1, max_size=4),
    ),
    max_size=20,
).map(
    lambda made: [
        candidate(n, oldest=oldest, tokens=tokens, rewards=rewards)
        for n, (oldest, tokens, rewards) in enumerate(made)
    ]
)


def select(name: str, **options: object) -> Select:
    return make_rule("select", name, options, Assigned())


def arrivals(chosen: Sequence[Candidate]) -> list[int]:
    return [group.arrival for group in chosen]


@pytest.mark.parametrize("name", builtin_rules()[Hook.SELECT])
@given(ready=CANDIDATES, count=st.integers(1, 25))
def test_gives_that_many_each_once(name: str, ready: list[Candidate], count: int) -> None:
    chosen = select(name).choose(ready, count)
    assert len(chosen) == len({group.group_id for group in chosen}) == min(count, len(ready))
    assert {group.group_id for group in chosen} <= {group.group_id for group in ready}


def test_orders() -> None:
    ready = [
        candidate(1, oldest=3, rewards=(0.0, 0.0, 0.0, 1.0)),
        candidate(2, oldest=1, rewards=(0.0, 0.0, 1.0, 1.0)),
        candidate(3, oldest=2, rewards=(0.5, 0.5, 0.5, 0.5)),
        candidate(4, oldest=1, rewards=(0.8, 1.0, 1.0, 1.0)),
    ]
    assert arrivals(select("edf").choose(ready, 3)) == [2, 4, 3]
    assert arrivals(select("fifo").choose(ready[::-1], 3)) == [1, 2, 3]
    assert arrivals(select("freshest").choose(ready, 3)) == [1, 3, 2]
    assert arrivals(select("priority").choose(ready, 4)) == [2, 1, 4, 3]
    assert arrivals(select("priority", by="middle").choose(ready, 4)) == [2, 3, 1, 4]


def expired(rule: Select, arriving: Sequence[Sequence[int]], *, bound: int, size: int) -> int:
    """Unit rows, integer steps: `arriving[v]` are the oldest versions of what arrives at v."""
    ready: list[Candidate] = []
    num_arrived = num_expired = 0
    for version in range(len(arriving) + bound + 2):
        for number in arriving[version] if version < len(arriving) else ():
            num_arrived += 1
            ready.append(candidate(num_arrived, oldest=number))
        alive = [group for group in ready if version - group.oldest <= bound]
        num_expired += len(ready) - len(alive)
        chosen = {group.group_id for group in rule.choose(alive, size)}
        ready = [group for group in alive if group.group_id not in chosen]
    return num_expired


def test_edf_never_expires_more_than_fifo() -> None:
    chance = random.Random(8)
    fewer = 0
    for _ in range(400):
        bound, size = chance.randint(0, 4), chance.randint(1, 4)
        arriving = [
            [max(0, now - chance.randint(0, bound)) for _ in range(chance.randint(0, 2 * size))]
            for now in range(25)
        ]
        by_deadline = expired(select("edf"), arriving, bound=bound, size=size)
        in_order = expired(select("fifo"), arriving, bound=bound, size=size)
        assert by_deadline <= in_order
        fewer += by_deadline < in_order
    assert fewer > 50, "the traces must tell the two apart"


def loads(chosen: Sequence[Candidate], parts: int) -> list[int]:
    """Tokens of each part, cut as the trainer cuts a batch."""
    each, extra = divmod(len(chosen), parts)
    ends = [part * each + min(part, extra) for part in range(parts + 1)]
    return [sum(g.tokens for g in chosen[start:end]) for start, end in pairwise(ends)]


def test_balanced_parts_are_nearly_as_even_as_can_be() -> None:
    """Two halves of up to 10 groups, against the best of all cuts."""
    chance = random.Random(9)
    for _ in range(200):
        num = 2 * chance.randint(1, 5)
        ready = [candidate(n, tokens=int(chance.lognormvariate(4, 1)) + 1) for n in range(num)]
        heaviest = max(loads(select("length-balanced", parts=2).choose(ready, num), 2))
        total = sum(group.tokens for group in ready)
        best = min(
            max(half, total - half)
            for picked in combinations(ready, num // 2)
            for half in [sum(group.tokens for group in picked)]
        )
        assert heaviest <= best * 4 / 3


def test_balanced_beats_the_order_of_arrival() -> None:
    chance = random.Random(10)
    ready = [candidate(n, tokens=int(chance.lognormvariate(6, 1))) for n in range(64)]
    tokens = sorted(group.tokens for group in ready)
    for parts in (2, 4, 8):
        balanced = max(loads(select("length-balanced", parts=parts).choose(ready, 64), parts))
        assert balanced < max(loads(select("fifo").choose(ready, 64), parts))
        with_the_longest = tokens[-1] + sum(tokens[: 64 // parts - 1])
        assert balanced <= 1.03 * max(with_the_longest, sum(tokens) / parts)


def test_balancing_never_costs_a_deadline() -> None:
    chance = random.Random(11)
    ready = [candidate(n, oldest=chance.randint(0, 3), tokens=n) for n in range(40)]
    chosen = select("length-balanced").choose(ready, 24)
    assert set(arrivals(chosen)) == set(arrivals(select("edf").choose(ready, 24)))
