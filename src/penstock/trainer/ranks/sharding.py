# SPDX-License-Identifier: Apache-2.0
"""Shards a model over ranks: FSDP2 by decoder layer, tensor and context parallel inside a part,
experts spread over parts.

Owns how parameters are placed on ranks and how they are gathered. Gradients are *summed* over
ranks, not averaged: the learner's weights already divide by what all ranks train. One path for gloo
and NCCL; with a single rank every function here does what plain torch does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import PreTrainedModel

from penstock.trainer.compute import (
    ComputeSpec,
    decoder_layers,
    exact_modules,
    use_precision,
    use_recomputation,
)
from penstock.trainer.device import CPU
from penstock.trainer.ranks.context import SharesLines, make_context
from penstock.trainer.ranks.experts import expert_modules, shard_dim, spread_experts
from penstock.trainer.ranks.group import RankGroup, Ranks
from penstock.trainer.ranks.tensor_parallel import split_layers

M = TypeVar("M", bound=torch.nn.Module)

PLAIN = ComputeSpec()


def shard(
    root: M,
    model: PreTrainedModel,
    ranks: Ranks,
    device: torch.device = CPU,
    compute: ComputeSpec = PLAIN,
) -> M:
    """Keep this rank's shard of every parameter, on its device; the modules are changed in place.

    `root` is what is called in a forward pass: the model, or a module around it. With several
    ranks, layer after layer is moved to the device and cut there, so the device never holds the
    full model. Nothing is sent between ranks: each cuts its own copy. `compute`: how passes of
    what is left are made."""
    if not isinstance(ranks, RankGroup):
        root.to(device)
        use_precision(root, model, compute)
        use_recomputation(model, compute.recompute)
        return root
    parallel = ranks.position.parallel
    if parallel.tp > 1:
        split_layers(model, ranks.mesh["tp"])
    if parallel.ranks_per_part > 1 and hasattr(root, "context"):
        cast(SharesLines, root).context = make_context(model, ranks)
    if ranks.expert_mesh is not None:
        spread_experts(model, ranks.expert_mesh["ep"])
    use_recomputation(model, compute.recompute)
    mesh = ranks.mesh["replicas", "shards"] if parallel.replicas > 1 else ranks.mesh["shards"]
    for module in exact_modules(root) if compute.is_mixed else ():
        fully_shard(module, mesh=mesh)
    for layer in decoder_layers(model):
        if ranks.expert_mesh is not None:
            _shard_experts(layer, ranks.expert_mesh["groups"], compute)
        fully_shard(layer, mesh=mesh, mp_policy=compute.policy)
    fully_shard(root, mesh=mesh, mp_policy=compute.policy)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return root


def _shard_experts(layer: torch.nn.Module, over_groups: DeviceMesh, compute: ComputeSpec) -> None:
    """What a rank holds of the experts is cut over the ranks that hold the same ones."""
    for module in expert_modules(layer):
        fully_shard(
            module,
            mesh=over_groups,
            mp_policy=compute.policy,
            shard_placement_fn=partial(shard_dim, num_parts=over_groups.size()),
        )


def free_gathered(root: torch.nn.Module) -> None:
    """Keep only this rank's shard of what `root` gathered for its own forward pass: embeddings and
    output layer."""
    if isinstance(root, FSDPModule):
        root.reshard()


def gather(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """Gather all tensors in rank 0's memory; the other ranks take part and get none.

    One after another: no rank ever has more than one full tensor on its device. A tensor with
    several names stays one; of a model, pass `state_dict(keep_vars=True)`."""
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    kept: dict[str, Tensor] = {}
    for shared in names.values():
        full = _full_tensor(tensors[shared[0]].detach())
        if ranks.position.is_rank0:
            kept |= dict.fromkeys(shared, full.cpu())
        del full
    return {name: kept[name] for name in tensors if name in kept}


def shard_like(full: Tensor, like: Tensor) -> Tensor:
    """This rank's shard of a full tensor that every rank has, placed like another tensor."""
    if not isinstance(like, DTensor):
        return full.to(like.device)
    return distribute_tensor(
        full.to(like.device), like.device_mesh, like.placements, src_data_rank=None
    )


def clip(parameters: Iterable[torch.nn.Parameter], max_norm: float) -> float:
    """Clip the gradient to this norm, over all shards; return the norm it had."""
    by_mesh: dict[DeviceMesh | None, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            by_mesh.setdefault(mesh, []).append(parameter)
    norms = [
        _full_tensor(get_total_norm([cast(Tensor, parameter.grad) for parameter in group]))
        for group in by_mesh.values()
    ]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.tensor(norms))
    for group in by_mesh.values():  # torch scales tensors of one mesh at a time
        clip_grads_with_norm_(group, max_norm, norm)
    return float(norm)


def _full_tensor(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
