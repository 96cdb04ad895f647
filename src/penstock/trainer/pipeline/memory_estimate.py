# SPDX-License-Identifier: Apache-2.0
"""How much memory a rank takes at its peak: its shards of models, and its largest pass.

Owns the estimate, its words, and the counting of parameters from a model folder's headers. The
formulas of a pass are in `pass_memory`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from penstock.config import LoraConfig
from penstock.durable import open_regular
from penstock.hub import TINY_QWEN3, find_folder, read_text_file
from penstock.trainer.model_folders import tiny_config, tiny_shapes
from penstock.trainer.pipeline.pass_memory import (
    FLOAT32,
    PRECISION_BYTES,
    ModelShape,
    PassSpec,
    pass_memory,
)

WEIGHT_BYTES = FLOAT32
"""float32 is what the optimizer updates, whatever precision a forward pass computes in."""
ADAMW_BYTES = 8
"""Two moments in float32."""
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes of one model, or of one rank at its peak."""

    weights_bytes: int = 0
    gradients_bytes: int = 0
    optimizer_bytes: int = 0
    gathered_bytes: int = 0
    """Of a pass: weights that it gathers, and their gradients until they are reduced."""
    activation_bytes: int = 0
    """Of a pass: what it keeps or recomputes for its backward pass."""
    logits_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return sum(astuple(self))

    @property
    def parts(self) -> dict[str, int]:
        """What it is made of, by words for people; empty parts are left out."""
        words = ("weights", "gradients", "AdamW", "gathered weights", "activations", "logits")
        return {word: size for word, size in zip(words, astuple(self), strict=True) if size}

    @property
    def text(self) -> str:
        """`80 GB (weights 20 GB, …)`; empty if there is no model."""
        named = ", ".join(f"{word} {size_text(size)}" for word, size in self.parts.items())
        return f"{size_text(self.total_bytes)} ({named})" if named else ""

    def per_rank(self, num_ranks: int) -> MemoryEstimate:
        """One rank's shard, rounded up."""
        return MemoryEstimate(*(-(-size // num_ranks) for size in astuple(self)))

    def __add__(self, other: MemoryEstimate) -> MemoryEstimate:
        return MemoryEstimate(*map(sum, zip(astuple(self), astuple(other), strict=True)))


def estimate(
    num_parameters: int, *, is_trained: bool, passes: PassSpec | None = None
) -> MemoryEstimate:
    """Of a full model: its weights and, if it is trained, gradients and AdamW's state. A frozen
    model is kept in the precision of its passes; moments may be in host memory."""
    if not is_trained:
        each = PRECISION_BYTES[passes.precision] if passes else WEIGHT_BYTES
        return MemoryEstimate(each * num_parameters)
    moments = 0 if passes and passes.is_offloaded else ADAMW_BYTES
    weights_bytes = WEIGHT_BYTES * num_parameters
    return MemoryEstimate(weights_bytes, weights_bytes, moments * num_parameters)


def estimate_pass(init: str, num_parameters: int, passes: PassSpec) -> MemoryEstimate | None:
    """Of the largest training pass of one rank; None if the model's shape is unknown."""
    if (shape := shape_of(init)) is None:
        return None
    found = pass_memory(shape, num_parameters, passes)
    return MemoryEstimate(
        gathered_bytes=found.gathered_bytes,
        activation_bytes=found.activation_bytes,
        logits_bytes=found.logits_bytes,
    )


def shape_of(init: str) -> ModelShape | None:
    """Of the model that `init` names; None if its config.json is missing, or of another kind."""
    if init == TINY_QWEN3:
        return ModelShape.read(tiny_config())
    if (folder := find_folder(init)) is None:
        return None
    try:
        config: Any = json.loads(read_text_file(folder / "config.json"))
    except (OSError, ValueError, RecursionError):
        return None
    return ModelShape.read(config) if isinstance(config, dict) else None


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
    with open_regular(path, follow_links=True) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"{path} is not a safetensors file")
        header = json.loads(file.read(length))
    return {name: tuple(one["shape"]) for name, one in header.items() if name != "__metadata__"}
