# SPDX-License-Identifier: Apache-2.0
"""Writes a patch into the loaded tensors of a transformers model, and verifies them afterwards.

Everything is read, checked and converted beforehand, so that the decoding thread only writes the
changed elements. Rejects a patch that names other tensors than the model has, or elements outside
of them. A tensor is verified by its digest, in the precision of the version's files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from penstock.errors import EngineError
from penstock.weights.patches import POSITIONS, VALUES, read_digests, tensors_to_verify

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Precisions that float32 holds exactly, so that the bits of the files can be had again."""


@dataclass(frozen=True, slots=True)
class LoadedTensors:
    tensors: Mapping[str, Tensor]
    names: Mapping[str, str]
    """Name in `tensors`, by each name that a file may use."""

    def find(self, name: str) -> Tensor | None:
        return self.tensors.get(self.names.get(name, name))


@dataclass(frozen=True, slots=True)
class StagedPatch:
    apply: Callable[[], None]
    verify: Callable[[int], str | None]


def read_patch(path: Path, loaded: LoadedTensors) -> StagedPatch:
    """Prepare the patch; raises EngineError if it does not fit the loaded tensors."""
    writes: list[tuple[NDArray[Any], NDArray[np.int64], NDArray[Any]]] = []
    copies: list[tuple[Tensor, Tensor]] = []
    with safe_open(path, framework="pt") as file:
        digests = read_digests(file.metadata())
        keys: set[str] = set(file.keys())
        for key in keys:
            if not key.startswith(VALUES):
                continue
            name, values = key.removeprefix(VALUES), file.get_tensor(key)
            target = loaded.find(name)
            if target is None:
                raise EngineError(f"{path} changes {name}, which this model does not have")
            if POSITIONS + name not in keys:
                copies.append((target, values.reshape(target.shape)))
                continue
            positions = file.get_tensor(POSITIONS + name).to(torch.int64).numpy()
            if len(positions) and not 0 <= positions.min() <= positions.max() < target.numel():
                raise EngineError(f"{path} changes elements outside of {name}")
            flat = target.detach().view(-1).numpy()
            writes.append((flat, positions, values.to(target.dtype).numpy()))
    if odd := sorted(dtype for dtype, _ in digests.values() if dtype not in DTYPES):
        raise EngineError(f"{path}: tensors of {odd[0]} cannot be verified once loaded")

    def apply() -> None:
        for flat, positions, values in writes:
            flat[positions] = values
        for target, values in copies:
            target.copy_(values)

    def verify(num_patches: int) -> str | None:
        for name in tensors_to_verify(digests, num_patches):
            dtype, digest = digests[name]
            target = loaded.find(name)
            if target is None or _digest(target, DTYPES[dtype]) != digest:
                return f"{name} does not have the bits of its version"
        return None

    return StagedPatch(apply, verify)


def _digest(tensor: Tensor, dtype: torch.dtype) -> str:
    raw = tensor.detach().to(dtype).contiguous().view(-1).view(torch.uint8).numpy()
    return blake3(raw.data).hexdigest()
