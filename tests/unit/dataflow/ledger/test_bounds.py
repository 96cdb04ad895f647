# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.dataflow.ledger.bounds import DiskReserve, StorageLimits, Usage
from penstock.errors import Busy, StorageFull

MB = 1 << 20
BOUNDS = StorageLimits(
    max_queued_bytes=100 * MB,
    high_water_queued_bytes=50 * MB,
    min_free_bytes=64 * MB,
    low_water_free_bytes=500 * MB,
)


OPEN, NO_LEASES, REFUSE = range(3)


def level(now: Usage) -> int:
    try:
        BOUNDS.check_delivery(now, 0)
    except (Busy, StorageFull):
        assert not BOUNDS.may_lease(now)
        return REFUSE
    return OPEN if BOUNDS.may_lease(now) else NO_LEASES


def usage(*, queued: int = 0, free: int = 10_000) -> Usage:
    return Usage(queued_bytes=queued * MB, free_bytes=free * MB)


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (usage(), OPEN),
        (usage(queued=49), OPEN),
        (usage(queued=50), NO_LEASES),
        (usage(queued=100), NO_LEASES),
        (usage(queued=101), REFUSE),
        (usage(free=500), OPEN),
        (usage(free=499), NO_LEASES),
        (usage(free=64), NO_LEASES),
        (usage(free=63), REFUSE),
        (usage(queued=10, free=73), REFUSE),
    ],
)
def test_leases_stop_at_the_mark_and_deliveries_at_the_cap(now: Usage, expected: int) -> None:
    assert level(now) == expected


def test_a_refusal_says_when_to_come_back() -> None:
    with pytest.raises(StorageFull, match="64 MB") as disk:
        BOUNDS.check_delivery(usage(free=65), 2 * MB)
    with pytest.raises(Busy, match="100 MB") as memory:
        BOUNDS.check_delivery(usage(queued=99), 2 * MB)
    assert (disk.value.status, memory.value.status) == (507, 429)
    assert disk.value.retry_after_s and memory.value.retry_after_s
    BOUNDS.check_delivery(usage(free=66), 2 * MB)
    BOUNDS.check_delivery(usage(queued=98), 2 * MB)


def test_a_call_larger_than_the_cap_is_let_in_alone() -> None:
    BOUNDS.check_delivery(usage(), 200 * MB)
    with pytest.raises(Busy):
        BOUNDS.check_delivery(usage(queued=1), 200 * MB)


@given(queued=st.integers(0, 300), free=st.integers(-100, 1000), more=st.integers(0, 300))
def test_fuller_never_allows_more(queued: int, free: int, more: int) -> None:
    before = level(usage(queued=queued, free=free))
    assert level(usage(queued=queued + more, free=free)) >= before
    assert level(usage(queued=queued, free=free - more)) >= before


def test_marks_that_contradict_are_refused() -> None:
    with pytest.raises(ValueError, match="memory mark"):
        StorageLimits(max_queued_bytes=1, high_water_queued_bytes=2)
    with pytest.raises(ValueError, match="low_water_free_bytes"):
        StorageLimits(min_free_bytes=2, low_water_free_bytes=1)


def test_the_reserve_is_real_space(tmp_path: Path) -> None:
    reserve = DiskReserve(tmp_path, 3 * MB)
    reserve.allocate_if_room()
    found = (tmp_path / "reserve").stat()
    assert reserve.is_held and found.st_blocks * 512 >= 3 * MB
    assert reserve.release() and not reserve.release()
    assert not (tmp_path / "reserve").exists() and reserve.missing_bytes == 3 * MB
    reserve.allocate_if_room()
    assert reserve.is_held and reserve.missing_bytes == 0


def test_a_reserve_never_takes_the_last_space(tmp_path: Path) -> None:
    free = DiskReserve(tmp_path, 0).free_bytes()
    reserve = DiskReserve(tmp_path, free - MB)
    reserve.allocate_if_room()
    assert not reserve.is_held and not (tmp_path / "reserve").exists()
