# SPDX-License-Identifier: Apache-2.0
"""Streams of a sparse payload: which elements change, and to which values.

Owns packing, which keeps nothing in memory twice, and unpacking with all checks, so that no stream
can point outside the tensor or miss a part. Unpacks in steps, because a position takes eight times
the memory of a gap.
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
    Kernels,
    Positions,
    count_threes,
    from_planes,
    join_codes,
    join_gaps,
    join_large_codes,
    merge_gaps,
    num_planes,
    pack_2bit,
    split_gaps,
    sum_2bit,
    to_planes,
    unpack_2bit,
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
"""Changes unpacked per step; a multiple of four, because codes are packed four to a byte."""
MAX_LOW_BIT_PAIRS = 4
"""All low bits of a gap fit in a byte."""
MAX_LONG_GAP_PLANES = 5
"""No real tensor has a gap over 2^40 elements."""

MAX_MEAN_GAP = 128
"""Gaps of this average length fit in a byte; for longer ones the lowest bits are split off."""

T = TypeVar("T")
_LONG_GAP_DTYPE = np.dtype("<i8")
_POSITION_ROLES = frozenset({Role.GAPS, Role.LONG_GAPS, Role.LOW_BITS})


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedPositions:
    """Which elements change."""

    gaps: Bytes
    long_gaps: tuple[Bytes, ...]
    low_bits: tuple[Bytes, ...]

    def end(self) -> int:
        """Last position plus one, as a Python integer because it is unbounded before the check."""
        long_gaps = sum(_sum(plane) << 8 * number for number, plane in enumerate(self.long_gaps))
        total = len(self.gaps) + ((_sum(self.gaps) + long_gaps) << 2 * len(self.low_bits))
        for number, low_bits in enumerate(self.low_bits):
            total += sum_2bit(low_bits) << 2 * number
        return total

    def steps(self, kernels: Kernels) -> Iterator[Positions]:
        """Positions in ascending order, STEP at a time; check `end` first."""
        num_long_gaps = 0
        last = -1
        for start in range(0, len(self.gaps), STEP):
            gaps = self.gaps[start : start + STEP]
            num_escaped = int(np.count_nonzero(gaps == ESCAPE_GAP))
            long_gaps = from_planes(
                self.long_gaps, slice(num_long_gaps, num_long_gaps + num_escaped), _LONG_GAP_DTYPE
            )
            num_long_gaps += num_escaped
            low_bits = self._low_bits(start, len(gaps))
            positions = kernels.decode_positions(
                gaps, long_gaps, low_bits, 2 * len(self.low_bits), last
            )
            last = int(positions[-1])
            yield positions

    def _low_bits(self, start: int, count: int) -> Bytes:
        joined = np.zeros(count if self.low_bits else 0, np.uint8)
        for number, low_bits in enumerate(self.low_bits):
            pairs = unpack_2bit(low_bits[start // 4 : (start + STEP) // 4], count)
            joined |= pairs << np.uint8(2 * number)
        return joined


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    dtype: np.dtype[Any]
    num_changed: int
    codes: Bytes
    large_codes: tuple[Bytes, ...]

    def steps(self, kernels: Kernels) -> Iterator[Bits]:
        """Zigzag differences, as many at a time as there are positions."""
        num_large_codes = 0
        for start in range(0, self.num_changed, STEP):
            num_codes = min(STEP, self.num_changed - start)
            codes = unpack_2bit(self.codes[start // 4 : (start + STEP) // 4], num_codes)
            num_escaped = int(np.count_nonzero(codes == ESCAPE_CODE))
            large_codes = from_planes(
                self.large_codes, slice(num_large_codes, num_large_codes + num_escaped), self.dtype
            )
            num_large_codes += num_escaped
            yield kernels.decode_zigzags(codes, large_codes)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewValues:
    dtype: np.dtype[Any]
    num_changed: int
    planes: tuple[Bytes, ...]

    def steps(self, kernels: Kernels) -> Iterator[Bits]:
        """New values, as many at a time as there are positions."""
        for start in range(0, self.num_changed, STEP):
            yield from_planes(self.planes, slice(start, start + STEP), self.dtype)


# --- packing -------------------------------------------------------------------------------------


def pack_positions(chunks: Sequence[Changes], num_elements: int, num_changed: int) -> list[Stream]:
    gaps, far_pieces = join_gaps(chunks)
    long_gaps = np.concatenate([*far_pieces, np.empty(0, np.int64)])
    low_bits: list[Bytes] = []
    if num_low_bits := _num_low_bits(num_elements, num_changed):
        wide = merge_gaps(np.concatenate(gaps), long_gaps)
        low_bits = [pack_2bit(wide >> 2 * number & 3) for number in range(num_low_bits)]
        few, long_gaps = split_gaps(wide >> 2 * num_low_bits)
        gaps = [few]
    return [
        pack_pieces(Role.GAPS, sum(map(len, gaps)), gaps),
        *map(partial(pack, Role.LONG_GAPS), to_planes(long_gaps)),
        *map(partial(pack, Role.LOW_BITS), low_bits),
    ]


def pack_differences(chunks: list[Changes], num_changed: int) -> list[Stream]:
    """Consumes the list of chunks."""
    codes = pack_pieces(Role.CODES, -(-num_changed // 4), join_codes(chunks))
    num_large_codes = sum(len(chunk.large_codes) for chunk in chunks)
    max_value = max(
        (int(chunk.large_codes.max()) for chunk in chunks if len(chunk.large_codes)), default=0
    )
    num = num_planes(max_value) if num_large_codes else 0
    return [
        codes,
        *pack_planes(Role.LARGE_CODES, num, num_large_codes, join_large_codes(_drain(chunks))),
    ]


def pack_values(pieces: list[Bits], num_changed: int) -> list[Stream]:
    """Consumes the list of pieces."""
    max_value = max(int(piece.max()) for piece in pieces)
    return pack_planes(Role.VALUES, num_planes(max_value), num_changed, _drain(pieces))


def _drain(items: list[T]) -> Iterator[T]:
    """Yield and remove items from the first on, to free their memory."""
    items.reverse()
    while items:
        yield items.pop()


def _num_low_bits(num_elements: int, num_changed: int) -> int:
    """Number of two-bit groups to split off so that the average gap fits in a byte."""
    mean = num_elements // num_changed
    enough = (n for n in range(MAX_LOW_BIT_PAIRS) if mean >> 2 * n < MAX_MEAN_GAP)
    return next(enough, MAX_LOW_BIT_PAIRS)


# --- unpacking -----------------------------------------------------------------------------------


def split_by_tensor(
    tensors: Sequence[Bits], positions: Positions
) -> Iterator[tuple[Bits, Positions, slice]]:
    """For each tensor with changes in this step: the tensor, its positions, and their slice of the
    step."""
    ends = np.cumsum([len(tensor) for tensor in tensors])
    done = 0
    for number, upto in enumerate(np.searchsorted(positions, ends).tolist()):
        if upto > done:
            start = ends[number - 1] if number else 0
            yield tensors[number], positions[done:upto] - start, slice(done, upto)
            done = upto


def unpack_positions(payload: Payload, num_elements: int) -> ChangedPositions:
    (gaps,) = _unpack_role(payload, Role.GAPS, range(1, 2), payload.num_changed)
    num_long_gaps = int(np.count_nonzero(gaps == ESCAPE_GAP))
    num_packed = -(-payload.num_changed // 4)
    changed_positions = ChangedPositions(
        gaps=gaps,
        long_gaps=_unpack_role(
            payload, Role.LONG_GAPS, _num_planes(num_long_gaps, MAX_LONG_GAP_PLANES), num_long_gaps
        ),
        low_bits=_unpack_role(payload, Role.LOW_BITS, range(MAX_LOW_BIT_PAIRS + 1), num_packed),
    )
    for low_bits in changed_positions.low_bits:
        _check_padding(low_bits, payload.num_changed)
    if changed_positions.end() > num_elements:
        raise WeightsError(f"delta: change outside the tensor's {num_elements} elements")
    return changed_positions


def unpack_changes(payload: Payload, dtype: np.dtype[Any]) -> Differences | NewValues:
    num_changed = payload.num_changed
    if any(stream.role is Role.VALUES for stream in payload.streams):
        allowed = _POSITION_ROLES | {Role.VALUES}
        planes = _unpack_role(
            payload, Role.VALUES, _num_planes(num_changed, dtype.itemsize), num_changed
        )
        changes = NewValues(dtype=dtype, num_changed=num_changed, planes=planes)
    else:
        allowed = _POSITION_ROLES | {Role.CODES, Role.LARGE_CODES}
        (codes,) = _unpack_role(payload, Role.CODES, range(1, 2), -(-num_changed // 4))
        _check_padding(codes, num_changed)
        num_large_codes = count_threes(codes)
        large_codes = _unpack_role(
            payload, Role.LARGE_CODES, _num_planes(num_large_codes, dtype.itemsize), num_large_codes
        )
        _check_large_codes(large_codes, dtype)
        changes = Differences(
            dtype=dtype, num_changed=num_changed, codes=codes, large_codes=large_codes
        )
    if any(stream.role not in allowed for stream in payload.streams):
        raise WeightsError("delta: sparse payload has an invalid combination of streams")
    return changes


def _unpack_role(payload: Payload, role: Role, allowed: range, num_bytes: int) -> tuple[Bytes, ...]:
    """All streams of one role, after checking their number and sizes."""
    streams = [stream for stream in payload.streams if stream.role is role]
    sizes = {stream.num_bytes for stream in streams}
    if len(streams) not in allowed or sizes - {num_bytes}:
        raise WeightsError(
            f"delta: {len(streams)} {role.name.lower()} streams of {sorted(sizes)[:3]} bytes, "
            f"expected {allowed.start} to {allowed.stop - 1} of {num_bytes}"
        )
    return tuple(map(unpack, streams))


def _num_planes(num_values: int, max_value: int) -> range:
    return range(1, max_value + 1) if num_values else range(1)


def _check_padding(pairs: Bytes, num_values: int) -> None:
    if num_values % 4 and pairs[-1] >> 2 * (num_values % 4):
        raise WeightsError("delta: packed stream has non-zero padding")


def _check_large_codes(planes: tuple[Bytes, ...], dtype: np.dtype[Any]) -> None:
    """Check that large codes plus their base code fit in an element."""
    if len(planes) < dtype.itemsize:
        return
    max_value = (1 << 8 * dtype.itemsize) - 1 - (ESCAPE_CODE + 1)
    for start in range(0, len(planes[0]), STEP):
        if from_planes(planes, slice(start, start + STEP), dtype).max() > max_value:
            raise WeightsError("delta: a difference does not fit in an element")


def _sum(plane: Bytes) -> int:
    return int(plane.sum(dtype=np.int64))
