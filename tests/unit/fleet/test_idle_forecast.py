# SPDX-License-Identifier: Apache-2.0
"""The predicted idle share is the arithmetic of its pipeline."""

from __future__ import annotations

import pytest

from penstock.fleet.idle_forecast import (
    Load,
    Pipeline,
    Tagging,
    has_perfect_schedule,
    predict_idle,
)

LOAD = Load(rollout_s=40.0, train_s=40.0, switch_s=0.2, micro_batches=4)
SPLIT, SHARED = Tagging(rollout=4, train=4), Tagging(both=8)


def test_dedicated_resources_wait_for_each_other() -> None:
    assert predict_idle(Pipeline.NAIVE, LOAD, SPLIT) == pytest.approx(0.5)
    assert predict_idle(Pipeline.OFF_POLICY, LOAD, SPLIT) == pytest.approx(0.0)
    assert predict_idle(Pipeline.MICRO_BATCH, LOAD, SPLIT) == pytest.approx(1 - 80 / (8 * 12.5))
    assert predict_idle(Pipeline.OFF_POLICY, LOAD, Tagging(rollout=2, train=6)) > 0.4


def test_shared_resources_lose_only_their_changes_over() -> None:
    step_s = (80 + 2 * 0.2 * 8) / 8
    expected = 1 - 80 / (8 * step_s)
    assert predict_idle(Pipeline.MULTIPLEXED, LOAD, SHARED) == pytest.approx(expected)
    twice = predict_idle(Pipeline.MULTIPLEXED, LOAD, SHARED, batches_per_visit=2)
    assert twice == pytest.approx(expected / 2, rel=0.05)


def test_who_can_only_roll_out_may_have_too_little_to_do() -> None:
    few = Load(rollout_s=10.0, train_s=70.0)
    tagging = Tagging(rollout=4, both=4)
    assert not has_perfect_schedule(few, tagging)
    assert predict_idle(Pipeline.MULTIPLEXED, few, tagging) == pytest.approx(1 - 80 / (8 * 17.5))
    assert has_perfect_schedule(LOAD, tagging) and has_perfect_schedule(few, SHARED)
    assert predict_idle(Pipeline.MULTIPLEXED, LOAD, tagging) == pytest.approx(0.0)
