# SPDX-License-Identifier: Apache-2.0
"""The loops of `numpy_kernels`, compiled with numba (extra `fast`); bit-identical results.

Each loop is compiled on first use per item size, in under a second. It is not cached on disk: numba
would put its cache next to the sources of an installed package.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from threading import Lock, local
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from penstock.weights.deltas.numpy_kernels import (
    BLOCK_BYTES,
    ESCAPE_CODE,
    ESCAPE_GAP,
    Bits,
    Bytes,
    Changes,
    Kernels,
    LongGaps,
    Positions,
    unchanged,
)

Array = NDArray[Any]
Counts = tuple[Any, Any, Any, Any, Any]
"""Changes, long gaps, large codes; first and last position."""
_numba: Any = importlib.import_module("numba")


class NumbaKernels(Kernels):
    """Unaligned tensors, which are rare, use the NumPy kernels."""

    chunk_bytes = 4 * BLOCK_BYTES
    """Large chunks: the compiled loops release the GIL, so other threads can run."""

    def __init__(self) -> None:
        self._scratches = local()

    def find(self, base: Bits, new: Bits) -> tuple[Changes, Bits]:
        num_paired = new.nbytes // 8 * 8 // new.itemsize
        base_words, new_words = base[:num_paired].view("<u8"), new[:num_paired].view("<u8")
        if not (base_words.flags.aligned and new_words.flags.aligned):
            return super().find(base, new)
        out = self._scratch(len(new), new.dtype)
        count, num_long_gaps, num_large_codes, first, last = _compiled(_find, new.itemsize)(
            base_words, new_words, base, new,
            out.words, out.positions_found, out.gaps, out.long_gaps, out.codes, out.large_codes,
            out.values,
        )  # fmt: skip
        if not count:
            return unchanged(new), new[:0]
        changes = Changes(
            num_elements=len(new),
            num_changed=count,
            lead=first,
            trail=len(new) - 1 - last,
            gaps=out.gaps[1:count].copy(),
            long_gaps=out.long_gaps[:num_long_gaps].copy(),
            codes=out.codes[: -(-count // 4)].copy(),
            large_codes=out.large_codes[:num_large_codes].copy(),
        )
        return changes, out.values[:count].copy()

    def _scratch(self, num_elements: int, dtype: np.dtype[Any]) -> _Scratch:
        """Per-thread scratch memory: allocating it for each chunk would cost more than the
        search."""
        found = getattr(self._scratches, f"items{dtype.itemsize}", None)
        if found is None or len(found.gaps) < num_elements:
            found = _Scratch.for_elements(
                max(num_elements, self.chunk_bytes // dtype.itemsize), dtype
            )
            setattr(self._scratches, f"items{dtype.itemsize}", found)
        return found

    def decode_positions(
        self, gaps: Bytes, long_gaps: LongGaps, low_bits: Bytes, shift: int, last: int
    ) -> Positions:
        positions = np.empty(len(gaps), np.int64)
        _compiled(_decode_positions, 1)(gaps, long_gaps, low_bits, shift, last, positions)
        return positions

    def decode_zigzags(self, codes: Bytes, large_codes: Bits) -> Bits:
        zigzags = np.empty(len(codes), large_codes.dtype)
        _compiled(_decode_zigzags, large_codes.itemsize)(codes, large_codes, zigzags)
        return zigzags

    def apply(self, target: Bits, positions: Positions, zigzags: Bits) -> None:
        if not target.flags.aligned:
            return super().apply(target, positions, zigzags)
        return _compiled(_apply, target.itemsize)(target, positions, zigzags)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scratch:
    words: NDArray[np.int32]
    positions_found: NDArray[np.int32]
    gaps: Bytes
    long_gaps: LongGaps
    codes: Bytes
    large_codes: Bits
    values: Bits

    @classmethod
    def for_elements(cls, num: int, dtype: np.dtype[Any]) -> _Scratch:
        """Sized for the worst case: every candidate is written, kept or not."""
        return cls(
            words=np.empty(BLOCK_BYTES // 8 + 1, np.int32),
            positions_found=np.empty(BLOCK_BYTES // dtype.itemsize + 8, np.int32),
            gaps=np.empty(num, np.uint8),
            long_gaps=np.empty(num // (ESCAPE_GAP + 1) + 2, np.int64),
            codes=np.empty(num // 4 + 1, np.uint8),
            large_codes=np.empty(num + 1, dtype),
            values=np.empty(num, dtype),
        )


_compiling = Lock()


def _compiled(loop: Callable[..., Any], item_bytes: int) -> Callable[..., Any]:
    with _compiling:  # otherwise concurrent threads would all compile it
        return _compile(loop, item_bytes)


@cache
def _compile(loop: Callable[..., Any], item_bytes: int) -> Callable[..., Any]:
    """Inputs are typed as read-only, since arrays of mapped files are."""
    numba = _numba
    bits = {1: numba.uint8, 2: numba.uint16, 4: numba.uint32}[item_bytes]

    def source(item: Any) -> Any:
        return numba.types.Array(item, 1, "C", readonly=True)

    read, read_words = source(bits), source(numba.uint64)
    read_bytes, read_places = source(numba.uint8), source(numba.int64)
    out, out_bytes, out_places = bits[::1], numba.uint8[::1], numba.int64[::1]
    number, numbers = numba.int64, numba.int32[::1]
    found = (numbers, numbers, out_bytes, out_places, out_bytes, out, out)
    arguments = {
        _find: (read_words, read_words, read, read, *found),
        _decode_positions: (read_bytes, read_places, read_bytes, number, number, out_places),
        _decode_zigzags: (read_bytes, read, out),
        _apply: (out, read_places, read),
    }[loop]
    return cast("Callable[..., Any]", numba.njit(arguments, nogil=True)(loop))


# Written for the compiler: no branches on data (a candidate is always written, and kept by raising
# the count), and 64-bit integers throughout: values that wrap in NumPy are masked here instead.


def _find(
    base_words: Array, new_words: Array, base: Bits, new: Bits, words: Array,
    positions_found: Array, gaps: Bytes, long_gaps: LongGaps, codes: Bytes, large_codes: Bits,
    values: Bits,
) -> Counts:  # fmt: skip
    """All differences, block by block. The first gap is meaningless."""
    size = len(words) - 1
    per_word = 8 // new.itemsize
    counts: Counts = (0, 0, 0, -1, -1)
    for block in range(0, max(len(new_words), 1), size):
        end = min(block + size, len(new_words))
        num_words = 0
        for word in range(block, end):
            words[num_words] = word
            num_words += base_words[word] != new_words[word]
        num = 0
        for number in range(num_words):
            start = words[number] * per_word
            for position in range(start, start + per_word):
                positions_found[num] = position
                num += base[position] != new[position]
        if end == len(new_words):
            for position in range(end * per_word, len(new)):
                positions_found[num] = position
                num += base[position] != new[position]
        if num:
            counts = _encode_changes(
                base,
                new,
                positions_found[:num],
                counts,
                gaps,
                long_gaps,
                codes,
                large_codes,
                values,
            )
    return counts


def _encode_changes(
    base: Bits, new: Bits, positions_found: Array, counts: Counts,
    gaps: Bytes, long_gaps: LongGaps, codes: Bytes, large_codes: Bits, values: Bits,
) -> Counts:  # fmt: skip
    """Append gaps and differences of the changes at `positions_found` to those already counted."""
    sign_bit = 8 * new.itemsize - 1
    magnitude = (1 << sign_bit) - 1
    mask = (1 << 8 * new.itemsize) - 1
    count, num_long_gaps, num_large_codes, first, last = counts
    if not count:
        first, last = np.int64(positions_found[0]), np.int64(positions_found[0]) - 1
    for number in range(len(positions_found)):
        position = np.int64(positions_found[number])
        values[count] = new[position]
        old = np.int64(base[position])
        now = np.int64(new[position])
        old ^= -(old >> sign_bit) & magnitude
        now ^= -(now >> sign_bit) & magnitude
        difference = (now - old) & mask
        code = (((difference << 1) ^ -(difference >> sign_bit)) & mask) - 1
        shift = 2 * (count & 3)
        kept = codes[count >> 2] & ((1 << shift) - 1)
        codes[count >> 2] = kept | min(code, ESCAPE_CODE) << shift
        large_codes[num_large_codes] = code - ESCAPE_CODE
        num_large_codes += code >= ESCAPE_CODE
        gap = position - last - 1
        gaps[count] = min(gap, ESCAPE_GAP)
        long_gaps[num_long_gaps] = gap - ESCAPE_GAP
        num_long_gaps += gap >= ESCAPE_GAP
        last = position
        count += 1
    return count, num_long_gaps, num_large_codes, first, last


_numba.extending.register_jitable(_encode_changes)


def _decode_positions(
    gaps: Bytes, long_gaps: LongGaps, low_bits: Bytes, shift: int, last: int, positions: Positions
) -> None:
    num_long_gaps = 0
    position = np.int64(last)
    for number in range(len(gaps)):
        gap = np.int64(gaps[number])
        if gap == ESCAPE_GAP:
            gap += long_gaps[num_long_gaps]
            num_long_gaps += 1
        if shift:
            gap = (gap << shift) + np.int64(low_bits[number])
        position += gap + 1
        positions[number] = position


def _decode_zigzags(codes: Bytes, large_codes: Bits, zigzags: Bits) -> None:
    num_large_codes = 0
    for number in range(len(codes)):
        zigzag = np.int64(codes[number]) + 1
        if zigzag > ESCAPE_CODE:
            zigzag += np.int64(large_codes[num_large_codes])
            num_large_codes += 1
        zigzags[number] = zigzag


def _apply(target: Bits, positions: Positions, zigzags: Bits) -> None:
    sign_bit = 8 * target.itemsize - 1
    magnitude = (1 << sign_bit) - 1
    mask = (1 << 8 * target.itemsize) - 1
    for number in range(len(positions)):
        position = positions[number]
        zigzag = np.int64(zigzags[number])
        bits = np.int64(target[position])
        bits ^= -(bits >> sign_bit) & magnitude
        bits = (bits + ((zigzag >> 1) ^ -(zigzag & 1))) & mask
        bits ^= -(bits >> sign_bit) & magnitude
        target[position] = bits
