# SPDX-License-Identifier: Apache-2.0
"""Encodes the change of one tensor compactly and applies it in place, bit-exact.

A payload is `same`, `sparse` or `full`. A sparse payload has separately compressed streams: gaps
between changed elements as bytes (long gaps continue in a second stream; if changes are rare, the
noisy lowest bits are split off), and either zigzag differences as two-bit codes (large ones
continue in a second stream) or the new values. Several small tensors may share one payload as if
concatenated, because zstd tables would cost more than their changes.

Payloads are not trusted: every size is checked before allocation, and all checks run before the
first byte is written. The caller must compare the result with its digest. Knows no files.
"""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import numpy as np

from penstock.errors import WeightsError
from penstock.weights.deltas.numpy_kernels import (
    BITS,
    BLOCK_BYTES,
    Bits,
    Changes,
    Kernels,
    Positions,
)
from penstock.weights.deltas.payload import (
    Kind,
    Payload,
    Role,
    Stream,
    pack_full,
    packed_bytes,
    unpack,
)
from penstock.weights.deltas.sparse import (
    ChangedPositions,
    NewValues,
    pack_differences,
    pack_positions,
    pack_values,
    split_by_tensor,
    unpack_changes,
    unpack_positions,
)
from penstock.weights.tensors import NUM_THREADS

T = TypeVar("T")

RARE_RATIO = 16
"""Changes smaller than this fraction of their tensor count as rare."""
SKIP_FULL_RATIO = 4
"""For a large tensor, a sparse form below this fraction is used without trying the full form."""
LARGE_BYTES = 1 << 19
DENSE_RATIO = 4
"""With more changes than this fraction of the elements, new values are not tried instead of
differences."""
MIN_COMPILED_BYTES = 1 << 20
"""Below this size NumPy finishes before compilation would start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDiff:
    """All changes of one tensor, with its new bits. For single use: encoding consumes the changes,
    so that they are not in memory together with the result."""

    new: Bits
    chunks: list[Changes]
    values: list[Bits]
    """New bits of the changed elements, chunk by chunk; empty if too many changed for a payload of
    values."""

    @property
    def is_rare(self) -> bool:
        """True if the tensor has so little change that it may share a payload with its
        neighbors."""
        num_bytes = sum(chunk.num_bytes for chunk in self.chunks)
        return num_bytes * RARE_RATIO <= self.new.nbytes


# --- encoding ------------------------------------------------------------------------------------


def encode_one(found: TensorDiff | None, base: memoryview | None, new: memoryview) -> Payload:
    """The smallest payload that turns the base bits into the new ones, given `diff_tensor` of both.
    Does not depend on the kernels used."""
    payload = None if found is None else encode_diffs([found])
    if payload is None:
        return _SAME if base is not None and _is_equal(base, new) else encode_full(new)
    if len(new) > LARGE_BYTES and payload.size * SKIP_FULL_RATIO <= len(new):
        return payload
    return payload if payload.size <= packed_bytes(new) else encode_full(new)


def diff_tensor(
    base: memoryview | None,
    new: memoryview,
    item_bytes: int,
    *,
    kernels: Kernels | None = None,
    pool: Executor | None = None,
) -> TensorDiff | None:
    """All changes between a tensor's raw little-endian bytes; None if there is no base of the same
    size, no sparse form for this item size, or if they would be larger than the tensor. `pool`
    parallelizes the search."""
    if base is None or len(base) != len(new) or item_bytes not in BITS:
        return None
    kernels = kernels or _kernels_for(len(new))
    base_bits, new_bits = as_bits(base, item_bytes), as_bits(new, item_bytes)
    step = kernels.chunk_bytes // item_bytes
    is_dense = False

    def find(start: int) -> tuple[Changes, Bits]:
        part = slice(start, start + step)
        chunk, new_values = kernels.find(base_bits[part], new_bits[part])
        return chunk, (new_bits[:0] if is_dense else new_values)

    chunks: list[Changes] = []
    values: list[Bits] = []
    num_bytes = num_changed = 0
    for chunk, new_values in _in_order(find, range(0, len(new_bits), step), pool):
        chunks.append(chunk)
        values.append(new_values)
        num_bytes += chunk.num_bytes
        num_changed += chunk.num_changed
        if num_bytes > len(new):
            return None
        if is_dense := DENSE_RATIO * num_changed > len(new_bits):
            values.clear()
    return TensorDiff(new=new_bits, chunks=chunks, values=values)


def _in_order(
    find: Callable[[int], T], starts: Iterable[int], pool: Executor | None
) -> Iterator[T]:
    """Search a few chunks ahead, to keep all threads busy with little memory."""
    if pool is None:
        yield from map(find, starts)
        return
    ahead: deque[Future[T]] = deque()
    for start in starts:
        ahead.append(pool.submit(find, start))
        if len(ahead) > 2 * NUM_THREADS:
            yield ahead.popleft().result()
    while ahead:
        yield ahead.popleft().result()


def encode_diffs(tensors: Sequence[TensorDiff]) -> Payload | None:
    """Encode tensors of one item size as one `same` or `sparse` payload; None if it would not be
    small."""
    chunks = [chunk for tensor in tensors for chunk in tensor.chunks if chunk.num_elements]
    new_values = [values for tensor in tensors for values in tensor.values if len(values)]
    for tensor in tensors:
        tensor.chunks.clear()
        tensor.values.clear()
    num_elements = sum(chunk.num_elements for chunk in chunks)
    num_changed = sum(chunk.num_changed for chunk in chunks)
    if not num_changed:
        return _SAME
    changed_positions = pack_positions(chunks, num_elements, num_changed)
    differences = pack_differences(chunks, num_changed)
    payload = _sparse(num_changed, [*changed_positions, *differences])
    if 8 * _size(differences) > 3 * num_changed and DENSE_RATIO * num_changed <= num_elements:
        values = pack_values(new_values, num_changed)
        if _size(values) <= _size(differences):
            payload = _sparse(num_changed, [*changed_positions, *values])
    is_small = payload.num_unpacked <= sum(tensor.new.nbytes for tensor in tensors)
    return payload if is_small else None


def _sparse(num_changed: int, streams: Sequence[Stream]) -> Payload:
    return Payload(kind=Kind.SPARSE, num_changed=num_changed, streams=tuple(streams))


def encode_full(new: memoryview) -> Payload:
    return Payload(kind=Kind.FULL, num_changed=0, streams=(pack_full(new),))


_SAME = Payload(kind=Kind.SAME, num_changed=0, streams=())


def as_bits(raw: memoryview, item_bytes: int) -> Bits:
    return np.frombuffer(raw, BITS[item_bytes])


def _is_equal(base: memoryview, new: memoryview) -> bool:
    return len(base) == len(new) and all(
        base[start : start + BLOCK_BYTES].tobytes() == new[start : start + BLOCK_BYTES].tobytes()
        for start in range(0, len(new), BLOCK_BYTES)
    )


def _size(streams: Sequence[Stream]) -> int:
    return sum(len(stream.data) for stream in streams)


# --- applying ------------------------------------------------------------------------------------


def apply_payload(
    payload: Payload,
    targets: Sequence[memoryview],
    item_bytes: int,
    *,
    kernels: Kernels | None = None,
) -> None:
    """Turn the base bits in the tensors of this payload, in encoding order, into the new ones;
    raises before changing any."""
    if payload.kind is Kind.SPARSE:
        _apply_sparse(payload, targets, item_bytes, kernels)
    elif payload.num_changed:
        raise WeightsError(
            f"delta: {payload.kind} payload must not have changes (got {payload.num_changed})"
        )
    elif payload.kind is Kind.FULL:
        _apply_full(payload, targets)
    elif payload.streams:
        raise WeightsError("delta: payload of an unchanged tensor has streams")


def _apply_full(payload: Payload, targets: Sequence[memoryview]) -> None:
    if len(targets) != 1 or [stream.role for stream in payload.streams] != [Role.FULL]:
        raise WeightsError("delta: full payload must have one stream for one tensor")
    (target,), (stream,) = targets, payload.streams
    if stream.num_bytes != len(target):
        raise WeightsError(
            f"delta: full payload of {stream.num_bytes} bytes for a tensor of {len(target)}"
        )
    target[:] = unpack(stream).data


def _apply_sparse(
    payload: Payload, targets: Sequence[memoryview], item_bytes: int, kernels: Kernels | None
) -> None:
    sizes = [len(target) for target in targets]
    changed_positions = _check_positions(payload, sizes, item_bytes)
    changes = unpack_changes(payload, BITS[item_bytes])
    tensors = [as_bits(target, item_bytes) for target in targets]
    kernels = kernels or _kernels_for(sum(sizes))
    steps = zip(changed_positions.steps(kernels), changes.steps(kernels), strict=True)
    for positions, values in steps:
        for tensor, inside, part in split_by_tensor(tensors, positions):
            if isinstance(changes, NewValues):
                tensor[inside] = values[part]
            else:
                kernels.apply(tensor, inside, values[part])


def changed_elements(
    payload: Payload, sizes: Sequence[int], item_bytes: int
) -> list[Positions | None]:
    """Which elements of each tensor of this payload change, in ascending order; None for all of
    them. `sizes` are the tensors' sizes in bytes."""
    if payload.kind is not Kind.SPARSE:
        whole = None if payload.kind is Kind.FULL else np.empty(0, np.int64)
        return [whole] * len(sizes)
    found = _check_positions(payload, sizes, item_bytes)
    positions = np.concatenate(list(found.steps(_kernels_for(sum(sizes)))))
    ends = np.cumsum(sizes) // item_bytes
    starts = [0, *ends[:-1].tolist()]
    parts = np.split(positions, np.searchsorted(positions, ends[:-1]))
    return [part - start for part, start in zip(parts, starts, strict=True)]


