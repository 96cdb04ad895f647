# SPDX-License-Identifier: Apache-2.0
"""The benchmark of deltas: its entropies are those of the textbook, and its ratios can fall."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks import weights_delta
from benchmarks.baselines import deltas

RNG = np.random.default_rng(0)
BASE = {"a": RNG.integers(0, 1 << 15, (64, 512), np.uint16), "b": np.zeros(7, np.uint16)}


def changed(share: float) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.uint16]]]:
    new = {name: bits.copy() for name, bits in BASE.items()}
    at = RNG.random(new["a"].shape) < share
    new["a"][at] ^= 1
    return new


def test_entropy_of_four_equal_symbols_is_two_bits() -> None:
    assert deltas.entropy_bytes(np.array([0, 1, 2, 3] * 100)) == pytest.approx(100.0)
    assert deltas.entropy_bytes(np.array([5] * 100)) == 0.0


def test_changes_are_gaps_and_steps_of_the_last_bit() -> None:
    base = {"a": np.array([0x0001, 0x8000, 0x3F80, 0x8001], np.uint16)}
    new = {"a": np.array([0x0001, 0x0000, 0x3F80, 0x8000], np.uint16)}
    gaps, steps = deltas.changes(base, new)
    assert gaps.tolist() == [1, 1]
    assert steps.tolist() == [1, 1], "-0 comes just before 0, and -1 step before -0"


def test_sizes_of_one_step() -> None:
    new = changed(0.01)
    found = weights_delta.sizes_of(BASE, new)
    num = int((new["a"] != BASE["a"]).sum())
    assert found.changed == num and found.index_and_value == 16 + 6 * num
    assert found.entropy < found.ours < found.index_and_value < found.full


def test_the_ratio_falls_when_our_side_sleeps() -> None:
    new = changed(0.01)
    plain = weights_delta.speeds(BASE, new, 3)
    slow = weights_delta.speeds(BASE, new, 3, slow_s=0.2)
    for name in ("encode_vs_memcpy", "apply_vs_memcpy"):
        assert slow[name] < plain[name] / 2
