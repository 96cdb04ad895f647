# SPDX-License-Identifier: Apache-2.0
"""Deadlines follow a clock that nobody can set."""

from __future__ import annotations

import time

import pytest

from penstock.dataflow.service.process import monotonic_clock


@pytest.mark.parametrize("jump_s", [86_400.0, -86_400.0])
def test_a_jump_of_the_wall_clock_moves_no_deadline(
    monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    clock, wall = monotonic_clock(), time.time
    before = clock()
    assert abs(before - wall()) < 1.0, "people read it as the time of day"
    monkeypatch.setattr(time, "time", lambda: wall() + jump_s)
    assert 0.0 <= clock() - before < 1.0
