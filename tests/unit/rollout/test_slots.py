# SPDX-License-Identifier: Apache-2.0
"""A node whose attempts all fail works less, and works fully again after the first success."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.unit.rollout.fake_dataflow import facts
from tests.unit.rollout.test_node import WORKFLOWS, bench

from penstock.rollout import slots
from penstock.rollout.slots import MAX_DELAY_S, MIN_FAILED, MIN_SLOTS, FailureBackoff


def test_requests_get_rarer_and_smaller_until_the_first_success() -> None:
    backoff = FailureBackoff()
    for _ in range(MIN_FAILED):
        assert backoff.next_request(256) == (0.0, 256)
        backoff.record(failed=True)
    asked = [backoff.next_request(256) for _ in range(12)]
    assert asked[0] == (0.1, 256) and asked[-1] == (MAX_DELAY_S, MIN_SLOTS)
    assert asked == sorted(asked, key=lambda one: (one[0], -one[1]))
    assert backoff.next_request(3) == (MAX_DELAY_S, 3)
    backoff.record(failed=False)
    assert backoff.next_request(256) == (0.0, 256)


async def test_a_node_does_not_spin_on_attempts_that_fail_at_once(
    tmp_path: Path, snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "MIN_DELAY_S", 0.001)
    failing = facts(workflow=f"{WORKFLOWS}:raises")
    async with bench(tmp_path, snapshot, num_slots=400, capacity=64, run_info=failing) as desk:
        await asyncio.wait_for(desk.dataflow.until_stored(200), 60)
        assert [lease.max_slots for lease in desk.dataflow.leases][:1] == [64]
        assert desk.dataflow.leases[-1].max_slots == MIN_SLOTS
