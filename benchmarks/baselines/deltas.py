# SPDX-License-Identifier: Apache-2.0
"""How small others make a change of weights, how small it could be, and a plain copy.

The forms: index and new value (six bytes per change), exclusive or of the whole tensor through
zstd, and the order-0 entropy of gaps and differences: one histogram of each over the whole model,
which no code that treats changes as independent can beat."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import zstandard
from numpy.typing import NDArray

Bits = NDArray[np.uint16]


def index_and_value_bytes(num_changed: int) -> int:
    """A header, then a 32-bit index and a 16-bit value per change."""
    return 16 + 6 * num_changed


def xor_zstd_bytes(base: Mapping[str, Bits], new: Mapping[str, Bits]) -> int:
    packer = zstandard.ZstdCompressor(level=1)
    return sum(len(packer.compress((base[name] ^ bits).data)) for name, bits in new.items())


def changes(base: Mapping[str, Bits], new: Mapping[str, Bits]) -> tuple[NDArray[np.int64], ...]:
    """All gaps, and all differences in last bits on a scale where values are in order."""
    gaps: list[NDArray[np.int64]] = []
    steps: list[NDArray[np.int64]] = []
    for name, bits in new.items():
        old, now = base[name].ravel(), bits.ravel()
        at = np.flatnonzero(old != now)
        gaps.append(np.diff(at, prepend=-1) - 1)
        steps.append(_ordered(now[at]) - _ordered(old[at]))
    return np.concatenate(gaps), np.concatenate(steps)


def _ordered(bits: Bits) -> NDArray[np.int64]:
    wide = bits.astype(np.int64)
    return np.where(wide & 0x8000, ~wide & 0xFFFF, wide | 0x8000)


def entropy_bytes(*symbols: NDArray[np.int64]) -> float:
    total = 0.0
    for values in symbols:
        _, counts = np.unique(values, return_counts=True)
        total -= float((counts * np.log2(counts / values.size)).sum()) / 8
    return total


def copy(to: Mapping[str, Bits], new: Mapping[str, Bits]) -> None:
    """One thread, into memory that is there."""
    for name, bits in new.items():
        np.copyto(to[name], bits)
