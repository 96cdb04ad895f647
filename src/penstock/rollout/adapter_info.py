# SPDX-License-Identifier: Apache-2.0
"""Metadata of a LoRA adapter in a snapshot folder, read without torch.

A version of a policy that trains an adapter is one folder: the files of the base model, the same in
every version, and PEFT's `adapter_config.json` and `adapter_model.safetensors`. Checks that adapter
and base match by tensor names and shapes, and that the base has not changed. Supports only plain
LoRA: y = base(x) + alpha / r * B(A(x)). Does not read tensor values.
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
    """Names of the adapted linear layers in the base model, sorted."""


def read_adapter_info(
    config: JsonObject, adapter: Shapes, base: Shapes, where: Path
) -> AdapterInfo:
    """Read the adapter; raises EngineError if its tensors do not match its config and base."""
    if why := unsupported_setting(config):
        raise EngineError(f"{where}: {why}; engines support only plain LoRA")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise EngineError(f"{where}: r ({rank!r}) and lora_alpha ({alpha!r}) must be numbers")
    targets = config.get("target_modules")
    if not isinstance(targets, list) or not targets:
        raise EngineError(f"{where}: target_modules must be a list of layer names, got {targets!r}")
    modules = _modules(base, cast(list[str], targets))
    expected = {
        ADAPTER_PREFIX + name + part: shape
        for name, (num_out, num_in) in modules.items()
        for part, shape in ((A, (rank, num_in)), (B, (num_out, rank)))
    }
    _check_tensors(expected, adapter, where)
    return AdapterInfo(rank=rank, scale=alpha / rank, modules=tuple(sorted(modules)))


def _modules(base: Shapes, targets: list[str]) -> dict[str, tuple[int, int]]:
    """The base's linear layers whose name is, or ends in, one of the targets."""
    found: dict[str, tuple[int, int]] = {}
    for tensor, shape in base.items():
        name = tensor.removesuffix(".weight")
        is_meant = any(name == target or name.endswith(f".{target}") for target in targets)
        if name != tensor and len(shape) == 2 and is_meant:
            found[name] = (shape[0], shape[1])
    return found


def _check_tensors(expected: Shapes, found: Shapes, where: Path) -> None:
    missing, unknown = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    wrong = sorted(
        f"{name} {found[name]} for {shape}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    )
    if missing or unknown or wrong or not expected:
        raise EngineError(
            f"the adapter in {where.parent} does not match its base: {len(missing)} tensors "
            f"missing {missing[:3]}, {len(unknown)} unknown {unknown[:3]}, {len(wrong)} with a "
            f"wrong shape {wrong[:3]}; load an adapter with the base it was trained on"
        )


def check_same_layers(before: AdapterInfo | None, new: AdapterInfo | None, folder: Path) -> None:
    """Raise EngineError if rank or layers differ from `before`, the live version's adapter."""
    if before is None or new is None:
        has_adapter = "has an adapter" if new is not None else "has no adapter"
        raise EngineError(
            f"{folder} {has_adapter}, unlike the previous version; a policy trains either an "
            "adapter or all weights throughout the run"
        )
    if (before.rank, before.modules) != (new.rank, new.modules):
        raise EngineError(
            f"{folder} has an adapter of rank {new.rank} for {len(new.modules)} layers; the "
            f"previous version has rank {before.rank} for {len(before.modules)}. A policy cannot "
            "change its architecture during a run"
        )


_FileIdentity = tuple[int, int, int, int]


@dataclass(slots=True)
class BaseDigests:
    """Digests of base models. Cached folders hold hard links to the same files, so each file is
    read only once."""

    _digests: dict[_FileIdentity, str] = field(default_factory=dict[_FileIdentity, str])

    def digest(self, folder: Path) -> str:
        """Digest of all tensor files except the adapter's."""
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
