# SPDX-License-Identifier: Apache-2.0
"""Loads a model of which each rank reads only its shard.

Rank 0 reads the full model, because it also checks it. The others start with a meta model, whose
tensors have shapes and no content; they cut it as rank 0 does, and then read their slices of the
same files, also where a file holds a matrix per expert and the model one tensor for all. Buffers
that a model computes itself, such as the tables of its position encoding, are broadcast by rank 0.

Owns which file of a folder holds which tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from penstock.trainer.device import CPU
from penstock.trainer.file_tensors import FileTensor, by_source, file_tensors
from penstock.trainer.model_folders import load_model, weight_files
from penstock.trainer.ranks.group import RankGroup, Ranks
from penstock.trainer.ranks.regions import TensorRegion, local, region_of


def make_meta_model(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of a folder without its content."""
    config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    maker: Any = AutoModelForCausalLM
    with torch.device("meta"):
        return maker.from_config(config, dtype=dtype, trust_remote_code=False)


def load_meta_model(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The same, but loaded in full if its files hold other tensors than the model's, or regions of
    them."""
    meta_model = make_meta_model(folder, dtype)
    names = {name for name, _ in meta_model.named_parameters()}
    is_known = _sources(meta_model, names, _files(folder)) is not None
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
    sources = _sources(model, empty, files)
    assert sources is not None, "else this rank would have loaded the model in full"
    for name, parameter in model.named_parameters():
        if name in empty:
            _copy_slices(files, sources[name], parameter)


def _copy_slices(
    files: Mapping[str, Any], pieces: Mapping[str, FileTensor], parameter: Tensor
) -> None:
    share = local(parameter)
    region = region_of(parameter) or TensorRegion.full(parameter.shape)
    for name, piece in pieces.items():
        if share.numel() and (both := region.intersect(piece.region)) is not None:
            content = files[name].get_slice(name)[piece.slices_of(both)]
            share[both.slices_in(region)].copy_(content.view(both.shape))


def _sources(
    model: PreTrainedModel, names: Collection[str], files: Mapping[str, Any]
) -> dict[str, dict[str, FileTensor]] | None:
    """What each of these parameters is read from: a tensor of its name and shape, or the regions of
    it that the files hold; None if one of them is not there."""
    regions = by_source(file_tensors(model) or {})
    found: dict[str, dict[str, FileTensor]] = {}
    for name, parameter in model.named_parameters():
        if name not in names:
            continue
        whole = {name: FileTensor.whole(name, parameter.shape)}
        choices = (whole, regions.get(name, {}))
        chosen = next((one for one in choices if one and _holds(files, one)), None)
        if chosen is None:
            return None
        found[name] = chosen
    return found


def _holds(files: Mapping[str, Any], pieces: Mapping[str, FileTensor]) -> bool:
    return all(
        name in files and files[name].get_slice(name).get_shape() == [*piece.shape]
        for name, piece in pieces.items()
    )


def _files(folder: Path) -> dict[str, Any]:
    """The open file of each tensor of a folder, by name; only headers are read yet."""
    found: dict[str, Any] = {}
    for path in weight_files(folder):
        if path.suffix == ".safetensors":
            file: Any = safe_open(path, framework="pt")
            found |= dict.fromkeys(cast(list[str], file.keys()), file)
    return found
