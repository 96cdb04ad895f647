# SPDX-License-Identifier: Apache-2.0
"""Cuts a model inside its layers, by its architecture's own plan, and shares the tokens between.

The products of a layer are cut over the `tp` ranks of a part. Between products, in the residual
stream and in norms, each of these ranks has some of the tokens (sequence parallel): they are
gathered before attention and MLP, and what those return is summed and dealt out again. Adapters are
cut as the layers that they adapt.

Owns which module is cut how. Does not know parts, hosts or the optimizer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import linear
from transformers import PreTrainedModel

from penstock.errors import ConfigError
from penstock.trainer.attention import vocab_size
from penstock.trainer.compute import decoder_layers
from penstock.trainer.lora import LoraLinear

TOKENS = Shard(1)
"""In batch × tokens × width: each rank has some of the tokens."""
_HEAD_DIM = 2
"""In batch × tokens × heads × width: the dimension that is cut inside attention."""


def split_layers(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Keep this rank's part of every layer, embedding and head; in place, without communication."""
    frozen = {name for name, one in model.named_parameters() if not one.requires_grad}
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = cast(Any, head).weight is cast(Any, embedding).weight
    cut = _cut_modules(model, mesh.size())
    norms = _norms(model, cut)
    names = {module: name for name, module in model.named_modules()}
    styles: dict[str, ParallelStyle] = {name: SequenceParallel() for name in norms}
    styles |= {name: _style(kind, name, model.get_submodule(name)) for name, kind in cut.items()}
    styles[names[embedding]] = RowwiseParallel(
        input_layouts=Replicate(), output_layouts=TOKENS, use_local_output=False
    )
    styles[names[head]] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh, styles, src_data_rank=None)
    if is_tied:
        cast(Any, head).weight = cast(Any, embedding).weight
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)  # torch's styles forget it
    for block in _blocks(model, cut):
        block.register_forward_pre_hook(_gather_tokens, with_kwargs=True)
    last = model.get_submodule(norms[-1])
    last.register_forward_hook(_all_tokens)


def _cut_modules(model: PreTrainedModel, tp: int) -> dict[str, str]:
    """The modules that the architecture's plan cuts inside layers, with the kind of each."""
    plan: Mapping[str, str] = model.tp_plan
    if not plan:
        raise ConfigError(
            f"{type(model).__name__} has no plan for tensor parallelism; set tp to 1 and raise dp"
        )
    config: Any = model.config
    heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    for size, what in ((heads, "key-value heads"), (vocab_size(model), "tokens of the vocabulary")):
        if size % tp:
            raise ConfigError(
                f"tp {tp} cannot cut {size} {what} evenly; set tp to a divisor of {size}"
            )
    ends = (model.get_output_embeddings(), model.get_input_embeddings())
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        kind = next((kind for pattern, kind in plan.items() if _fits(pattern, name)), None)
        if kind is not None and module not in ends:
            found[name] = kind
    return found


def _norms(model: PreTrainedModel, cut: Iterable[str]) -> list[str]:
    """Modules that compute token by token outside of what is cut, the last one after all layers."""
    blocks = {module for block in _blocks(model, cut) for module in block.modules()}
    ends = (model.get_output_embeddings(), model.get_input_embeddings())
    return [
        name
        for name, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False))
        if module not in blocks and module not in ends
    ]


def _blocks(model: PreTrainedModel, cut: Iterable[str]) -> list[nn.Module]:
    """Attention and MLP: the children of layers with modules that are cut."""
    found = {name.rpartition(".")[0] for name in cut}
    layers = decoder_layers(model)
    return [model.get_submodule(name) for name in found if model.get_submodule(name) not in layers]


def _fits(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name) is not None


def _style(kind: str, name: str, module: nn.Module) -> ParallelStyle:
    is_adapted = isinstance(module, LoraLinear)
    match kind:
        case "colwise":
            return AdaptedColwise() if is_adapted else ColwiseParallel()
        case "rowwise":
            plain = RowwiseParallel(output_layouts=TOKENS, use_local_output=False)
            return AdaptedRowwise() if is_adapted else plain
        case "replicated_with_grad_allreduce":
            return SequenceParallel(sequence_dim=_HEAD_DIM, use_local_output=True)
        case _:
            raise ConfigError(
                f"{name} requires tensor parallelism of the kind {kind!r}, which this trainer does "
                "not have; set tp to 1 and raise dp"
            )


def _gather_tokens(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """All tokens for attention and MLP."""
    return tuple(map(_gathered, args)), {name: _gathered(value) for name, value in kwargs.items()}


def _gathered(value: Any) -> Any:
    return value.redistribute(placements=[Replicate()]) if isinstance(value, DTensor) else value


def _all_tokens(norm: nn.Module, args: Any, states: DTensor) -> Tensor:
    """After the last norm: every rank has the states of all tokens."""
    return states.redistribute(placements=[Replicate()]).to_local()


# --- adapters -------------------------------------------------------------------------------------


class AdaptedColwise(ParallelStyle):
    """A layer with an adapter, cut by its outputs: B with it, A is on every rank."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _place(module, device_mesh, weight=Shard(0), bias=Shard(0), lora_B=Shard(0))

        def give(layer: nn.Module, args: tuple[Any, ...]) -> Any:
            return _as_dtensor(args[0], device_mesh, Replicate())

        module.register_forward_pre_hook(give)
        module.register_forward_hook(lambda layer, args, out: cast(DTensor, out).to_local())
        return module


class AdaptedRowwise(ParallelStyle):
    """A layer with an adapter, cut by its inputs: A with it, B is on every rank. What A returns is
    summed and dealt out by tokens like the layer's own result; it is small."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer = cast(LoraLinear, module)
        _place(layer, device_mesh, weight=Shard(1), lora_A=Shard(1))

        def forward(input: Tensor) -> Tensor:
            given = _as_dtensor(input, device_mesh, Shard(-1))
            plain = cast(DTensor, linear(given, layer.weight)).redistribute(placements=[TOKENS])
            if cast(Any, layer.bias) is not None:
                plain = plain + layer.bias
            if not layer.is_on:
                return plain
            low = layer.lora_A(given).redistribute(placements=[TOKENS]).to_local()
            raising: Any = layer.lora_B.weight
            added = linear(low, raising.to_local(grad_placements=[Partial()]))
            return plain + layer.scale * DTensor.from_local(
                added,
                device_mesh,
                [TOKENS],
                run_check=False,
                shape=plain.shape,
                stride=plain.stride(),
            )

        layer.forward = forward
        return layer


def _place(module: nn.Module, mesh: DeviceMesh, **cuts: Placement) -> None:
    """Place the parameters of an adapted layer; those that are not named are on every rank."""
    for name, parameter in list(module.named_parameters()):
        owner, _, own = name.rpartition(".")
        placed = distribute_tensor(
            parameter, mesh, [cuts.get(owner or own, Replicate())], src_data_rank=None
        )
        is_trained = parameter.requires_grad
        module.get_submodule(owner).register_parameter(
            own, nn.Parameter(placed, requires_grad=is_trained)
        )


def _as_dtensor(tensor: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    if isinstance(tensor, DTensor):
        return tensor
    return DTensor.from_local(tensor, mesh, [placement], run_check=False)
