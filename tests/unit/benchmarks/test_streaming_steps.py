# SPDX-License-Identifier: Apache-2.0
"""The arms do the same work, and the figures can fall."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.overlap_workload import Workload
from benchmarks.streaming_steps import Arm, Pair, measure

SMALL = Workload(
    steps=8, groups_per_batch=8, group_size=4, num_slots=32, max_staleness=0, rollout_to_train=1.0
)


def test_streaming_leaves_less_idle_time_and_no_less_work() -> None:
    pair = measure(SMALL)
    work = [(1 - arm.idle_share) * arm.step_s for arm in (pair.complete, pair.streamed)]
    assert work[0] == pytest.approx(work[1]), "synchronous: both train the same groups"
    assert pair.idle_ratio < 0.95 and pair.speedup > 1.05


def test_without_a_tail_and_without_waves_there_is_nothing_to_gain() -> None:
    at_once = replace(SMALL, sigma=0.0)
    assert measure(at_once).speedup == pytest.approx(1.0, abs=0.02)


def test_what_calls_cost_is_paid_per_instalment() -> None:
    assert measure(SMALL, call_s=2.0).speedup < measure(SMALL).speedup


def test_ratios_are_of_seconds() -> None:
    pair = Pair(complete=Arm(idle_share=0.5, step_s=4.0), streamed=Arm(idle_share=0.25, step_s=3.0))
    assert pair.idle_ratio == pytest.approx(0.375) and pair.speedup == pytest.approx(4 / 3)
