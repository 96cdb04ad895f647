# SPDX-License-Identifier: Apache-2.0
"""A segment leaves the disk as a whole, so a small `dataflow.keep_mb` needs small segments."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.contract.dataflow_server import small_config

from penstock.dataflow.ledger import segments
from penstock.dataflow.ledger.compaction import Compactor
from penstock.dataflow.service.build import build

MB = 1 << 20


async def test_a_small_bound_is_held_on_the_disk_too(tmp_path: Path) -> None:
    """Rows that nobody needs, 40 MB of them, with a bound of 1 MB."""
    config = small_config()
    flow = config.dataflow.model_copy(update={"keep_mb": 1})
    service = build(config.model_copy(update={"dataflow": flow}), tmp_path)
    ledger = service.process.ledger
    for _ in range(40):
        ledger.place(bytes(MB))
    await ledger.write(())
    await Compactor(ledger).sweep()
    left = sum(segments.sizes(ledger.segments_folder).values())
    assert left <= 2 * 16 * MB + 2 * MB, "the open segment and the one before it"
    service.close()


@pytest.mark.parametrize(
    ("keep_mb", "segment_mb"), [(1, 16), (64, 16), (400, 100), (1024, 256), (9000, 256)]
)
def test_segments_are_a_quarter_of_what_is_kept_within_limits(
    keep_mb: int, segment_mb: int
) -> None:
    assert segments.segment_bytes(keep_mb * MB) == segment_mb * MB
