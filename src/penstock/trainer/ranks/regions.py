# SPDX-License-Identifier: Apache-2.0
"""Which region of a tensor a rank holds, and which of several ranks with the same region writes it.

Owns the arithmetic of regions; moves no tensor and calls no collective.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRegion:
    """A region of a tensor: its offset and shape in each dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    full_shape: tuple[int, ...]
    """Shape of the full tensor."""

    @classmethod
    def full(cls, shape: Sequence[int]) -> TensorRegion:
        return cls(offset=(0,) * len(shape), shape=tuple(shape), full_shape=tuple(shape))

    def intersect(self, other: TensorRegion) -> TensorRegion | None:
        """The intersection; None if it is empty."""
        offset = tuple(map(max, self.offset, other.offset))
        ends = map(min, self._ends, other._ends)
        shape = tuple(end - start for end, start in zip(ends, offset, strict=True))
        if min(shape, default=1) <= 0:
            return None
        return TensorRegion(offset=offset, shape=shape, full_shape=self.full_shape)

    def slices_in(self, other: TensorRegion) -> tuple[slice, ...]:
        """This region's slices in another one that contains it."""
        return tuple(
            slice(offset - start, offset - start + size)
            for offset, start, size in zip(self.offset, other.offset, self.shape, strict=True)
        )

    @property
    def _ends(self) -> Iterable[int]:
        return (offset + size for offset, size in zip(self.offset, self.shape, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPart:
    """What this rank holds of a tensor that is itself a region of a sharded one, such as one
    expert's matrix."""

    region: TensorRegion
    content: Tensor
    """Of this region, maybe empty."""
    is_owned: bool
    """Whether this rank is the first of those with the same region."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.region.full_shape

    @property
    def dtype(self) -> torch.dtype:
        return self.content.dtype


Weights = Mapping[str, Tensor | TensorPart]
"""A model's tensors by the names in its files; of a sharded model, what this rank holds of them."""


def region_of(tensor: Tensor | TensorPart) -> TensorRegion | None:
    """The region that this rank holds; None for a tensor that is not sharded."""
    if isinstance(tensor, TensorPart):
        return tensor.region
    if not isinstance(tensor, DTensor):
        return None
    offset, shape = [0] * tensor.ndim, list(tensor.shape)
    mesh = tensor.device_mesh
    cuts = list(zip(mesh.shape, mesh.get_coordinate() or (), tensor.placements, strict=True))
    for num_parts, part, placement in reversed(cuts):  # FSDP shards what tp has sharded already
        assert not placement.is_partial(), "a pending reduction"
        if not placement.is_replicate():
            dim = int(cast(Any, placement).dim)
            each = -(-shape[dim] // num_parts)
            start = min(part * each, shape[dim])
            offset[dim] += start
            shape[dim] = min(each, shape[dim] - start)
    region = TensorRegion(offset=tuple(offset), shape=tuple(shape), full_shape=tuple(tensor.shape))
    assert region.shape == tuple(tensor.to_local().shape), (
        "this rank holds another region than its placement"
    )
    return region


def is_owner(tensor: Tensor | TensorPart) -> bool:
    """Whether this rank is the first of those with the same region; false if that is empty."""
    if isinstance(tensor, TensorPart):
        return tensor.is_owned
    if not isinstance(tensor, DTensor):
        return True
    mesh = tensor.device_mesh
    if _first_rank(mesh):  # tp leaves this tensor whole; the ranks of rank 0's mesh write
        return False
    at = zip(mesh.get_coordinate() or (), tensor.placements, strict=True)
    is_rank0 = all(part == 0 for part, placement in at if placement.is_replicate())
    return is_rank0 and tensor.to_local().numel() > 0


@lru_cache(maxsize=16)  # a mesh computes its ranks at each call, and every tensor asks
def _first_rank(mesh: DeviceMesh) -> int:
    return int(mesh.mesh.flatten()[0])


def local(tensor: Tensor | TensorPart) -> Tensor:
    """This rank's local tensor."""
    if isinstance(tensor, TensorPart):
        return tensor.content
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_dtensor(share: Tensor, like: Tensor) -> Tensor:
    """This rank's shard as a region of the full tensor, like another tensor's."""
    assert isinstance(like, DTensor), "a plain tensor has no shards"
    return DTensor.from_local(
        share.to(like.device),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
