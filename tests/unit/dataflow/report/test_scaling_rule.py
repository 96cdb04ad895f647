# SPDX-License-Identifier: Apache-2.0
"""The three-zone rule as a table with its edges, and each damping rule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.dataflow.report.figures import BalanceSettings, RuleMemory, StepTiming
from penstock.dataflow.report.scaling_rule import PoolWindow, decide, wait_fraction, zone
from penstock.dataflow.report.shape import ActionReport, ScalingBranch

TERMS = BalanceSettings(tau_low=0.05, tau_high=0.10)
UP, HOLD, DOWN = ScalingBranch.SCALE_UP, ScalingBranch.HOLD, ScalingBranch.SCALE_DOWN


def pool(
    gpus: int = 10, wait: float | None = 0.07, need: float | None = 1.0, *, pending: int = 0
) -> PoolWindow:
    return PoolWindow(
        gpus=gpus,
        pending_gpus=pending,
        wait_fraction=wait,
        need=need,
        is_loading_weights=False,
        window_s=100.0,
        start_s=0.0,
    )


@pytest.mark.parametrize(
    ("wait", "consumed", "entered", "gpus", "branch", "target"),
    [
        # above tau_high: ceil(1.1 * G / (1 - w))
        (0.1000001, 90, 100, 10, UP, 13),
        (0.11, 0, 0, 8, UP, 10),
        (0.20, 100, 100, 8, UP, 11),
        (0.30, 100, 100, 7, UP, 11),
        (0.50, 100, 100, 1, UP, 3),
        (0.95, 100, 100, 4, UP, 88),
        (1.00, 100, 100, 4, UP, 88),
        # at the edges: hold
        (0.10, 10, 100, 10, HOLD, 10),
        (0.05, 10, 100, 10, HOLD, 10),
        (0.07, 10, 100, 10, HOLD, 10),
        # below tau_low: min(G, ceil(G * 1.1 * consumed / entered))
        (0.0499999, 50, 100, 10, DOWN, 6),
        (0.0, 50, 100, 10, DOWN, 6),
        (0.0, 1, 100, 10, DOWN, 1),
        (0.0, 90, 100, 10, HOLD, 10),
        (0.0, 91, 100, 10, HOLD, 10),
        (0.0, 100, 100, 10, HOLD, 10),
        (0.0, 200, 100, 10, HOLD, 10),
        (0.0, 10, 11, 10, HOLD, 10),
        # nothing moved, or nothing was measured
        (0.0, 0, 100, 10, HOLD, 10),
        (0.0, 100, 0, 10, HOLD, 10),
        (None, 10, 100, 10, HOLD, 10),
        (0.0, 50, 100, 1, HOLD, 1),
        (0.5, 50, 100, 0, UP, 0),
    ],
)
def test_the_zones(
    wait: float | None, consumed: int, entered: int, gpus: int, branch: ScalingBranch, target: int
) -> None:
    need = consumed / entered if consumed and entered else None
    assert zone(gpus, wait, need, TERMS) == (branch, target)


def test_waits_are_weighed_by_time_and_capped() -> None:
    fast = [StepTiming(wait_s=0.9, step_s=1.0)] * 9
    slow = [StepTiming(wait_s=0.0, step_s=91.0)]
    assert wait_fraction([*fast, *slow]) == pytest.approx(0.081)
    assert wait_fraction([StepTiming(wait_s=99.9, step_s=100.0)]) == 0.95
    assert wait_fraction([]) is None
    assert wait_fraction([StepTiming(wait_s=0.0, step_s=0.0)]) is None


def test_an_action_is_remembered_and_cooled_down() -> None:
    verdict = decide(pool(wait=0.3), RuleMemory(), TERMS, now=1000.0)
    assert (verdict.branch, verdict.target_gpus, verdict.delta_gpus) == (UP, 15, 5)
    assert verdict.memory.last_action == ActionReport(
        branch=UP, at=1000.0, gpus_before=10, target_gpus=15
    )
    assert verdict.memory.cooldown_until == 1200.0, "two windows of 100 s"
    again = decide(pool(wait=0.3), verdict.memory, TERMS, now=1199.9)
    assert again.branch is HOLD and "cooling down" in again.reason
    assert again.memory.last_action == verdict.memory.last_action
    assert decide(pool(wait=0.3), again.memory, TERMS, now=1200.0).branch is UP


@pytest.mark.parametrize(
    ("measured_s", "configured_s", "until"),
    [(300.0, 0.0, 450.0), (0.0, 600.0, 900.0), (10.0, 20.0, 200.0)],
)
def test_slow_starts_extend_the_cooldown(
    measured_s: float, configured_s: float, until: float
) -> None:
    terms = replace(TERMS, node_start_s=configured_s)
    verdict = decide(replace(pool(wait=0.3), start_s=measured_s), RuleMemory(), terms, now=0.0)
    assert verdict.memory.cooldown_until == until


def test_shrinking_needs_two_low_windows_in_a_row() -> None:
    low, fine = pool(wait=0.0, need=0.5), pool(wait=0.07, need=0.5)
    memory = decide(low, RuleMemory(), TERMS, now=0.0).memory
    assert memory.low_windows == 1
    memory = decide(fine, memory, TERMS, now=100.0).memory
    assert memory.low_windows == 0, "one window between them starts the count again"
    first = decide(low, memory, TERMS, now=200.0)
    assert first.branch is HOLD and "needs 2 such windows in a row, 1 so far" in first.reason
    second = decide(low, first.memory, TERMS, now=300.0)
    assert (second.branch, second.target_gpus, second.delta_gpus) == (DOWN, 6, -4)
    assert second.memory.low_windows == 0


@pytest.mark.parametrize(
    ("gpus", "wait", "target"), [(10, 0.95, 15), (1, 0.95, 2), (3, 0.95, 5), (10, 0.12, 13)]
)
def test_growth_is_at_most_half_of_the_pool_at_once(gpus: int, wait: float, target: int) -> None:
    assert decide(pool(gpus, wait), RuleMemory(), TERMS, now=0.0).target_gpus == target


@pytest.mark.parametrize(("gpus", "target"), [(10, 5), (9, 4), (2, 1), (1, 1)])
def test_shrinking_is_at_most_half_of_the_pool_at_once(gpus: int, target: int) -> None:
    verdict = decide(pool(gpus, 0.0, 0.001), RuleMemory(low_windows=1), TERMS, now=0.0)
    assert verdict.target_gpus == target


def test_pending_joins_are_capacity() -> None:
    verdict = decide(pool(wait=0.3, pending=3), RuleMemory(), TERMS, now=0.0)
    assert (verdict.target_gpus, verdict.delta_gpus) == (15, 2), "five needed, three pending"
    covered = decide(pool(wait=0.3, pending=5), RuleMemory(), TERMS, now=0.0)
    assert covered.branch is HOLD and "5 GPUs are already starting" in covered.reason
    assert covered.memory.last_action is None, "no action, no cool-down"
    resting = decide(pool(pending=4), RuleMemory(), TERMS, now=0.0)
    assert (resting.branch, resting.delta_gpus) == (HOLD, 0)


def test_the_pool_stays_within_its_bounds() -> None:
    terms = replace(TERMS, min_gpus=4, max_gpus=12)
    assert decide(pool(10, 0.5), RuleMemory(), terms, now=0.0).target_gpus == 12
    full = decide(pool(12, 0.5), RuleMemory(), terms, now=0.0)
    assert full.branch is HOLD and "max_gpus" in full.reason
    assert decide(pool(6, 0.0, 0.1), RuleMemory(low_windows=1), terms, now=0.0).target_gpus == 4
    least = decide(pool(4, 0.0, 0.1), RuleMemory(low_windows=1), terms, now=0.0)
    assert least.branch is HOLD and "min_gpus" in least.reason
    few = decide(pool(1, None, None), RuleMemory(), terms, now=0.0)
    assert (few.branch, few.target_gpus) == (
        UP,
        4,
    ) and "outside its bounds (min_gpus 4, max_gpus 12)" in few.reason
    many = decide(pool(14, 0.07), RuleMemory(), terms, now=0.0)
    assert (many.branch, many.target_gpus) == (DOWN, 12)
    waiting = decide(pool(14, 0.5), RuleMemory(), terms, now=0.0)
    assert (waiting.branch, waiting.target_gpus) == (DOWN, 12)


def test_loading_weights_and_incomplete_windows_hold() -> None:
    loading = decide(replace(pool(wait=0.5), is_loading_weights=True), RuleMemory(), TERMS, now=0.0)
    assert loading.branch is HOLD and "loading weights" in loading.reason
    first = decide(replace(pool(wait=0.5), complete=False), RuleMemory(), TERMS, now=0.0)
    assert first.branch is HOLD and "first window" in first.reason
