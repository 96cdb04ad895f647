# SPDX-License-Identifier: Apache-2.0
"""The learner's weights as an ordinary Hugging Face folder, fast enough to write after every step.

Owns one folder of this process next to the weight store, into which the static files are linked
once. The weights are written straight into the store, each time as a new file, because a reader
must never see a file change. For a policy that trains an adapter only the adapter is written; its
model is linked as a static file.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from penstock.errors import WeightsError, wrap_errors
from penstock.trainer.durable_files import KnownFile, new_token
from penstock.trainer.model_folders import (
    WEIGHTS,
    has_adapter,
    link_or_copy,
    static_files,
    weight_files,
)
from penstock.trainer.ranks.regions import Weights
from penstock.trainer.weight_shares import ShareBuffers, WeightShare, write_share
from penstock.types import PolicyName
from penstock.weights.manifest import ADAPTER_WEIGHTS
from penstock.weights.publish import (
    StoredVersion,
    delete_unreferenced,
    incoming_path,
    link_file,
    prepare_store,
    put_snapshot,
)

_PREFIX = ".snapshot-"
_LINK = ".linked-"


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
        self.dtype = dtype_of_versions(model_folder)
        self._buffers = ShareBuffers(self.dtype)
        self._last: StoredVersion | None = None

    @property
    def static(self) -> list[Path]:
        """Files that every folder of this policy's weights carries unchanged."""
        return unchanged_files(self._folder)

    def copy(self, weights: Weights) -> WeightShare:
        """These weights as they are now, in the precision that config.json names; an adapter's in
        float32. Of sharded ones, what rank 0 writes."""
        return self._buffers.copy(weights)

    def release(self, share: WeightShare) -> None:
        """This copy will not be stored."""
        self._buffers.release(share)

    def put(
        self, share: WeightShare, number: int, *, token: int | None = None, num_ranks: int = 1
    ) -> StoredVersion:
        """Store such a copy as a version, and release it; the ledger publishes the version.

        num_ranks, token: other ranks write their shares into the file with this token, and are
        waited for."""
        path = incoming_path(self._store_root, new_token() if token is None else token)
        try:
            with wrap_errors(WeightsError, f"writing a version to {path}"):
                prepare_store(self._store_root)
                write_share(path, share, num_ranks=num_ranks)
            self._buffers.release(share)
            self._last = put_snapshot(
                self._store_root,
                self._folder,
                policy=self._policy,
                number=number,
                after=self._last,
                unchanged=[path.name for path in _frozen_files(self._folder)],
                incoming={self._weights_name: path},
            )
        finally:
            path.unlink(missing_ok=True)
        return self._last

    def link_weights(self, stored: StoredVersion) -> KnownFile:
        """Another name for the weights of a stored version, which stays when the version is
        deleted; the one before is removed."""
        for path in self._folder.glob(f"{_LINK}*"):
            path.unlink()
        path = self._folder / f"{_LINK}{stored.weights_digest}"
        digest = link_file(self._store_root, stored, self._weights_name, path)
        return KnownFile(path=path, digest=digest)

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


def dtype_of_versions(model_folder: Path) -> torch.dtype:
    """What versions of this policy are written in: an adapter in float32, a model in the precision
    that its config.json names."""
    if has_adapter(model_folder):
        return torch.float32
    config = json.loads((model_folder / "config.json").read_text())
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    dtype = getattr(torch, str(name), None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32
