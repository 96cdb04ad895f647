# SPDX-License-Identifier: Apache-2.0
"""The figures of the bubbles benchmark are of what they say, and can rise."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.bubbles import Measured
from benchmarks.bubbles_virtual import WORKLOAD, Point, simulate

from penstock.dataflow.core.multiplexing import SwitchTrigger
from penstock.fleet.idle_forecast import Pipeline

SHORT = replace(WORKLOAD, steps=20, groups_per_batch=16, group_size=4)
MIXED = Point(pipeline=Pipeline.MULTIPLEXED, ratio=2.0, rollout_only=4, workload=SHORT)


def test_shared_resources_lose_only_their_changes_over() -> None:
    """Time in which a node trains must not count as slow generation: it would get less work."""
    account = simulate(MIXED)
    found = Measured(point=MIXED, account=account)
    assert found.has_perfect_schedule and found.error < 0.012
    assert 0.015 < account.switch_s / account.total_s < account.idle
    assert account.lane_idle < 0.015
    assert set(account.triggers) == {SwitchTrigger.SAMPLES, SwitchTrigger.TAG_RETURNED}


def test_a_costlier_change_is_more_idle_time() -> None:
    costly = simulate(replace(MIXED, switch_share=0.2, workload=replace(SHORT, max_staleness=1)))
    assert costly.idle > 0.1 and costly.switch_s / costly.total_s > 0.1


def test_a_barrier_leaves_resources_idle() -> None:
    naive = Point(pipeline=Pipeline.NAIVE, ratio=1.0, workload=SHORT)
    account = simulate(naive)
    assert account.idle > 0.5 and Measured(point=naive, account=account).error < 0.05
    assert account.train_s / account.total_s < 0.25


def test_slots_that_wait_for_the_whole_node_are_idle() -> None:
    stream = Point(pipeline=Pipeline.OFF_POLICY, ratio=1.0, workload=SHORT)
    batch = simulate(replace(stream, batch_dispatch=True))
    assert batch.lane_idle > 0.4 > 0.05 > simulate(stream).lane_idle
