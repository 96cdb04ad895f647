# SPDX-License-Identifier: Apache-2.0
"""The loops of `symbols`, compiled with numba (extra `fast`); same results to the last bit.

Each loop is compiled at its first use for an item size, which takes under a second, and not cached
on disk: numba would put its cache beside the sources, into an installed package.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from threading import Lock
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from penstock.weights.symbols import (
    ESCAPE_CODE,
    ESCAPE_GAP,
    Bits,
    Bytes,
    Changes,
    Far,
    NumpyLoops,
    Positions,
    unchanged,
)

Array = NDArray[Any]


class CompiledLoops:
    """Unaligned tensors, which are rare, go the slow way."""

    def __init__(self) -> None:
        self._plain = NumpyLoops()

    def find(self, base: Bits, new: Bits) -> Changes:
        num_paired = new.nbytes // 8 * 8 // new.itemsize
        base_words, new_words = base[:num_paired].view("<u8"), new[:num_paired].view("<u8")
        if not (base_words.flags.aligned and new_words.flags.aligned):
            return self._plain.find(base, new)
        places = np.empty(len(new) + 1, np.int64)
        count = _compiled(_find, new.itemsize)(base_words, new_words, base, new, places)
        if not count:
            return unchanged(new)
        gaps, codes = np.empty(count - 1, np.uint8), np.empty(count, np.uint8)
        far, big = np.empty(count, np.int64), np.empty(count + 1, new.dtype)
        num_far, num_big = _compiled(_describe, new.itemsize)(
            base, new, places[:count], gaps, far, codes, big
        )
        return Changes(
            num_elements=len(new),
            num_changed=count,
            lead=int(places[0]),
            trail=len(new) - 1 - int(places[count - 1]),
            gaps=gaps,
            far=far[:num_far].copy(),
            codes=codes,
            big=big[:num_big].copy(),
        )

    def walk(self, gaps: Bytes, far: Far, digits: Bytes, shift: int, last: int) -> Positions:
        positions = np.empty(len(gaps), np.int64)
        _compiled(_walk, 1)(gaps, far, digits, shift, last, positions)
        return positions

    def zigzags(self, codes: Bytes, big: Bits) -> Bits:
        zigzags = np.empty(len(codes), big.dtype)
        _compiled(_join, big.itemsize)(codes, big, zigzags)
        return zigzags

    def apply(self, target: Bits, positions: Positions, zigzags: Bits) -> None:
        if not target.flags.aligned:
            return self._plain.apply(target, positions, zigzags)
        return _compiled(_apply, target.itemsize)(target, positions, zigzags)


_compiling = Lock()


def _compiled(loop: Callable[..., Any], item_bytes: int) -> Callable[..., Any]:
    with _compiling:  # threads that start together would all compile it
        return _compile(loop, item_bytes)


@cache
def _compile(loop: Callable[..., Any], item_bytes: int) -> Callable[..., Any]:
    """Arrays a loop only reads may be read-only, as those of mapped files are."""
    numba: Any = importlib.import_module("numba")
    bits = {1: numba.uint8, 2: numba.uint16, 4: numba.uint32}[item_bytes]

    def source(item: Any) -> Any:
        return numba.types.Array(item, 1, "C", readonly=True)

    read, read_words = source(bits), source(numba.uint64)
    read_bytes, read_places = source(numba.uint8), source(numba.int64)
    out, out_bytes, out_places = bits[::1], numba.uint8[::1], numba.int64[::1]
    arguments = {
        _find: (read_words, read_words, read, read, out_places),
        _describe: (read, read, read_places, out_bytes, out_places, out_bytes, out),
        _walk: (read_bytes, read_places, read_bytes, numba.int64, numba.int64, out_places),
        _join: (read_bytes, read, out),
        _apply: (out, read_places, read),
    }[loop]
    return cast("Callable[..., Any]", numba.njit(arguments, nogil=True)(loop))


# Written for the compiler: no branch on the data (a candidate is written, and kept by counting on),
# and 64-bit integers throughout, for what wraps in NumPy does not here and is masked instead.


def _find(base_words: Array, new_words: Array, base: Bits, new: Bits, places: Positions) -> int:
    """Positions of what differs, in `places`; returns how many."""
    per_word = 8 // new.itemsize
    words = np.empty(len(new_words) + 1, np.int64)
    num_words = 0
    for word in range(len(new_words)):
        words[num_words] = word
        num_words += base_words[word] != new_words[word]
    count = 0
    for number in range(num_words):
        start = words[number] * per_word
        for place in range(start, start + per_word):
            places[count] = place
            count += base[place] != new[place]
    for place in range(len(new_words) * per_word, len(new)):
        places[count] = place
        count += base[place] != new[place]
    return count


def _describe(
    base: Bits, new: Bits, places: Positions, gaps: Bytes, far: Far, codes: Bytes, big: Bits
) -> tuple[int, int]:
    """Gaps and differences of the changes at `places`; returns how many escaped from each."""
    sign_bit = 8 * new.itemsize - 1
    magnitude = (1 << sign_bit) - 1
    mask = (1 << 8 * new.itemsize) - 1
    num_far: Any = 0
    num_big: Any = 0
    last = places[0]
    for number in range(len(places)):
        place = places[number]
        old = np.int64(base[place])
        now = np.int64(new[place])
        old ^= -(old >> sign_bit) & magnitude
        now ^= -(now >> sign_bit) & magnitude
        difference = (now - old) & mask
        code = (((difference << 1) ^ -(difference >> sign_bit)) & mask) - 1
        codes[number] = min(code, ESCAPE_CODE)
        big[num_big] = code - ESCAPE_CODE
        num_big += code >= ESCAPE_CODE
        if number > 0:
            gap = place - last - 1
            gaps[number - 1] = min(gap, ESCAPE_GAP)
            far[num_far] = gap - ESCAPE_GAP
            num_far += gap >= ESCAPE_GAP
        last = place
    return num_far, num_big


def _walk(
    gaps: Bytes, far: Far, digits: Bytes, shift: int, last: int, positions: Positions
) -> None:
    num_far = 0
    position = np.int64(last)
    for number in range(len(gaps)):
        gap = np.int64(gaps[number])
        if gap == ESCAPE_GAP:
            gap += far[num_far]
            num_far += 1
        if shift:
            gap = (gap << shift) + np.int64(digits[number])
        position += gap + 1
        positions[number] = position


def _join(codes: Bytes, big: Bits, zigzags: Bits) -> None:
    num_big = 0
    for number in range(len(codes)):
        zigzag = np.int64(codes[number]) + 1
        if zigzag > ESCAPE_CODE:
            zigzag += np.int64(big[num_big])
            num_big += 1
        zigzags[number] = zigzag


def _apply(target: Bits, positions: Positions, zigzags: Bits) -> None:
    sign_bit = 8 * target.itemsize - 1
    magnitude = (1 << sign_bit) - 1
    mask = (1 << 8 * target.itemsize) - 1
    for number in range(len(positions)):
        place = positions[number]
        zigzag = np.int64(zigzags[number])
        bits = np.int64(target[place])
        bits ^= -(bits >> sign_bit) & magnitude
        bits = (bits + ((zigzag >> 1) ^ -(zigzag & 1))) & mask
        bits ^= -(bits >> sign_bit) & magnitude
        target[place] = bits
