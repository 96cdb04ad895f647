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
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from penstock.errors import WeightsError
from penstock.weights.deltas.codec import apply_payload
from penstock.weights.deltas.delta import Tensor, Writable, read_delta, write_delta
from penstock.weights.store import open_regular
from penstock.weights.tensors import ITEM_BYTES, Layout, read_layout


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


def _tensors(layout: Layout, old: memoryview, now: memoryview) -> Iterator[Tensor]:
    for name, byte_range in layout.byte_ranges.items():
        here = slice(byte_range.start, byte_range.end)
        yield name, ITEM_BYTES[byte_range.dtype], old[here], now[here]


def apply_in_place(made: Path, delta: BinaryIO, *, base_blob: str) -> None:
    """Turn a file that contains the delta's base into its target."""
    layout = layout_of(made)
    header, frames = read_delta(delta, layout.sizes)
    if header.base != base_blob:
        raise WeightsError(
            f"the delta has base {header.base[:12]}, but {made.name} is {base_blob[:12]}"
        )
    with _mapped(made, is_writable=True) as raw:
        for frame in frames:
            ranges = [layout.byte_ranges[name] for name in frame.names]
            here = [raw[found.start : found.end] for found in ranges]
            apply_payload(frame.payload, here, frame.item_bytes)


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
