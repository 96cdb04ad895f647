# SPDX-License-Identifier: Apache-2.0
"""Where the tensors of a model's files are in the tensors of the model.

Files may hold other tensors than the model does: a matrix per expert and projection, where the
model has one tensor for all of them. Each is a region of a tensor of the model, so a rank reads and
writes the regions that it holds, and no rank needs the full tensor. The map is found by converting
tensors without content and looking at where each result was cut from; a conversion that computes
something (a permutation, say) has no such map.

Owns the map; reads no file and calls no collective.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from penstock.trainer.ranks.regions import (
    TensorPart,
    TensorRegion,
    is_owner,
    local,
    region_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTensor:
    """A tensor of a file, as a region of a tensor of the model."""

    source: str
    """Name of the model's tensor."""
    region: TensorRegion
    dims: tuple[int, ...]
    """The dimension of the model's tensor that each dimension in the file is; the others have size
    1 in the region."""

    @classmethod
    def whole(cls, source: str, shape: Sequence[int]) -> FileTensor:
        """The model's tensor itself."""
        return cls(source=source, region=TensorRegion.full(shape), dims=tuple(range(len(shape))))

    @property
    def shape(self) -> tuple[int, ...]:
        """In the file."""
        return tuple(self.region.shape[dim] for dim in self.dims)

    def slices_of(self, region: TensorRegion) -> tuple[slice, ...]:
        """In the tensor of the file: a region of the model's tensor that is inside this one."""
        inside = region.slices_in(self.region)
        return tuple(inside[dim] for dim in self.dims)

    def part_of(self, tensor: Tensor) -> Tensor | TensorPart:
        """What this rank holds of it, given the model's tensor."""
        held = region_of(tensor)
        if self.region == TensorRegion.full(self.region.full_shape):
            return tensor.detach()
        shape = self.shape
        if held is None:
            whole = TensorRegion.full(tensor.shape)
            return tensor.detach()[self.region.slices_in(whole)].view(shape)
        own = local(tensor).detach()
        both = held.intersect(self.region)
        if both is None:
            empty = TensorRegion(
                offset=(0,) * len(shape), shape=(0,) * len(shape), full_shape=shape
            )
            return TensorPart(region=empty, content=own.new_empty(empty.shape), is_owned=False)
        inside = self.slices_of(both)
        region = TensorRegion(
            offset=tuple(one.start for one in inside),
            shape=tuple(one.stop - one.start for one in inside),
            full_shape=shape,
        )
        content = own[both.slices_in(held)].view(region.shape)
        return TensorPart(region=region, content=content, is_owned=is_owner(tensor))


def file_tensors(model: PreTrainedModel) -> dict[str, FileTensor] | None:
    """The tensors of a model's files, by name, in the same order on every rank; None if one of them
    is computed from the model's. A tensor with several names is under its parameter's name, as
    usual."""
    sources = _outlines(model)
    by_storage = {_storage_id(outline): name for name, outline in sources.items()}
    with torch.no_grad(), _CutsAreViews(sources.values()) as views:
        converted = revert_weight_conversion(model, dict(sources))
    found: dict[str, FileTensor] = {}
    num_covered = Counter[str]()
    for name, tensor in sorted(converted.items()):
        cut = views.find(tensor)
        if cut is None:
            return None
        source = by_storage[_storage_id(tensor)]
        found[name] = FileTensor(source=source, region=cut[0], dims=cut[1])
        num_covered[source] += math.prod(cut[0].shape)
    if num_covered != {name: outline.numel() for name, outline in sources.items()}:
        return None
    return found


def by_source(tensors: Mapping[str, FileTensor]) -> dict[str, dict[str, FileTensor]]:
    """The tensors of files that make up each tensor of the model."""
    found: dict[str, dict[str, FileTensor]] = {}
    for name, one in tensors.items():
        found.setdefault(one.source, {})[name] = one
    return found


def _outlines(model: PreTrainedModel) -> dict[str, Tensor]:
    """Tensors of these shapes without content, one for each tensor of the model."""
    own = {name for name, _ in model.named_parameters()}
    seen: set[int] = set()
    found: dict[str, Tensor] = {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in sorted(state.items(), key=lambda item: item[0] not in own):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return found


class _CutsAreViews(TorchDispatchMode):
    """Copies of regions are not made: the result stays a view, which tells where it was cut."""

    def __init__(self, sources: Iterable[Tensor]) -> None:
        super().__init__()
        self._sources = {_storage_id(source): source for source in sources}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.clone.default and self.find(args[0]) is not None:
            return args[0].detach()
        return func(*args, **(kwargs or {}))

    def find(self, view: Tensor) -> tuple[TensorRegion, tuple[int, ...]] | None:
        """The region of a source that this is a view of, and the source's dimension of each of its
        dimensions; None if it is anything else."""
        source = self._sources.get(_storage_id(view))
        if source is None:
            return None
        shape, left = [1] * source.ndim, iter(range(source.ndim))
        dims: list[int] = []
        for size, stride in zip(view.shape, view.stride(), strict=True):
            dim = next((dim for dim in left if source.stride(dim) == stride), None)
            if dim is None or size > source.shape[dim]:
                return None
            shape[dim] = size
            dims.append(dim)
        at = int(view.storage_offset())
        offset: list[int] = []
        for dim in range(source.ndim):
            offset.append(at // source.stride(dim))
            at %= source.stride(dim)
        region = TensorRegion(
            offset=tuple(offset), shape=tuple(shape), full_shape=tuple(source.shape)
        )
        return region, tuple(dims)


def _storage_id(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
