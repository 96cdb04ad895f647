# SPDX-License-Identifier: Apache-2.0
"""The learner's weights as an ordinary Hugging Face folder, fast enough to write after every step.

Owns one folder of this process next to the weight store: the static files are linked into it once,
and the weights are a new file each time, because a reader must never see a file change. For a
policy that trains an adapter only the adapter is written; its model is linked as a static file.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from penstock.trainer.model_folders import (
    WEIGHTS,
    has_adapter,
    link_or_copy,
    static_files,
    weight_files,
)
from penstock.types import PolicyName
from penstock.weights.manifest import ADAPTER_WEIGHTS
from penstock.weights.publish import StoredVersion, delete_unreferenced, put_snapshot

_PREFIX = ".snapshot-"


def weights_of(
    model: PreTrainedModel, state: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Tensors by the names in its files; a tensor with several names is under its parameter's name,
    as usual. `state`: the full tensors of what this rank holds shards of."""
    seen: set[int] = set()
    weights: dict[str, Tensor] = {}
    own = {name for name, _ in model.named_parameters()}
    found = revert_weight_conversion(model, dict(state) if state else model.state_dict())
    for name, tensor in sorted(found.items(), key=lambda item: item[0] not in own):
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            weights[name] = tensor.detach().cpu().contiguous()
    return weights


class Snapshots:
    """Writes versions of one policy."""

    def __init__(
        self, store_root: Path, policy: PolicyName, model_folder: Path, *, anchor_every: int = 25
    ) -> None:
        self._store_root = store_root
        self._anchor_every = anchor_every
        self._policy = policy
        self._parent = store_root.parent
        self._prefix = f"{_PREFIX}{policy}-"
        self._parent.mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix=self._prefix, dir=self._parent))
        for path in unchanged_files(model_folder):
            if path.name != "trainer.json":  # a checkpoint's own file, which no engine needs
                link_or_copy(path, self._folder / path.name)
        self._weights_name = ADAPTER_WEIGHTS if has_adapter(model_folder) else WEIGHTS
        self._dtype = torch.float32 if has_adapter(model_folder) else _dtype(model_folder)
        self._last: StoredVersion | None = None

    @property
    def static(self) -> list[Path]:
        """Files that every folder of this policy's weights carries unchanged."""
        return unchanged_files(self._folder)

    def copy(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """These weights as they are now, in the precision that config.json names; an adapter's in
        float32."""
        return {
            name: tensor.to(self._dtype if tensor.is_floating_point() else tensor.dtype, copy=True)
            for name, tensor in weights.items()
        }

    def put(self, weights: Mapping[str, Tensor], number: int) -> StoredVersion:
        """Store such a copy as a version; the ledger publishes it."""
        temporary = self._folder / f".{self._weights_name}"
        save_file(dict(weights), temporary, metadata={"format": "pt"})
        temporary.replace(self._folder / self._weights_name)
        self._last = put_snapshot(
            self._store_root,
            self._folder,
            policy=self._policy,
            number=number,
            after=self._last,
            unchanged=[path.name for path in _frozen_files(self._folder)],
        )
        return self._last

    def collect_garbage(self, in_use: Collection[str], newest: Collection[str]) -> None:
        """Delete versions from the store, except the ones that these manifests reference."""
        delete_unreferenced(self._store_root, in_use, newest, anchor_every=self._anchor_every)

    def remove_stale_folders(self) -> None:
        """Delete what earlier processes of this trainer left; call it once they are fenced."""
        for path in self._parent.glob(f"{self._prefix}*"):
            if path != self._folder:
                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def unchanged_files(folder: Path) -> list[Path]:
    """Files that are the same in all versions: static ones, and an adapter's base model."""
    return static_files(folder) + _frozen_files(folder)


def _frozen_files(folder: Path) -> list[Path]:
    return weight_files(folder) if has_adapter(folder) else []


def _dtype(model_folder: Path) -> torch.dtype:
    config = json.loads((model_folder / "config.json").read_text())
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    dtype = getattr(torch, str(name), None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32
