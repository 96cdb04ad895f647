# SPDX-License-Identifier: Apache-2.0
"""A LoRA adapter that lies beside its base in a snapshot folder, as facts read without torch.

A version of a policy that trains an adapter is one folder: the base's own files, the same in every
version, and PEFT's `adapter_config.json` and `adapter_model.safetensors`. Owns the check that both
belong together, by name and shape, and that the base is the one before. Refuses every kind of
adapter but plain LoRA: y = base(x) + alpha / r * B(A(x)). Does not look at the values of tensors.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from blake3 import blake3

from penstock.errors import EngineError
from penstock.types import JsonObject
from penstock.weights.lora import A, B, unsupported_setting
from penstock.weights.manifest import ADAPTER_PREFIX, ADAPTER_WEIGHTS

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterInfo:
    rank: int
    scale: float
    modules: tuple[str, ...]
    """Paths of the linear layers that it changes, as the base's tensors call them, sorted."""


def read_adapter_info(
    config: JsonObject, adapter: Shapes, base: Shapes, where: Path
) -> AdapterInfo:
    """Raises EngineError unless the adapter's tensors are those of its config, for this base."""
    if why := unsupported_setting(config):
        raise EngineError(f"{where}: {why}; engines serve no other kind")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise EngineError(f"{where}: r is {rank!r} and lora_alpha {alpha!r}, not two numbers")
    targets = config.get("target_modules")
    if not isinstance(targets, list) or not targets:
        raise EngineError(f"{where}: target_modules is {targets!r}, not a list of layer names")
    modules = _modules(base, cast(list[str], targets))
    wanted = {
        ADAPTER_PREFIX + name + part: shape
        for name, (num_out, num_in) in modules.items()
        for part, shape in ((A, (rank, num_in)), (B, (num_out, rank)))
    }
    _check_tensors(wanted, adapter, where)
    return AdapterInfo(rank=rank, scale=alpha / rank, modules=tuple(sorted(modules)))


def _modules(base: Shapes, targets: list[str]) -> dict[str, tuple[int, int]]:
    """The base's linear layers with one of these names, or with a path that ends in one."""
    found: dict[str, tuple[int, int]] = {}
    for tensor, shape in base.items():
        name = tensor.removesuffix(".weight")
        is_meant = any(name == target or name.endswith(f".{target}") for target in targets)
        if name != tensor and len(shape) == 2 and is_meant:
            found[name] = (shape[0], shape[1])
    return found


def _check_tensors(wanted: Shapes, found: Shapes, where: Path) -> None:
    missing, unknown = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    wrong = sorted(
        f"{name} {found[name]} for {shape}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    )
    if missing or unknown or wrong or not wanted:
        raise EngineError(
            f"{where.parent} holds an adapter of another model: {len(missing)} tensors missing "
            f"{missing[:3]}, {len(unknown)} unknown {unknown[:3]}, {len(wrong)} of other shape "
            f"{wrong[:3]}; an adapter is loaded with the base that it was trained on"
        )


def check_same_layers(before: AdapterInfo | None, wanted: AdapterInfo | None, folder: Path) -> None:
    """A policy keeps its rank and its layers; `before` is of the version that it serves."""
    if before is None or wanted is None:
        is_adapter = "an adapter" if wanted is not None else "no adapter"
        raise EngineError(
            f"{folder} holds {is_adapter}, unlike the version before; a policy trains either an "
            "adapter or all weights for the whole run"
        )
    if (before.rank, before.modules) != (wanted.rank, wanted.modules):
        raise EngineError(
            f"{folder} holds an adapter of rank {wanted.rank} for {len(wanted.modules)} layers, "
            f"and the version before has rank {before.rank} for {len(before.modules)}; a policy "
            "keeps its architecture for the whole run"
        )


_FileIdentity = tuple[int, int, int, int]


@dataclass(slots=True)
class BaseDigests:
    """Tells bases apart by their bytes. Folders of a cache hold hard links of one file, which is
    read for the first of them only."""

    _digests: dict[_FileIdentity, str] = field(default_factory=dict[_FileIdentity, str])

    def digest(self, folder: Path) -> str:
        """Of all tensor files but the adapter's."""
        try:
            files = [path for path in sorted(folder.glob("*.safetensors")) if is_base(path)]
            return blake3("\n".join(map(self._digest, files)).encode()).hexdigest()
        except OSError as error:
            raise EngineError(f"cannot read {folder}: {error}; fetch the snapshot again") from None

    def _digest(self, path: Path) -> str:
        found = os.stat(path)
        identity = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
        if identity not in self._digests:
            self._digests[identity] = blake3(max_threads=1).update_mmap(path).hexdigest()
        return f"{path.name} {self._digests[identity]}"


def is_base(path: Path) -> bool:
    return path.name != ADAPTER_WEIGHTS
