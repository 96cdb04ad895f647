# SPDX-License-Identifier: Apache-2.0
"""The learning rate by step: every shape starts at its peak and ends near 0."""

from __future__ import annotations

import pytest

from penstock.config import demo_config
from penstock.trainer.schedules import Schedule, Shape


@pytest.mark.parametrize("shape", [shape for shape in Shape if shape is not Shape.CONSTANT])
def test_a_falling_rate_ends_near_zero_and_never_rises(shape: Shape) -> None:
    schedule = Schedule(peak=2.0, shape=shape, num_steps=130)
    rates = [schedule.rate(number) for number in range(130)]
    assert rates[0] == 2.0 and 0.0 < rates[-1] < 0.06
    assert rates == sorted(rates, reverse=True) and schedule.rate(500) == 0.0


def test_warmup_stable_decay_falls_in_the_last_part_only() -> None:
    schedule = Schedule(peak=2.0, shape=Shape.WARMUP_STABLE_DECAY, warmup_steps=10, num_steps=110)
    rates = [schedule.rate(number) for number in range(110)]
    assert rates[4] == 1.0 and set(rates[9:80]) == {2.0}
    assert rates[95] == pytest.approx(1.0)


def test_the_demo_ends_with_a_falling_rate() -> None:
    """At a constant rate the reward of seed 0 fell from 0.999 to 0.888 in the last 22 steps."""
    assert demo_config(0).training.lr_scheduler_type == "warmup_stable_decay"
