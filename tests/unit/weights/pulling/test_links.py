# SPDX-License-Identifier: Apache-2.0
"""The choice between deltas and full files, and speed measurement."""

from __future__ import annotations

import pytest

from penstock.weights.pulling.links import MIN_SAMPLE_BYTES, Throughput, Transfer, prefers_delta

MB = 1_000_000


@pytest.mark.parametrize(
    ("transfer", "delta_mb", "link_mb_s", "making_mb_s", "is_taken"),
    [
        ("full", 1, None, None, False),
        ("delta", 90, 1000, 1, True),
        ("auto", 90, None, None, True),
        ("auto", 90, 1000, None, True),
        ("auto", 90, None, 1, True),
        ("auto", 1, 2.5, 200, True),  # 0.4 + 0.5 s against 40 s
        ("auto", 90, 2.5, 200, True),  # 36 + 0.5 s against 40 s
        ("auto", 99, 2.5, 200, False),  # 39.6 + 0.5 s against 40 s
        ("auto", 1, 1000, 200, False),  # 0.501 s against 0.1 s
        ("auto", 1, 199, 200, False),  # 0.505 s against 0.503 s
        ("auto", 1, 197, 200, True),  # 0.505 s against 0.508 s
    ],
)
def test_the_delta_is_taken_when_the_file_is_expected_sooner(
    transfer: Transfer,
    delta_mb: int,
    link_mb_s: float | None,
    making_mb_s: float | None,
    is_taken: bool,
) -> None:
    found = prefers_delta(
        transfer,
        delta_bytes=delta_mb * MB,
        file_bytes=100 * MB,
        link_bytes_per_s=link_mb_s and link_mb_s * MB,
        rebuild_bytes_per_s=making_mb_s and making_mb_s * MB,
    )
    assert found is is_taken


def test_a_speed_decays_and_ignores_tiny_transfers() -> None:
    speed = Throughput()
    assert speed.bytes_per_s is None
    speed.add(MIN_SAMPLE_BYTES - 1, 1.0)
    assert speed.bytes_per_s is None
    speed.add(100 * MB, 10.0)
    assert speed.bytes_per_s == pytest.approx(10 * MB)
    speed.add(100 * MB, 1.0)
    assert 15 * MB < (speed.bytes_per_s or 0) < 40 * MB
    for _ in range(10):
        speed.add(100 * MB, 1.0)
    assert speed.bytes_per_s == pytest.approx(100 * MB, rel=0.05)


def test_a_start_unlike_the_rest_is_left_out_and_doubt_makes_faster() -> None:
    speed = Throughput(num_warmup=1)
    speed.add(100 * MB, 1000.0)
    assert speed.bytes_per_s is None
    speed.add(100 * MB, 10.0)
    assert speed.bytes_per_s == pytest.approx(10 * MB)
    for _ in range(7):
        speed.decay()
    assert (speed.bytes_per_s or 0) > 20 * MB
