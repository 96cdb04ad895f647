# SPDX-License-Identifier: Apache-2.0
"""Pacing against drop-at-consume, at a small size: the comparison can fail."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.staleness import UNPACED, Trainer, Workload, compare, observe

SMALL = Workload(steps=25)


def test_pacing_wastes_little_and_the_trainer_waits_no_longer() -> None:
    found = compare(SMALL, [0])
    assert found.waste_pacing <= 0.02
    assert found.waste_pacing < found.waste_drop
    assert found.wait_ratio <= 1.05


def test_without_the_bound_the_same_core_wastes_what_overproduction_makes() -> None:
    """Nodes twice as fast as the trainer: not starting work is what keeps waste low."""
    fast = replace(SMALL, rollout_to_train=2.0)
    paced, dropped = (observe(fast, 0, paced=paced) for paced in (True, False))
    assert paced.stale / paced.generated < 0.05 < 0.3 < dropped.stale / dropped.generated
    assert paced.idle > 0.3 > dropped.idle


def test_longer_answers_than_the_bound_are_lost_in_every_mode() -> None:
    long = replace(SMALL, answers_per_step=1.0)
    assert long.floor > 0.15 > SMALL.floor
    paced = observe(long, 0, paced=True)
    assert paced.stale / paced.generated > 0.1, "no schedule saves them"


def test_both_modes_see_the_same_answers() -> None:
    draw = SMALL.answer(3)
    from penstock.dataflow.core.leasing import Grant
    from penstock.types import GroupId

    def grant(epoch: int) -> Grant:
        return Grant(group_id=GroupId("p0-7"), slot=2, epoch=epoch, attempt=1, task=0, seed=0)

    assert draw(grant(1)) == draw(grant(2))
    assert SMALL.max_staleness < UNPACED and Trainer.__doc__
