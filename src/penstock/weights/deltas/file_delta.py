# SPDX-License-Identifier: Apache-2.0
"""Deltas between two safetensors files of the same layout: create one, or apply it to a copy.

Two files have the same layout if all bytes except their weights are equal; there is no delta
between other files. Files are memory-mapped, so little more than one tensor is in memory. The
result of `apply_in_place` is not verified: the caller must hash it before use.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from penstock.durable import open_regular
from penstock.errors import WeightsError
from penstock.weights.deltas.codec import apply_payload, changed_elements
from penstock.weights.deltas.delta import (
    Frame,
    Tensor,
    Writable,
    read_delta,
    write_delta,
    write_frames,
)
from penstock.weights.deltas.numpy_kernels import Positions
from penstock.weights.deltas.payload import Kind
from penstock.weights.tensors import (
    ITEM_BYTES,
    NUM_THREADS,
    Layout,
    Scan,
    TensorEntry,
    TensorRange,
    new_hash,
    read_layout,
)

POSITION_BYTES = 4
"""Of a changed element's position in a patch, at least; eight in a very large tensor."""


def layout_of(path: Path) -> Layout:
    with open_regular(path) as file:
        return read_layout(file, path.name)


def has_same_layout(base: Path, new: Path) -> bool:
    return layout_of(base) == layout_of(new)


def make_delta(base: Path, new: Path, out: Writable, *, base_blob: str, target_blob: str) -> None:
    """Write the delta that turns `base` into `new`, which has the same layout."""
    layout = layout_of(new)
    with _mapped(base) as old, _mapped(new) as now:
        write_delta(out, base_blob, target_blob, _tensors(layout, old, now))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScannedPair:
    """What one pass over two files found."""

    new: Scan
    base_blob: str


def scan_and_diff(base: Path, new: Path, out: Writable) -> ScannedPair | None:
    """Hash both files and write the frames of the delta between them, in one pass over each; None
    if they have different layouts."""
    layout = layout_of(new)
    if layout_of(base) != layout:
        return None
    hashes = [new_hash(layout.num_bytes) for _ in range(2)]
    tensors: list[Future[TensorEntry]] = []
    with _mapped(base) as old, _mapped(new) as now, ThreadPoolExecutor(NUM_THREADS) as pool:
        for digest in hashes:
            digest.update(layout.head)

        def hashed() -> Iterator[Tensor]:
            for name, item_bytes, before, after in _tensors(layout, old, now):
                assert before is not None, "both files have this tensor"
                tensors.append(pool.submit(_entry, name, layout.byte_ranges[name], after))
                for digest, content in zip(hashes, (before, after), strict=True):
                    digest.update(content)
                yield name, item_bytes, before, after

        write_frames(out, hashed())
        entries = tuple(found.result() for found in tensors)
    scan = Scan(blob=hashes[1].hexdigest(), num_bytes=layout.num_bytes, tensors=entries)
    return ScannedPair(new=scan, base_blob=hashes[0].hexdigest())


def _entry(name: str, found: TensorRange, content: memoryview) -> TensorEntry:
    digest = new_hash(len(content)).update(content).hexdigest()
    return TensorEntry(name=name, dtype=found.dtype, shape=found.shape, digest=digest)


def _tensors(layout: Layout, old: memoryview, now: memoryview) -> Iterator[Tensor]:
    for name, byte_range in layout.byte_ranges.items():
        here = slice(byte_range.start, byte_range.end)
        yield name, ITEM_BYTES[byte_range.dtype], old[here], now[here]


def apply_in_place(made: Path, delta: BinaryIO, *, base_blob: str) -> None:
    """Turn a file that contains the delta's base into its target."""
    layout = layout_of(made)
    header, frames = read_delta(delta, layout.sizes)
    _check_base(header.base, base_blob, made.name)
    with _mapped(made, is_writable=True) as raw:
        for frame in frames:
            ranges = [layout.byte_ranges[name] for name in frame.names]
            here = [raw[found.start : found.end] for found in ranges]
            apply_payload(frame.payload, here, frame.item_bytes)


def changed_by(
    delta: BinaryIO, layout: Layout, *, base_blob: str, max_bytes: int
) -> dict[str, Positions | None] | None:
    """Which elements of each tensor this delta changes, in ascending order; None for all of them.
    Tensors without changes are left out. No positions are made for a delta whose changes take more
    than `max_bytes` in a patch: None for the whole."""
    header, frames = read_delta(delta, layout.sizes)
    _check_base(header.base, base_blob, "the base of this step")
    sizes, changed = layout.sizes, dict[str, Positions | None]()
    for frame in frames:
        _check_item_bytes(frame, layout)
        of_frame = [sizes[name] for name in frame.names]
        max_bytes -= _patch_bytes(frame, sum(of_frame))
        if max_bytes < 0:
            return None
        found = changed_elements(frame.payload, of_frame, frame.item_bytes)
        changed.update(zip(frame.names, found, strict=True))
    return {name: found for name, found in changed.items() if found is None or len(found)}


def _patch_bytes(frame: Frame, num_bytes: int) -> int:
    """What the changes of tensors of `num_bytes` bytes take in a patch, at least."""
    match frame.payload.kind:
        case Kind.SAME:
            return 0
        case Kind.SPARSE:
            return frame.payload.num_changed * (POSITION_BYTES + frame.item_bytes)
        case Kind.FULL:
            return num_bytes


def _check_item_bytes(frame: Frame, layout: Layout) -> None:
    """Applied in items of another size a delta may give the right file, but its positions do not
    count elements."""
    for name in frame.names:
        expected = ITEM_BYTES[layout.byte_ranges[name].dtype]
        if frame.item_bytes != expected:
            raise WeightsError(
                f"delta: tensor {name} has items of {frame.item_bytes} bytes, not {expected}"
            )


def _check_base(found: str, expected: str, what: str) -> None:
    if found != expected:
        raise WeightsError(f"the delta has base {found[:12]}, but {what} is {expected[:12]}")


@contextmanager
def _mapped(path: Path, *, is_writable: bool = False) -> Generator[memoryview]:
    flags = os.O_RDWR if is_writable else os.O_RDONLY
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        access = mmap.ACCESS_WRITE if is_writable else mmap.ACCESS_READ
        # An exception may keep views alive beyond this block; the map is freed with the last view.
        yield memoryview(mmap.mmap(descriptor, 0, access=access))
    finally:
        os.close(descriptor)
