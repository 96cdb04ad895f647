# SPDX-License-Identifier: Apache-2.0
"""A trainer that stops for ever, at a small size: with `pace: any` the other goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.pacing_policies import Setting, measure

SMALL = Setting(train_s=0.05, window_s=1.0, groups_per_batch=4, group_size=2)


async def test_the_other_policy_goes_on_as_before(tmp_path: Path) -> None:
    rates = await measure(SMALL, tmp_path)
    assert rates.num_outpaced > 0, "its own budget was exhausted"
    assert rates.ratio > 0.4, "far from a flow that stops; only the benchmark can ask for 0.95"


@pytest.mark.parametrize("pace", ["all", "stops"])
async def test_another_pace_does_stop_it(tmp_path: Path, pace: str) -> None:
    setting = Setting(
        pace=pace, train_s=0.05, window_s=0.5, groups_per_batch=4, group_size=2, max_staleness=1
    )
    rates = await measure(setting, tmp_path)
    assert rates.ratio < 0.2, "the measurement sees a flow that stops"
