# SPDX-License-Identifier: Apache-2.0
"""Seeds by arithmetic instead of by state: whoever retries a slot, and wherever, draws the same
tokens.
"""

from __future__ import annotations

MASK_64 = 0xFFFF_FFFF_FFFF_FFFF
GAMMA = 0x9E37_79B9_7F4A_7C15


def splitmix(value: int) -> int:
    """The finaliser of splitmix64: a bijection of 64 bits in which every input bit matters."""
    value = (value ^ (value >> 30)) * 0xBF58_476D_1CE4_E5B9 & MASK_64
    value = (value ^ (value >> 27)) * 0x94D0_49BB_1331_11EB & MASK_64
    return value ^ (value >> 31)


def derive(seed: int, ordinal: int) -> int:
    """Seed number `ordinal` of the stream that `seed` names; fits a signed 64-bit field."""
    return splitmix(splitmix(seed & MASK_64) + (ordinal + 1) * GAMMA & MASK_64) >> 1
