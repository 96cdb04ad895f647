# SPDX-License-Identifier: Apache-2.0
"""One rank's share of a weights file: copied in a moment, then written to its place in the file.

All ranks write into one safetensors file, whose layout follows from names, dtypes and shapes. Rank
0 creates the file; each other rank waits for it, writes the regions that it owns, and leaves a
receipt next to the file once they are on disk. No tensor passes between ranks. The ranks share the
folder: on several hosts it must be on a shared file system.

Owns the copies, the writes and the receipts; not when the file becomes a version or a checkpoint.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from penstock.durable import sync
from penstock.trainer.ranks.regions import (
    TensorPart,
    TensorRegion,
    Weights,
    is_owner,
    local,
    region_of,
)
from penstock.weights.tensors import ITEM_BYTES, Layout, make_layout

POLL_S = 0.01
NUM_BUFFERS = 2
"""One for the version being written, one for the version that waits."""
WRITE_BYTES = 64 << 20
_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightShare:
    """The regions that one rank writes, in host memory; later steps do not change them."""

    layout: Layout
    """Of the complete file; the same on every rank that owns a region."""
    regions: Mapping[str, TensorRegion]
    tensors: Mapping[str, Tensor]


class ShareBuffers:
    """Copies shares into memory that is used again: fresh memory costs more than the copy."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        """dtype: of all floating-point tensors in the file; None keeps their own."""
        self._dtype = dtype
        self._free: list[dict[str, Tensor]] = []

    @torch.no_grad()  # each look at a local tensor would else be a node of a graph
    def copy(self, weights: Weights, *, is_rank0: bool = True) -> WeightShare:
        """This rank's regions as they are now, cast where they are. Tensors that are not sharded
        are in rank 0's share."""
        owned = {
            name: tensor
            for name, tensor in weights.items()
            if is_owner(tensor) and (is_rank0 or region_of(tensor) is not None)
        }
        buffer = self._free.pop() if self._free else {}
        copies = {
            name: self._copy(local(t).detach(), buffer.get(name)) for name, t in owned.items()
        }
        if any(local(tensor).is_cuda for tensor in owned.values()):
            torch.cuda.synchronize()
        return WeightShare(
            layout=make_layout({name: self._entry(tensor) for name, tensor in weights.items()}),
            regions={
                name: region_of(tensor) or TensorRegion.full(tensor.shape)
                for name, tensor in owned.items()
            },
            tensors=copies,
        )

    def release(self, share: WeightShare) -> None:
        """Its memory may be used again."""
        if len(self._free) < NUM_BUFFERS:
            self._free.append(dict(share.tensors))

    def _copy(self, source: Tensor, into: Tensor | None) -> Tensor:
        dtype = self._dtype_in_file(source)
        if into is None or into.shape != source.shape or into.dtype != dtype:
            into = torch.empty(source.shape, dtype=dtype, pin_memory=source.is_cuda)
        return into.copy_(source.to(dtype) if source.is_cuda else source, non_blocking=True)

    def _entry(self, tensor: Tensor | TensorPart) -> tuple[str, tuple[int, ...]]:
        return _DTYPES[self._dtype_in_file(tensor)], tuple(tensor.shape)

    def _dtype_in_file(self, tensor: Tensor | TensorPart) -> torch.dtype:
        return (self._dtype or tensor.dtype) if tensor.dtype.is_floating_point else tensor.dtype


# --- writing --------------------------------------------------------------------------------------


def write_share(path: Path, share: WeightShare, *, num_ranks: int = 1) -> None:
    """On rank 0: create the file and fill it, with the other ranks. Durable when this returns.

    waits for: the receipts of the other ranks · ends: when all exist. A rank that dies is noticed
    by the supervisor, which also ends this wait."""
    create_file(path, share.layout)
    fill_file(path, share)
    receipts = [_receipt(path, rank) for rank in range(1, num_ranks)]
    while not all(receipt.exists() for receipt in receipts):
        time.sleep(POLL_S)
    for receipt in receipts:
        receipt.unlink()


def write_share_of_rank(
    path: Path, share: WeightShare, *, rank: int, is_cancelled: Callable[[], bool]
) -> None:
    """On every other rank: fill this rank's regions once rank 0 has created the file, then leave a
    receipt. If this is cancelled before that, nothing is written."""
    if await_file(path, is_cancelled):
        fill_file(path, share)
        _receipt(path, rank).touch()


def create_file(path: Path, layout: Layout) -> None:
    """The file in its full size, with its header and without weights."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with open(os.open(path, flags, 0o644), "wb", buffering=0) as file:
        _write_at(file.fileno(), memoryview(layout.head), 0)
        os.ftruncate(file.fileno(), layout.num_bytes)


def await_file(path: Path, is_cancelled: Callable[[], bool]) -> bool:
    """Wait until rank 0 has created the file; False if this was cancelled first."""
    while not path.exists():
        if is_cancelled():
            return False
        time.sleep(POLL_S)
    return True


def fill_file(path: Path, share: WeightShare) -> None:
    """Write these regions to their places. Durable when this returns."""
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for name, tensor in share.tensors.items():
            place = share.layout.byte_ranges[name]
            content = tensor.reshape(-1).view(torch.uint8).numpy().data
            at = 0
            for start, num_bytes in _runs(share.regions[name], ITEM_BYTES[place.dtype]):
                _write_at(descriptor, content[at : at + num_bytes], place.start + start)
                at += num_bytes
    finally:
        os.close(descriptor)
    sync(path)


def _runs(region: TensorRegion, item_bytes: int) -> Iterator[tuple[int, int]]:
    """(offset in the full tensor, length) in bytes of each contiguous run of a region, in order."""
    shape, full = region.shape, region.full_shape
    cut = max((dim for dim, size in enumerate(shape) if size != full[dim]), default=0)
    num_bytes = math.prod(shape[cut:]) * item_bytes
    strides = [math.prod(full[dim + 1 :]) * item_bytes for dim in range(len(full))]
    first = sum(at * stride for at, stride in zip(region.offset, strides, strict=True))
    for index in np.ndindex(shape[:cut]):
        yield (
            first + sum(at * stride for at, stride in zip(index, strides, strict=False)),
            num_bytes,
        )


def _write_at(descriptor: int, content: memoryview, at: int) -> None:
    while content:
        written = os.pwrite(descriptor, content[:WRITE_BYTES], at)
        content, at = content[written:], at + written


def _receipt(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.name}.written-by-rank-{rank}")
