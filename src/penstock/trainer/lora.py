# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters: linear layers with frozen weights and a trained low-rank product.

    y = W x + alpha / rank · B A x          A: rank × in, B: out × rank

Owns the layer, how a model is adapted and runs without the adapter for a while, and the two files
in which PEFT and the engines keep an adapter. A is stored as drawn and B as zeros, so number 0 is
the model itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.config import LoraConfig
from penstock.errors import ConfigError, WeightsError
from penstock.trainer.ranks.weight_loading import make_meta_model
from penstock.weights.lora import PLAIN_LORA_CONFIG, A, B, unsupported_setting
from penstock.weights.manifest import ADAPTER_CONFIG, ADAPTER_PREFIX, ADAPTER_WEIGHTS


class LoraLinear(nn.Linear):
    """A linear layer with an adapter; its own weight is the same parameter object as before."""

    lora_A: nn.Linear
    lora_B: nn.Linear

    def __init__(self, base: nn.Linear, config: LoraConfig) -> None:
        nn.Module.__init__(self)  # has no weights
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight = base.weight
        self.register_parameter("bias", base.bias)
        dtype = base.weight.dtype
        self.lora_A = nn.Linear(base.in_features, config.rank, bias=False, dtype=dtype)
        self.lora_B = nn.Linear(config.rank, base.out_features, bias=False, dtype=dtype)
        self.scale = config.alpha / config.rank
        self.is_on = True

    def forward(self, input: Tensor) -> Tensor:
        plain = super().forward(input)
        return plain + self.scale * self.lora_B(self.lora_A(input)) if self.is_on else plain


def attach_adapter(
    model: PreTrainedModel, folder: Path, config: LoraConfig, *, has_head: bool = False
) -> None:
    """Give the model the adapter of this folder and freeze everything else. has_head: the targets
    may name the head, which only the `hf` engine serves."""
    targets = _read_targets(folder, config)
    model.requires_grad_(False)
    for name, layer in _layers(model, targets, has_head).items():
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, LoraLinear(layer, config))
    found, own = load_file(folder / ADAPTER_WEIGHTS), adapter_tensors(model)
    if {name: t.shape for name, t in found.items()} != {n: t.shape for n, t in own.items()}:
        raise WeightsError(
            f"{folder / ADAPTER_WEIGHTS} is not an adapter of this model with the layers that "
            f"{ADAPTER_CONFIG} names; repair the folder"
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(found[name])


def adapter_tensors(model: nn.Module) -> dict[str, nn.Parameter]:
    """The adapter's parameters by their names in its file; empty for a model without one."""
    return {
        ADAPTER_PREFIX + name: parameter
        for name, parameter in model.named_parameters()
        if name.endswith((A, B))
    }


@contextmanager
def adapter_disabled(model: nn.Module) -> Generator[None]:
    """Inside the block, the model runs without its adapter."""
    layers = [module for module in model.modules() if isinstance(module, LoraLinear)]
    for layer in layers:
        layer.is_on = False
    try:
        yield
    finally:
        for layer in layers:
            layer.is_on = True


def init_adapter(folder: Path, config: LoraConfig, seed: int, *, has_head: bool = False) -> None:
    """Write the adapter of number 0 next to the model in this folder, unless there is one: then the
    policy continues with that."""
    if (folder / ADAPTER_CONFIG).exists():
        return
    model = make_meta_model(folder)
    targets = config.targets or tuple({name.rpartition(".")[2] for name in _linears(model)})
    draw = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, layer in sorted(_layers(model, targets, has_head).items()):
        a = torch.empty(config.rank, layer.in_features)
        nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=draw)
        tensors[f"{ADAPTER_PREFIX}{name}{A}"] = a
        tensors[f"{ADAPTER_PREFIX}{name}{B}"] = torch.zeros(layer.out_features, config.rank)
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    peft = {
        **PLAIN_LORA_CONFIG,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "r": config.rank,
        "target_modules": sorted(set(targets)),
        "task_type": "CAUSAL_LM",
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(peft, indent=2) + "\n")


def _read_targets(folder: Path, config: LoraConfig) -> list[str]:
    """The layers that `adapter_config.json` names, by the last parts of their names; an error if it
    is not a supported adapter, or has another shape than the config."""
    try:
        found = json.loads((folder / ADAPTER_CONFIG).read_text())
        rank, alpha, targets = found["r"], found["lora_alpha"], list(found["target_modules"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise WeightsError(
            f"{folder / ADAPTER_CONFIG} is not an adapter config: {error!r}"
        ) from error
    if why := unsupported_setting(found):
        raise WeightsError(
            f"{folder / ADAPTER_CONFIG} describes another kind of adapter ({why}); train that one "
            "elsewhere, or start from the model without an adapter"
        )
    is_same = (rank, alpha) == (config.rank, config.alpha)
    if not is_same or (config.targets and {*targets} != {*config.targets}):
        raise ConfigError(
            f"{folder} holds an adapter of rank {rank}, alpha {alpha} for {', '.join(targets)}, "
            "and the config has other values under lora; an adapter keeps its shape: undo the "
            "change, or start from the model without an adapter"
        )
    return targets


def _linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Linear layers by name, without the head."""
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module is not head
    }


def head_name(model: PreTrainedModel) -> str | None:
    """Of the layer that makes logits; None if it shares the embedding's weights, so that the files
    do not name it."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    names = (name for name, module in model.named_modules() if module is head)
    return None if getattr(head, "weight", None) is embedding.weight else next(names, None)


def _layers(model: PreTrainedModel, targets: Sequence[str], has_head: bool) -> dict[str, nn.Linear]:
    """Those whose name ends in a target; the head only if it is one and may be."""
    found = _linears(model)
    head = head_name(model) if has_head else None
    if head is not None and head in targets:
        found[head] = cast(nn.Linear, model.get_submodule(head))
    known = sorted({name.rpartition(".")[2] for name in found})
    if missing := sorted({*targets} - {*known}):
        raise ConfigError(
            f"lora targets {', '.join(missing)}, and the model has no such linear layer; it has "
            f"{', '.join(known)}"
        )
    return {name: layer for name, layer in found.items() if name.rpartition(".")[2] in targets}
