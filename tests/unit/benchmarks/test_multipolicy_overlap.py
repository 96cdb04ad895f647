# SPDX-License-Identifier: Apache-2.0
"""Two policies in virtual time: the three schedules differ as they should, and where nothing is
uneven they do not."""

from __future__ import annotations

import pytest
from benchmarks.multipolicy_overlap import run_pair
from benchmarks.multipolicy_workload import pair


def test_a_version_barrier_costs_what_the_slower_trainer_takes_longer() -> None:
    workload = pair(sigma=0.0, rollout_to_train=2.0, steps=30, slowness=1.5)
    ours, barrier = (run_pair(workload, has_barrier=has_one) for has_one in (False, True))
    assert ours.verifier_s / ours.solver_s == pytest.approx(1.5, rel=0.03)
    assert barrier.solver_s / ours.solver_s == pytest.approx(1.5, rel=0.03)
    assert barrier.verifier_s == pytest.approx(ours.verifier_s, rel=0.03)


def test_without_a_tail_and_with_equal_trainers_a_cycle_takes_the_time_of_a_step() -> None:
    """All machines are busy in both; the batch fills the slots of the cycle in whole rounds."""
    workload = pair(sigma=0.0, rollout_to_train=1.0, steps=16)
    ours = run_pair(workload, has_barrier=False)
    assert workload.synchronous_s(is_by_turn=False) == pytest.approx(ours.solver_s, rel=0.03)


def test_the_longer_the_tail_the_more_a_cycle_takes() -> None:
    def cycle_over_ideal(sigma: float) -> float:
        workload = pair(sigma=sigma, rollout_to_train=2.0, steps=4)
        return workload.synchronous_s(is_by_turn=True) / workload.generate_s

    assert cycle_over_ideal(0.0) < cycle_over_ideal(0.5) < cycle_over_ideal(1.0)
