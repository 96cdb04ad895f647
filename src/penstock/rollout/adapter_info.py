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
from dataclasses import dataclass
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
    difference = tensor_difference(expected, adapter)
    if difference or not expected:
        raise EngineError(
            f"the adapter in {where.parent} does not match its base: "
            f"{difference or 'no layer of the base is adapted'}; "
            "load an adapter with the base it was trained on"
        )
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


def tensor_difference(expected: Shapes, found: Shapes) -> str:
    """How two sets of tensors differ in names and shapes; empty if they do not."""
    missing, unknown = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    wrong = sorted(
        f"{name} {found[name]} for {shape}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    )
    if not (missing or unknown or wrong):
        return ""
    return (
        f"{len(missing)} tensors missing {missing[:3]}, {len(unknown)} unknown {unknown[:3]}, "
        f"{len(wrong)} with a wrong shape {wrong[:3]}"
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


class BaseDigests:
    """Digests of base models. Cached folders hold hard links to the same files, so each file is
    read only once."""

    def __init__(self) -> None:
        self._digests: dict[tuple[int, ...], str] = {}

    def digest(self, folder: Path) -> str:
        """Digest of all tensor files except the adapter's."""
        try:
            digests = map(self._digest, tensor_files(folder))
            return blake3("\n".join(digests).encode()).hexdigest()
        except OSError as error:
            raise EngineError(f"cannot read {folder}: {error}; fetch the snapshot again") from None

    def _digest(self, path: Path) -> str:
        found = os.stat(path)
        identity = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
        if identity not in self._digests:
            self._digests[identity] = blake3(max_threads=1).update_mmap(path).hexdigest()
        return f"{path.name} {self._digests[identity]}"


def tensor_files(folder: Path) -> list[Path]:
    """The model's tensor files, without the adapter's."""
    return [path for path in sorted(folder.glob("*.safetensors")) if path.name != ADAPTER_WEIGHTS]
