# SPDX-License-Identifier: Apache-2.0
"""The streams of a sparse payload: which elements change, and to what.

Owns their packing, which keeps nothing twice in memory, their unpacking and every check on them, so
that nothing read here can point outside the tensor or miss a part. Unpacks in steps, because
positions take eight times the byte of a gap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from penstock.errors import WeightsError
from penstock.weights.deltas.numpy_kernels import (
    ESCAPE_CODE,
    ESCAPE_GAP,
    Bits,
    Bytes,
    Changes,
    Loops,
    NumpyLoops,
    Positions,
    count_threes,
    from_planes,
    join_big,
    join_codes,
    join_gaps,
    merge_gaps,
    num_planes,
    pack_pairs,
    split_gaps,
    sum_pairs,
    to_planes,
    unpack_pairs,
)
from penstock.weights.deltas.payload import (
    Payload,
    Role,
    Stream,
    pack,
    pack_pieces,
    pack_planes,
    unpack,
)

STEP = 1 << 14
"""Changes unpacked at a time; a multiple of four, because codes are packed four to a byte."""
MAX_DIGITS = 4
"""All digits of a gap fit a byte."""
MAX_FAR_PLANES = 5
"""A gap over 2^40 elements stands in no tensor of this world."""

USUAL_GAP = 128
"""Gaps of this length on average fit a byte; of longer ones the lowest digits are split off."""

T = TypeVar("T")
_FAR = np.dtype("<i8")
_PLACE_ROLES = frozenset({Role.GAPS, Role.FAR, Role.DIGITS})


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Which elements change."""

    gaps: Bytes
    far: tuple[Bytes, ...]
    digits: tuple[Bytes, ...]

    def end(self) -> int:
        """One more than the last position. In Python's integers, for it may be any number."""
        far = sum(_sum(plane) << 8 * number for number, plane in enumerate(self.far))
        total = len(self.gaps) + ((_sum(self.gaps) + far) << 2 * len(self.digits))
        for number, digits in enumerate(self.digits):
            total += sum_pairs(digits) << 2 * number
        return total

    def steps(self, loops: Loops) -> Iterator[Positions]:
        """Positions in ascending order, STEP at a time; `end` says whether they fit."""
        num_far = 0
        last = -1
        for start in range(0, len(self.gaps), STEP):
            gaps = self.gaps[start : start + STEP]
            num_escaped = int(np.count_nonzero(gaps == ESCAPE_GAP))
            far = from_planes(self.far, slice(num_far, num_far + num_escaped), _FAR)
            num_far += num_escaped
            digits = self._digits(start, len(gaps))
            positions = loops.walk(gaps, far, digits, 2 * len(self.digits), last)
            last = int(positions[-1])
            yield positions

    def _digits(self, start: int, count: int) -> Bytes:
        joined = np.zeros(count if self.digits else 0, np.uint8)
        for number, digits in enumerate(self.digits):
            pairs = unpack_pairs(digits[start // 4 : (start + STEP) // 4], count)
            joined |= pairs << np.uint8(2 * number)
        return joined


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    dtype: np.dtype[Any]
    num_changed: int
    codes: Bytes
    big: tuple[Bytes, ...]

    def steps(self, loops: Loops) -> Iterator[Bits]:
        """Zigzag differences, as many at a time as there are positions."""
        num_big = 0
        for start in range(0, self.num_changed, STEP):
            num_codes = min(STEP, self.num_changed - start)
            codes = unpack_pairs(self.codes[start // 4 : (start + STEP) // 4], num_codes)
            num_escaped = int(np.count_nonzero(codes == ESCAPE_CODE))
            big = from_planes(self.big, slice(num_big, num_big + num_escaped), self.dtype)
            num_big += num_escaped
            yield loops.zigzags(codes, big)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewValues:
    dtype: np.dtype[Any]
    num_changed: int
    planes: tuple[Bytes, ...]

    def steps(self, loops: Loops) -> Iterator[Bits]:
        """New values, as many at a time as there are positions."""
        for start in range(0, self.num_changed, STEP):
            yield from_planes(self.planes, slice(start, start + STEP), self.dtype)


# --- packing -------------------------------------------------------------------------------------


def pack_places(chunks: Sequence[Changes], num_elements: int, num_changed: int) -> list[Stream]:
    gaps, far_pieces = join_gaps(chunks)
    far = np.concatenate([*far_pieces, np.empty(0, np.int64)])
    digits: list[Bytes] = []
    if num_digits := _num_digits(num_elements, num_changed):
        wide = merge_gaps(np.concatenate(gaps), far)
        digits = [pack_pairs(wide >> 2 * number & 3) for number in range(num_digits)]
        few, far = split_gaps(wide >> 2 * num_digits)
        gaps = [few]
    return [
        pack_pieces(Role.GAPS, sum(map(len, gaps)), gaps),
        *map(partial(pack, Role.FAR), to_planes(far)),
        *map(partial(pack, Role.DIGITS), digits),
    ]


def pack_differences(chunks: list[Changes], num_changed: int) -> list[Stream]:
    """Takes the chunks out of their list."""
    codes = pack_pieces(Role.CODES, -(-num_changed // 4), join_codes(chunks))
    num_big = sum(len(chunk.big) for chunk in chunks)
    most = max((int(chunk.big.max()) for chunk in chunks if len(chunk.big)), default=0)
    num = num_planes(most) if num_big else 0
    return [codes, *pack_planes(Role.BIG, num, num_big, join_big(_taken(chunks)))]


def pack_values(places: Places, tensors: Sequence[Bits]) -> list[Stream]:
    values = [
        tensor[inside]
        for positions in places.steps(NumpyLoops())
        for tensor, inside, _ in by_tensor(tensors, positions)
    ]
    most = max(int(piece.max()) for piece in values)
    return pack_planes(Role.VALUES, num_planes(most), len(places.gaps), _taken(values))


def _taken(items: list[T]) -> Iterator[T]:
    """From the first on; the list is empty afterwards, and so is the memory."""
    items.reverse()
    while items:
        yield items.pop()


def _num_digits(num_elements: int, num_changed: int) -> int:
    """How many two-bit digits make the average gap fit a byte well."""
    mean = num_elements // num_changed
    return next(n for n in range(MAX_DIGITS + 1) if mean >> 2 * n < USUAL_GAP or n == MAX_DIGITS)


# --- unpacking -----------------------------------------------------------------------------------


def by_tensor(
    tensors: Sequence[Bits], positions: Positions
) -> Iterator[tuple[Bits, Positions, slice]]:
    """For each tensor with changes here: it, the positions inside it, which of all they are."""
    ends = np.cumsum([len(tensor) for tensor in tensors])
    done = 0
    for number, upto in enumerate(np.searchsorted(positions, ends).tolist()):
        if upto > done:
            start = ends[number - 1] if number else 0
            yield tensors[number], positions[done:upto] - start, slice(done, upto)
            done = upto


def unpack_places(payload: Payload, num_elements: int) -> Places:
    (gaps,) = _unpack_role(payload, Role.GAPS, range(1, 2), payload.num_changed)
    num_far = int(np.count_nonzero(gaps == ESCAPE_GAP))
    num_packed = -(-payload.num_changed // 4)
    places = Places(
        gaps=gaps,
        far=_unpack_role(payload, Role.FAR, _num_planes(num_far, MAX_FAR_PLANES), num_far),
        digits=_unpack_role(payload, Role.DIGITS, range(MAX_DIGITS + 1), num_packed),
    )
    for digits in places.digits:
        _check_filling(digits, payload.num_changed)
    if places.end() > num_elements:
        raise WeightsError(f"delta: changes beyond the tensor's {num_elements} elements")
    return places


def unpack_changes(payload: Payload, dtype: np.dtype[Any]) -> Differences | NewValues:
    num_changed = payload.num_changed
    if any(stream.role is Role.VALUES for stream in payload.streams):
        allowed = _PLACE_ROLES | {Role.VALUES}
        planes = _unpack_role(
            payload, Role.VALUES, _num_planes(num_changed, dtype.itemsize), num_changed
        )
        changes = NewValues(dtype=dtype, num_changed=num_changed, planes=planes)
    else:
        allowed = _PLACE_ROLES | {Role.CODES, Role.BIG}
        (codes,) = _unpack_role(payload, Role.CODES, range(1, 2), -(-num_changed // 4))
        _check_filling(codes, num_changed)
        num_big = count_threes(codes)
        big = _unpack_role(payload, Role.BIG, _num_planes(num_big, dtype.itemsize), num_big)
        _check_big(big, dtype)
        changes = Differences(dtype=dtype, num_changed=num_changed, codes=codes, big=big)
    if any(stream.role not in allowed for stream in payload.streams):
        raise WeightsError("delta: sparse payload has streams that do not belong together")
    return changes


def _unpack_role(payload: Payload, role: Role, allowed: range, num_bytes: int) -> tuple[Bytes, ...]:
    """All streams of one role: a number of them that is allowed, each of the right size."""
    streams = [stream for stream in payload.streams if stream.role is role]
    sizes = {stream.num_bytes for stream in streams}
    if len(streams) not in allowed or sizes - {num_bytes}:
        raise WeightsError(
            f"delta: {len(streams)} {role.name.lower()} streams of {sorted(sizes)[:3]} bytes, "
            f"but {allowed.start} to {allowed.stop - 1} of {num_bytes} expected"
        )
    return tuple(map(unpack, streams))


def _num_planes(num_values: int, most: int) -> range:
    return range(1, most + 1) if num_values else range(1)


def _check_filling(pairs: Bytes, num_values: int) -> None:
    if num_values % 4 and pairs[-1] >> 2 * (num_values % 4):
        raise WeightsError("delta: packed stream has bits after its last value")


def _check_big(planes: tuple[Bytes, ...], dtype: np.dtype[Any]) -> None:
    """A zigzag difference has as many bits as an element, and the code was taken off."""
    if len(planes) < dtype.itemsize:
        return
    most = (1 << 8 * dtype.itemsize) - 1 - (ESCAPE_CODE + 1)
    for start in range(0, len(planes[0]), STEP):
        if from_planes(planes, slice(start, start + STEP), dtype).max() > most:
            raise WeightsError("delta: a difference is larger than its elements can hold")


def _sum(plane: Bytes) -> int:
    return int(plane.sum(dtype=np.int64))
