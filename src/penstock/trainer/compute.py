# SPDX-License-Identifier: Apache-2.0
"""How a model computes: the precision of its passes, and what backward passes recompute.

Parameters, gradients and the optimizer stay in float32 (the master weights). A pass in bfloat16
uses copies of the weights, made layer by layer and never kept for the backward pass: FSDP makes
them where a model is sharded (`policy`), and `use_precision` where it is not. So every matmul has
bfloat16 inputs, as in an engine that serves the model, and no rank ever has a copy of all layers.

Owns these copies and the recomputation; changes modules in place and moves none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel

from penstock.config.trainer import Recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeSpec:
    """How the passes of a model are computed."""

    precision: torch.dtype = torch.float32
    """Of weights and activations in a pass; master weights and optimizer stay in float32."""
    recompute: Recompute = "none"

    @property
    def is_mixed(self) -> bool:
        return self.precision is not torch.float32

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """The same for a sharded model. Inputs are not cast: the embedding's output has the right
        precision, and a micro-batch also holds log-probs and advantages."""
        if not self.is_mixed:
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(
            param_dtype=self.precision, reduce_dtype=torch.float32, cast_forward_inputs=False
        )


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Modules that the architecture declares as never cut: its decoder layers."""
    names = set(model._no_split_modules or ())  # pyright: ignore[reportPrivateUsage]
    return [module for module in model.modules() if type(module).__name__ in names]


def exact_modules(root: nn.Module) -> list[nn.Module]:
    """Modules of `root` that compute in float32 whatever the precision: it names them itself."""
    names: Collection[str] = getattr(root, "exact_modules", ())
    return [root.get_submodule(name) for name in names]


# --- precision ------------------------------------------------------------------------------------


def use_precision(root: nn.Module, model: PreTrainedModel, spec: ComputeSpec) -> None:
    """Make the passes of a model that is not sharded compute in this precision."""
    if not spec.is_mixed:
        return
    layers = decoder_layers(model)
    inside = {module for unit in (*layers, *exact_modules(root)) for module in unit.modules()}
    for layer in layers:
        layer.forward = _with_copies(layer, spec.precision, drops=spec.recompute == "none")
    for module in root.modules():
        if module in inside or not any(True for _ in module.parameters(recurse=False)):
            continue
        if type(module) is nn.Embedding:  # only the rows that it looks up
            module.forward = _with_cast_output(module, spec.precision)
        else:
            module.forward = _with_copies(module, spec.precision, drops=True)


def _with_cast_output(module: nn.Module, dtype: torch.dtype) -> Callable[..., Any]:
    forward = module.forward
    return lambda *args, **kwargs: forward(*args, **kwargs).to(dtype)


def _with_copies(module: nn.Module, dtype: torch.dtype, *, drops: bool) -> Callable[..., Any]:
    """Its forward pass with copies of all its weights in place of the master weights.

    drops: keep no copy for the backward pass, which casts the master weights again; a pass that is
    recomputed makes its copies again anyway."""
    forward = module.forward
    slots = [
        (owner._parameters, name)  # pyright: ignore[reportPrivateUsage]
        for owner in module.modules()
        for name, _ in owner.named_parameters(recurse=False)
    ]

    def run(*args: Any, **kwargs: Any) -> Any:
        masters = [cast(Tensor, table[name]) for table, name in slots]
        copies = [master.to(dtype) for master in masters]
        is_dropping = drops and torch.is_grad_enabled()
        try:
            for (table, name), copy in zip(slots, copies, strict=True):
                cast(dict[str, Tensor], table)[name] = copy
            with _dropped(masters, copies) if is_dropping else nullcontext():
                return forward(*args, **kwargs)
        finally:
            for (table, name), master in zip(slots, masters, strict=True):
                cast(dict[str, Tensor], table)[name] = master

    return run


@dataclass(frozen=True, slots=True)
class _View:
    """What autograd saved of a copy: the same elements of the master weight."""

    master: Tensor
    like: tuple[torch.Size, tuple[int, ...], int]
    dtype: torch.dtype

    def cast(self) -> Tensor:
        size, stride, offset = self.like
        return self.master.detach().as_strided(size, stride, offset).to(self.dtype)


def _dropped(masters: list[Tensor], copies: list[Tensor]) -> AbstractContextManager[Any]:
    """Autograd saves the master weight where it would save a copy, or a view of one."""
    sources = {
        _storage_id(copy): master
        for master, copy in zip(masters, copies, strict=True)
        if copy is not master and copy.numel() and master.is_contiguous()
    }

    def pack(tensor: Tensor) -> Tensor | _View:
        master = sources.get(_storage_id(tensor))
        if master is None:
            return tensor
        like = (tensor.size(), tensor.stride(), int(tensor.storage_offset()))
        return _View(master, like, tensor.dtype)

    return saved_tensors_hooks(pack, lambda kept: kept.cast() if isinstance(kept, _View) else kept)


def _storage_id(tensor: Tensor) -> int:
    """Of the memory that it is a view of; a fake tensor has one too."""
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


# --- recomputation --------------------------------------------------------------------------------


def use_recomputation(model: PreTrainedModel, recompute: Recompute) -> None:
    """Keep only what `recompute` says of a pass through each decoder layer, and compute the rest
    again in the backward pass. Call it before the layers are sharded."""
    if recompute == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # no dropout
    if recompute == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_matmuls)
    for layer in decoder_layers(model):
        layer.forward = _recomputed(layer.forward, options)


def _recomputed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return cast(Any, checkpoint)(forward, *args, **options, **kwargs)

    return run


_aten = torch.ops.aten
_MATMULS: set[Any] = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._grouped_mm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
}
"""Operations whose results `selective` keeps: what costs most to compute again."""


def _keep_matmuls(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_kept = operation in _MATMULS
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
