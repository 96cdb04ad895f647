# SPDX-License-Identifier: Apache-2.0
"""The figures of the autoscale benchmark are of what they say, and can fall."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from benchmarks.autoscale import Comparison, draw
from benchmarks.autoscale_virtual import (
    SHAPES,
    PoolResult,
    Scenario,
    fixed,
    make_autoscaler,
    simulate,
)

from penstock.dataflow.report.figures import BalanceSettings

SHORT = Scenario(steps=60, shape="sudden")
TERMS = BalanceSettings(max_gpus=SHORT.large)


def pool(seconds: float, nodes: int, *sizes: int) -> PoolResult:
    return PoolResult(
        seconds=seconds,
        node_s=nodes * seconds,
        wait_s=0.0,
        sizes=[(600.0 * i, size) for i, size in enumerate(sizes or (nodes,))],
        trainer_gpus=4,
    )


def test_savings_count_the_trainer_and_compare_with_the_cheaper_pool() -> None:
    found = Comparison(
        scenario=Scenario(),
        small=pool(7200.0, 4),
        large=pool(3600.0, 14),
        scaled=pool(3636.0, 8, 4, 6, 8, 7),
        oracle=pool(3600.0, 8),
    )
    assert found.cheaper_hours == 16.0
    assert found.saved == pytest.approx(1 - 12 * 1.01 / 16)
    assert found.wall_ratio == pytest.approx(1.01)
    assert found.needless_reversals == 1
    assert "autoscaler" in draw(found)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_run_needs_the_small_pool_first_and_never_more_than_the_large(shape: str) -> None:
    scenario = Scenario(shape=shape)
    needed = [scenario.needed(number) for number in range(scenario.steps + 1)]
    assert needed[0] in (scenario.small, scenario.small + 1)
    assert max(needed) in (scenario.large - 1, scenario.large)


def test_the_pool_grows_and_its_nodes_are_paid_from_their_order() -> None:
    found = simulate(SHORT, SHORT.small, make_autoscaler(), TERMS)
    assert found.sizes[-1][1] > SHORT.small and found.reversals == 0
    assert found.wait_fraction < simulate(SHORT, SHORT.small, fixed, TERMS).wait_fraction
    sizes = [*found.sizes, (found.seconds, 0)]
    paid_s = sum(size * (until - at) for (at, size), (until, _) in pairwise(sizes))
    assert found.node_s == pytest.approx(paid_s)


def test_a_rule_that_never_grows_saves_nothing() -> None:
    lazy = replace(TERMS, tau_high=0.94)
    found = simulate(SHORT, SHORT.small, make_autoscaler(), lazy)
    assert {size for _, size in found.sizes[SHORT.small - 1 :]} == {SHORT.small}
