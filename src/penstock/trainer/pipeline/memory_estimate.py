# SPDX-License-Identifier: Apache-2.0
"""How much memory a stage's model takes: parameters times bytes.

Owns the estimate and the counting of parameters from a model folder's headers. Activations are not
in it: micro-batches are bounded by tokens, and what they take is reported by the learner.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

from penstock.config import LoraConfig
from penstock.hub import TINY_QWEN3, find_folder
from penstock.trainer.model_folders import tiny_shapes

WEIGHT_BYTES = 4
"""float32 is what the optimizer updates, whatever precision a forward pass computes in; a frozen
reference must agree with the policy it was copied from."""
ADAMW_BYTES = 8
"""Two moments in float32."""
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes of one model, or of one rank's shard of it."""

    weights_bytes: int = 0
    gradients_bytes: int = 0
    optimizer_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return sum(astuple(self))

    def per_rank(self, num_ranks: int) -> MemoryEstimate:
        """One rank's shard, rounded up."""
        return MemoryEstimate(*(-(-size // num_ranks) for size in astuple(self)))

    def __add__(self, other: MemoryEstimate) -> MemoryEstimate:
        return MemoryEstimate(*map(sum, zip(astuple(self), astuple(other), strict=True)))


def estimate(num_parameters: int, *, is_trained: bool) -> MemoryEstimate:
    """Of a full model: its weights and, if it is trained, gradients and AdamW's state."""
    weights_bytes = WEIGHT_BYTES * num_parameters
    if not is_trained:
        return MemoryEstimate(weights_bytes)
    return MemoryEstimate(weights_bytes, weights_bytes, ADAMW_BYTES * num_parameters)


def count_parameters(init: str) -> int | None:
    """Parameters of the model that `init` names; None if that folder is not on this machine."""
    shapes = _shapes_of(init)
    return None if shapes is None else sum(map(math.prod, shapes.values()))


def count_adapter(init: str, lora: LoraConfig) -> int | None:
    """Parameters of an adapter on such a model: rank × (in + out) for each adapted matrix. Without
    targets these are all matrices of the numbered layers."""
    if (shapes := _shapes_of(init)) is None:
        return None
    return sum(
        lora.rank * sum(shape)
        for name, shape in shapes.items()
        if len(shape) == 2 and _LAYER.search(name)
        if lora.targets is None or name.split(".")[-2] in lora.targets
    )


_LAYER = re.compile(r"\.\d+\..*\.weight$")


def _shapes_of(init: str) -> dict[str, tuple[int, ...]] | None:
    if init == TINY_QWEN3:
        return tiny_shapes()
    if (folder := find_folder(init)) is None:
        return None
    files = sorted(folder.glob("*.safetensors"))
    try:
        found = [_shapes(file) for file in files if not file.name.startswith("adapter_")]
    except (OSError, ValueError):
        return None
    return {name: shape for one in found for name, shape in one.items()} if found else None


def size_text(num_bytes: int) -> str:
    """`1.61 MB`, `80 GB`: three digits, powers of ten."""
    value, units = float(num_bytes), ("bytes", "kB", "MB", "GB", "TB")
    for unit in units[:-1]:
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.3g} {units[-1]}"


def _shapes(path: Path) -> Mapping[str, tuple[int, ...]]:
    """From the header only: eight bytes of its length, then JSON with every tensor's shape."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"{path} is not a safetensors file")
        header = json.loads(file.read(length))
    return {name: tuple(one["shape"]) for name, one in header.items() if name != "__metadata__"}
