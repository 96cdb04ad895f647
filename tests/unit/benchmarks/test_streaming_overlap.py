# SPDX-License-Identifier: Apache-2.0
"""Stages that stream overlap, at a small size; one that waits for all rows would show."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.streaming_overlap import Pair, Setting, measure


@pytest.mark.parametrize(
    ("streamed_s", "overlap"),
    [(1.0, 1.0), (3.0, 0.0), (1.4, 0.8)],
    ids=["as long as the longest stage", "as long as all of them", "in between"],
)
def test_overlap_is_the_share_of_what_a_barrier_serialises(
    streamed_s: float, overlap: float
) -> None:
    pair = Pair(streamed_s=streamed_s, stages_s=(1.0, 1.0, 1.0))
    assert pair.overlap == pytest.approx(overlap)


async def test_stages_overlap_row_by_row(tmp_path: Path) -> None:
    setting = Setting(num_rows=16, work_s=0.05, sigma=0.2)
    (pair,) = await measure(tmp_path, setting, num_pairs=1)
    assert all(stage_s >= 16 * 0.03 for stage_s in pair.stages_s), "each did all rows"
    assert pair.overlap > 0.4, "far from a barrier; only the benchmark can ask for 0.8"
