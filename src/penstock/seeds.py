# SPDX-License-Identifier: Apache-2.0
"""Seeds are computed, not drawn from state: a retry of a slot uses the same seeds on any node."""

from __future__ import annotations

MASK_64 = 0xFFFF_FFFF_FFFF_FFFF
GAMMA = 0x9E37_79B9_7F4A_7C15


def splitmix(value: int) -> int:
    """The finalizer of splitmix64: a bijection on 64 bits with full avalanche."""
    value = (value ^ (value >> 30)) * 0xBF58_476D_1CE4_E5B9 & MASK_64
    value = (value ^ (value >> 27)) * 0x94D0_49BB_1331_11EB & MASK_64
    return value ^ (value >> 31)


def derive(seed: int, ordinal: int) -> int:
    """Seed number `ordinal` of the stream identified by `seed`; fits a signed 64-bit field."""
    return splitmix(splitmix(seed & MASK_64) + (ordinal + 1) * GAMMA & MASK_64) >> 1
