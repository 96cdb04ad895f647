# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from itertools import product

import pytest

from penstock.dataflow.core import pacing
from penstock.dataflow.core.pacing import Levels


def test_equals_the_published_form_when_nothing_is_skipped() -> None:
    """AReaL: (staleness + version + 1) * batch - (accepted + running), for all small integers."""
    for staleness, version, batch, accepted, running in product(range(3), repeat=5):
        theirs = (staleness + version + 1) * (batch + 1) - (accepted + running)
        consumed = version * (batch + 1)
        levels = Levels(issued=running, admitted=accepted - consumed, sealed=0)
        ours = pacing.room(levels, fresh=batch + 1, max_staleness=staleness, expected_yield=1.0)
        assert ours == theirs


@pytest.mark.parametrize(
    ("due", "committed", "max_staleness", "oldest"),
    [(0, 0, 1, 0), (1, 0, 1, 0), (2, 1, 1, 1), (5, 5, 0, 5), (2, 9, 1, 8), (9, 3, 1, 3)],
)
def test_oldest_version_a_node_may_serve(
    due: int, committed: int, max_staleness: int, oldest: int
) -> None:
    found = pacing.oldest_useful(due, committed=committed, max_staleness=max_staleness)
    assert max(0, found) == oldest


def test_yield_has_a_floor_and_recovers() -> None:
    value = 1.0
    for _ in range(500):
        value = pacing.next_yield(value, passed=False)
    assert value == pacing.YIELD_FLOOR
    for _ in range(500):
        value = pacing.next_yield(value, passed=True)
    assert value > 0.99