def _check_positions(payload: Payload, sizes: Sequence[int], item_bytes: int) -> ChangedPositions:
    """Positions of a sparse payload, inside tensors of these sizes."""
    num_bytes = sum(sizes)
    if item_bytes not in BITS or any(size % item_bytes for size in sizes):
        raise WeightsError(f"delta: sparse payload for unsupported item size {item_bytes}")
    num_elements = num_bytes // item_bytes
    if not 0 < payload.num_changed <= num_elements:
        raise WeightsError(
            f"delta: {payload.num_changed} changes in a tensor of {num_elements} elements"
        )
    if sum(stream.num_bytes for stream in payload.streams) > num_bytes:
        raise WeightsError(f"delta: streams are larger than the tensor ({num_bytes} bytes)")
    return unpack_positions(payload, num_elements)


# --- kernels -------------------------------------------------------------------------------------


def _kernels_for(num_bytes: int) -> Kernels:
    """Small tensors do not trigger compilation, but use compiled kernels once they exist."""
    is_started = best_kernels.cache_info().currsize > 0
    return best_kernels() if is_started or num_bytes >= MIN_COMPILED_BYTES else Kernels()


@cache
def best_kernels() -> Kernels:
    """The compiled kernels if the extra `fast` is installed."""
    try:
        importlib.import_module("numba")
    except ImportError:
        return Kernels()
    from penstock.weights.deltas.numba_kernels import NumbaKernels

    return NumbaKernels()
