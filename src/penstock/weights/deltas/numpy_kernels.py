# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of weight deltas in NumPy, on bit patterns: which elements changed, and by how much.

Owns the find and apply loops, which `numba_kernels` compiles, and the packing helpers both share.
Differences are computed on the monotone map of a float's bits (adjacent floats map to adjacent
integers, including −0 and +0), modulo 2^n. Map and difference are bijections, so every bit pattern
is restored exactly: NaN payloads, infinities, denormals. Knows no streams and no files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

BITS: Mapping[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
"""Item sizes with a sparse form; other tensors are sent in full or not at all."""
ESCAPE_GAP = 255
"""A gap byte of this value means that the remainder is the next long gap."""
ESCAPE_CODE = 3
"""A two-bit code of this value means that the remainder is the next large code."""
BLOCK_BYTES = 1 << 19
"""Elements compared per step; two chunks and the scratch fit in a core's cache."""
WINDOW_BYTES = 1 << 18
"""Number of values gathered before packing, to amortize call overhead."""

Bits = NDArray[Any]
"""A one-dimensional array of bit patterns: uint16 or uint32."""
Bytes = NDArray[np.uint8]
Positions = NDArray[np.int64]
LongGaps = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """The changes of one chunk, compact enough to keep a complete tensor's in memory."""

    num_elements: int
    num_changed: int
    lead: int
    """Unchanged elements before the first change; all elements if nothing changed."""
    trail: int
    """Unchanged elements after the last change."""
    gaps: Bytes
    """Unchanged elements before each change but the first, escaped at 255."""
    long_gaps: LongGaps
    codes: Bytes
    """Zigzag difference minus one (it is never zero), escaped at 3; four codes to a byte."""
    large_codes: Bits

    @property
    def num_bytes(self) -> int:
        """Memory of these changes, about the size of their streams before compression."""
        escaped_bytes = self.long_gaps.nbytes + self.large_codes.nbytes
        return self.num_changed + self.num_changed // 4 + escaped_bytes


class Kernels:
    """The inner loops; `NumbaKernels` gives bit-identical results."""

    chunk_bytes = BLOCK_BYTES
    """Best chunk size for `find`."""

    def find(self, base: Bits, new: Bits) -> tuple[Changes, Bits]:
        """Differences between two chunks of the same length, and the new bits where they differ:
        gathering those later would cost as much as the search."""
        positions = _differing(base, new)
        values = new[positions]
        if not len(positions):
            return unchanged(new), values
        zigzags = _zigzag(_monotone(values) - _monotone(base[positions]))
        gaps, long_gaps = split_gaps(np.diff(positions) - 1)
        codes = np.minimum(zigzags - 1, ESCAPE_CODE).astype(np.uint8)
        changes = Changes(
            num_elements=len(new),
            num_changed=len(positions),
            lead=int(positions[0]),
            trail=len(new) - 1 - int(positions[-1]),
            gaps=gaps,
            long_gaps=long_gaps,
            codes=pack_2bit(codes),
            large_codes=zigzags[codes == ESCAPE_CODE] - (ESCAPE_CODE + 1),
        )
        return changes, values

    def decode_positions(
        self, gaps: Bytes, long_gaps: LongGaps, low_bits: Bytes, shift: int, last: int
    ) -> Positions:
        """Ascending positions from gaps, after `last`.

        Each gap byte of 255 consumes the next of `long_gaps`. `low_bits` are the lowest `shift`
        bits of each gap; empty if `shift` is 0.
        """
        steps = merge_gaps(gaps, long_gaps)
        if shift:
            steps <<= shift
            steps += low_bits
        steps += 1
        steps[0] += last
        return np.cumsum(steps, out=steps)

    def decode_zigzags(self, codes: Bytes, large_codes: Bits) -> Bits:
        """Zigzag differences from codes; each code of 3 consumes the next of `large_codes`."""
        merged = codes.astype(large_codes.dtype) + 1
        if len(large_codes):
            merged[codes == ESCAPE_CODE] += large_codes
        return merged

    def apply(self, target: Bits, positions: Positions, zigzags: Bits) -> None:
        """Add the differences in place; positions are unique and inside the target."""
        target[positions] = _monotone(_monotone(target[positions]) + _unzigzag(zigzags))


def unchanged(new: Bits) -> Changes:
    return Changes(
        num_elements=len(new),
        num_changed=0,
        lead=len(new),
        trail=0,
        gaps=np.empty(0, np.uint8),
        long_gaps=np.empty(0, np.int64),
        codes=np.empty(0, np.uint8),
        large_codes=np.empty(0, new.dtype),
    )


def join_gaps(chunks: Iterable[Changes]) -> tuple[list[Bytes], list[LongGaps]]:
    """Gap bytes and long gaps of consecutive chunks, including gaps across chunk borders."""
    gaps: list[Bytes] = []
    long_gaps: list[LongGaps] = []
    carry = 0
    for chunk in chunks:
        if not chunk.num_changed:
            carry += chunk.lead
            continue
        gap = carry + chunk.lead
        carry = chunk.trail
        if gap >= ESCAPE_GAP:
            long_gaps.append(np.array([gap - ESCAPE_GAP]))
            gap = ESCAPE_GAP
        gaps += (_ONE_GAP[gap : gap + 1], chunk.gaps)
        if len(chunk.long_gaps):
            long_gaps.append(chunk.long_gaps)
    return gaps, long_gaps


_ONE_GAP = np.arange(ESCAPE_GAP + 1, dtype=np.uint8)


def split_gaps(gaps: NDArray[np.int64]) -> tuple[Bytes, LongGaps]:
    escaped = gaps[gaps >= ESCAPE_GAP] - ESCAPE_GAP
    return np.minimum(gaps, ESCAPE_GAP).astype(np.uint8), escaped


def merge_gaps(gaps: Bytes, long_gaps: LongGaps) -> NDArray[np.int64]:
    merged = gaps.astype(np.int64)
    if len(long_gaps):
        merged[gaps == ESCAPE_GAP] += long_gaps
    return merged


def join_codes(chunks: Iterable[Changes]) -> Iterator[Bytes]:
    """Codes of consecutive chunks, packed across their borders."""
    waiting: list[Bytes] = []
    num_waiting = 0
    for chunk in chunks:
        waiting.append(unpack_2bit(chunk.codes, chunk.num_changed))
        num_waiting += chunk.num_changed
        if num_waiting >= WINDOW_BYTES:
            codes = np.concatenate(waiting)
            num_even = len(codes) // 4 * 4
            yield pack_2bit(codes[:num_even])
            waiting, num_waiting = [codes[num_even:]], len(codes) - num_even
    yield pack_2bit(np.concatenate([*waiting, np.empty(0, np.uint8)]))


def join_large_codes(chunks: Iterable[Changes]) -> Iterator[Bits]:
    waiting: list[Bits] = []
    num_waiting = 0
    for chunk in chunks:
        waiting.append(chunk.large_codes)
        num_waiting += chunk.large_codes.nbytes
        if num_waiting >= WINDOW_BYTES:
            yield np.concatenate(waiting)
            waiting, num_waiting = [], 0
    if num_waiting:
        yield np.concatenate(waiting)


def pack_2bit(values: NDArray[Any]) -> Bytes:
    """Pack numbers 0–3, four to a byte, the first in the lowest bits; zero-padded."""
    padded = np.zeros(-(-len(values) // 4) * 4, np.uint8)
    padded[: len(values)] = values
    # Four bytes abcd times this sum of powers has a|b<<2|c<<4|d<<6 in its highest byte.
    folded = padded.view("<u4") * np.uint32(1 << 24 | 1 << 18 | 1 << 12 | 1 << 6)
    return (folded >> np.uint32(24)).astype(np.uint8)


_UNPACKED = (
    (np.arange(256, dtype=np.uint8)[:, None] >> np.arange(0, 8, 2, dtype=np.uint8)) & np.uint8(3)
).view("<u4")[:, 0]


def unpack_2bit(packed: Bytes, num_values: int) -> Bytes:
    return _UNPACKED[packed].view(np.uint8)[:num_values]


def count_threes(packed: Bytes) -> int:
    return int(np.bitwise_count(packed & packed >> np.uint8(1) & np.uint8(0x55)).sum())


def sum_2bit(packed: Bytes) -> int:
    twos, ones = packed & np.uint8(0xAA), packed & np.uint8(0x55)
    return int(2 * np.bitwise_count(twos).sum() + np.bitwise_count(ones).sum())


def to_planes(values: NDArray[Any]) -> list[Bytes]:
    """Byte planes, lowest first: as many as the largest value needs; none without values."""
    if not len(values):
        return []
    return split_planes(values, num_planes(int(values.max())))


def num_planes(max_value: int) -> int:
    return max(1, (max_value.bit_length() + 7) // 8)


def split_planes(values: NDArray[Any], num: int) -> list[Bytes]:
    rows = np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1)
    return [np.ascontiguousarray(rows[:, plane]) for plane in range(num)]


def from_planes(planes: Sequence[Bytes], part: slice, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The values at these positions of the planes."""
    if not planes:
        return np.empty(0, dtype)
    values = np.zeros((len(planes[0][part]), dtype.itemsize), np.uint8)
    for number, plane in enumerate(planes):
        values[:, number] = plane[part]
    return values.view(dtype)[:, 0]


def _differing(base: Bits, new: Bits) -> Positions:
    """Compare eight bytes at a time: most words are equal, and only the rest are checked per
    element."""
    per_word = 8 // new.itemsize
    num_paired = len(new) // per_word * per_word
    base_words, new_words = base[:num_paired].view("<u8"), new[:num_paired].view("<u8")
    words = np.flatnonzero(base_words != new_words)
    inside = np.flatnonzero((base_words[words] ^ new_words[words]).view(new.dtype))
    positions = words[inside // per_word] * per_word + inside % per_word
    if num_paired == len(new):
        return positions
    rest = np.flatnonzero(base[num_paired:] != new[num_paired:]) + num_paired
    return np.concatenate([positions, rest])


def _monotone(bits: Bits) -> Bits:
    """Map sign and magnitude to two's complement, in the order of the floats; an involution."""
    return bits ^ (_sign(bits) >> bits.dtype.type(1))


def _sign(bits: Bits) -> Bits:
    """All ones where the highest bit is set, else zero."""
    return -(bits >> bits.dtype.type(8 * bits.itemsize - 1))


def _zigzag(difference: Bits) -> Bits:
    """0, −1, 1, −2, 2 … to 0, 1, 2, 3, 4 …"""
    return (difference << difference.dtype.type(1)) ^ _sign(difference)


def _unzigzag(zigzags: Bits) -> Bits:
    one = zigzags.dtype.type(1)
    return (zigzags >> one) ^ -(zigzags & one)
