# SPDX-License-Identifier: Apache-2.0
"""The bound is one, the schedules are what they say, and the figures can fall."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.async_overlap import equal_machines, per_slot, point
from benchmarks.overlap_real import run_on_wall_clock
from benchmarks.overlap_virtual import flow
from benchmarks.overlap_workload import (
    BusyInterval,
    Window,
    Workload,
    barrier_s,
    bound_s,
    one_step_off_s,
    synchronous_s,
)

SMALL = Workload(
    steps=16, groups_per_batch=8, group_size=4, num_slots=8, max_tokens=2000, max_staleness=2
)


def _best_s(answers_s: list[float], *, num_batches: int, num_slots: int, train_s: float) -> float:
    """Every order of the answers on the slots and into batches, tried one by one."""
    best, size = float("inf"), len(answers_s) // num_batches
    for order in itertools.permutations(answers_s):
        free_at, ends = [0.0] * num_slots, list[float]()
        for answer_s in order:
            free_at.sort()
            free_at[0] += answer_s
            ends.append(free_at[0])
        trained_at = 0.0
        for batch in range(num_batches):
            ready_at = sorted(ends)[(batch + 1) * size - 1]
            trained_at = max(trained_at, ready_at) + train_s
        best = min(best, trained_at)
    return best


@pytest.mark.parametrize("train_s", [0.1, 1.0, 5.0])
def test_no_schedule_beats_the_bound_and_some_come_near(train_s: float) -> None:
    rng = random.Random(7)
    worst = 1.0
    for num_slots in (1, 2, 3):
        answers_s = [rng.lognormvariate(0.0, 1.0) for _ in range(6)]
        bound = bound_s(answers_s, num_batches=3, num_slots=num_slots, train_s=train_s)
        best = _best_s(answers_s, num_batches=3, num_slots=num_slots, train_s=train_s)
        assert bound <= best + 1e-9
        worst = min(worst, bound / best)
    assert worst > 0.6, "a bound far below every schedule would say nothing"


def test_one_slot_and_instant_training_reach_the_bound_exactly() -> None:
    answers_s = [3.0, 1.0, 2.0, 5.0]
    assert bound_s(answers_s, num_batches=2, num_slots=1, train_s=0.0) == 11.0
    assert barrier_s(answers_s, 1) == 11.0


def test_schedules_with_a_barrier() -> None:
    assert barrier_s([3.0, 1.0, 2.0, 5.0], 2) == 8.0, "the last begins at 3, behind 1 and 2"
    assert synchronous_s([4.0, 2.0, 6.0], 3.0) == 12.0 + 9.0
    assert one_step_off_s([4.0, 2.0, 6.0], 3.0) == 4.0 + 3.0 + 6.0 + 3.0


def test_a_window_counts_only_what_lies_in_it() -> None:
    window = Window(begin=10.0, end=20.0, num_batches=2)
    busy_intervals = [
        BusyInterval(began_at=5.0, seconds=10.0),
        BusyInterval(began_at=18.0, seconds=float("inf")),
    ]
    assert window.fraction(busy_intervals, num_slots=1, train_s=1.0) == pytest.approx(0.7)
    assert window.fraction(busy_intervals, num_slots=1, train_s=4.5) == pytest.approx(0.9)


def test_expected_length_is_that_of_the_draws() -> None:
    workload = Workload(sigma=1.5)
    drawn = [workload.tokens(issue, slot) for issue in range(2000) for slot in range(8)]
    assert sum(drawn) / len(drawn) == pytest.approx(workload.expected_tokens, rel=0.03)
    assert max(drawn) == workload.max_tokens


def test_gains_multiply_and_each_has_its_cause() -> None:
    same = point(replace(SMALL, sigma=0.0, rollout_to_train=1.0))
    assert same.tail_gain == pytest.approx(1.0, abs=0.02), "equal lengths have no tail"
    assert same.overlap_gain > 1.8
    long = point(replace(SMALL, rollout_to_train=4.0))
    assert long.tail_gain > long.overlap_gain > 1.0
    assert long.speedup == pytest.approx(long.tail_gain * long.overlap_gain)


@pytest.mark.parametrize("ratio", [2.0, 0.5])
def test_the_core_comes_near_the_bound_and_a_slower_one_does_not(ratio: float) -> None:
    workload = replace(SMALL, rollout_to_train=ratio)
    found = flow(workload)
    assert len(found.busy_intervals) == workload.steps * workload.rows_per_batch
    assert found.whole_fraction < found.fraction <= 1.0 + 1e-9
    assert found.fraction > 0.97
    slowed = flow(workload, call_s=1.0)
    assert slowed.fraction < found.fraction - 0.03
    assert slowed.whole_fraction < found.whole_fraction - 0.03


def test_too_tight_a_bound_on_staleness_wastes_what_no_batch_takes() -> None:
    """What limits the fraction: versions must not pass faster than the longest answer runs."""
    loose = flow(replace(SMALL, sigma=1.5, max_tokens=4000, max_staleness=6, steps=24))
    tight = flow(replace(SMALL, sigma=1.5, max_tokens=4000, max_staleness=1, steps=24))
    assert loose.lost < 0.01 < 0.05 < tight.lost
    assert tight.fraction < 0.95


def test_other_batch_sizes_have_as_many_answers_and_enough_staleness() -> None:
    here = per_slot(Workload(steps=32), 1)
    assert here.rows_per_batch == here.num_slots
    assert here.steps * here.rows_per_batch == 32 * Workload().rows_per_batch
    assert here.max_staleness > here.max_tokens / here.expected_tokens


def test_with_equal_machines_and_equal_lengths_nothing_is_gained() -> None:
    """Overlap alone needs the machines of both; only the tail is gained for nothing."""
    balanced = point(replace(SMALL, sigma=0.0, rollout_to_train=1.0))
    filling = 1 / (SMALL.steps + 1)
    assert equal_machines(balanced, 1.0) == pytest.approx(1.0 - filling, abs=0.02)
    tailed = point(replace(SMALL, rollout_to_train=1.0))
    assert equal_machines(tailed, 1.0) > 1.3


@pytest.mark.slow
def test_the_point_on_the_clock_runs_the_real_service(tmp_path: Path) -> None:
    tiny = Workload(
        steps=3, groups_per_batch=4, group_size=4, num_slots=8, mean_tokens=20, max_tokens=60
    )
    found = run_on_wall_clock(tmp_path, tiny, token_s=0.02)
    assert 0.2 < found.fraction <= 1.0
    assert found.gap_ms > 0.0
