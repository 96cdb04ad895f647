# SPDX-License-Identifier: Apache-2.0
"""Loads a model of which each rank reads only its shard.

Rank 0 reads the full model, because it also checks it. The others start with a meta model, whose
tensors have shapes and no content; they cut it as rank 0 does, and then read their slices of the
same files. Buffers that a model computes itself, such as the tables of its position encoding, are
broadcast by rank 0.

Owns which file of a folder holds which tensor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from penstock.trainer.device import CPU
from penstock.trainer.model_folders import load_model, weight_files
from penstock.trainer.ranks.group import RankGroup, Ranks
from penstock.trainer.ranks.regions import TensorRegion, local, region_of


def make_meta_model(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of a folder without its content."""
    config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
    maker: Any = AutoModelForCausalLM
    with torch.device("meta"):
        return maker.from_config(config, dtype=dtype)


def load_meta_model(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The same, but loaded in full if its files use other tensor names."""
    meta_model = make_meta_model(folder, dtype)
    stored = {name: file.get_slice(name).get_shape() for name, file in _files(folder).items()}
    is_known = all(stored.get(name) == [*p.shape] for name, p in meta_model.named_parameters())
    return meta_model if is_known else load_model(folder, dtype)


def load_weight_slices(
    root: nn.Module, model: PreTrainedModel, folder: Path, ranks: Ranks, device: torch.device = CPU
) -> None:
    """Load the content of a sharded meta model; every rank calls it, rank 0 for the others.

    `root` is the sharded module: the model, or a module around it."""
    if not isinstance(ranks, RankGroup):
        return
    if any(parameter.is_meta for parameter in root.parameters()):
        _read(root, model, folder, device)
    for buffer in root.buffers():
        ranks.broadcast_tensor_from_rank0(buffer)


@torch.no_grad()
def _read(root: nn.Module, model: PreTrainedModel, folder: Path, device: torch.device) -> None:
    """Tensors that are not in the folder, of an adapter or a head, stay."""
    empty = {name for name, parameter in model.named_parameters() if parameter.is_meta}
    existing = {n: local(p).clone() for n, p in root.named_parameters() if not p.is_meta}
    root.to_empty(device=device)
    for name, parameter in root.named_parameters():
        if name in existing:
            local(parameter).copy_(existing[name])
    files = _files(folder)
    for name, parameter in model.named_parameters():
        if name in empty:
            _copy_slice(files[name], name, parameter)


def _copy_slice(file: Any, name: str, parameter: Tensor) -> None:
    share = local(parameter)
    if share.numel():
        region = region_of(parameter) or TensorRegion.full(parameter.shape)
        share.copy_(file.get_slice(name)[region.slices_in(TensorRegion.full(region.full_shape))])


def _files(folder: Path) -> dict[str, Any]:
    """The open file of each tensor of a folder, by name; only headers are read yet."""
    found: dict[str, Any] = {}
    for path in weight_files(folder):
        if path.suffix == ".safetensors":
            file: Any = safe_open(path, framework="pt")
            found |= dict.fromkeys(cast(list[str], file.keys()), file)
    return found
