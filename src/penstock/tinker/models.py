# SPDX-License-Identifier: Apache-2.0
"""Adapters of many clients on one base model: passes, optimizer calls, and their exact state.

Every adapted model is a copy of the base model's structure that shares its tensors, with the
trainer's own LoRA layers, actor and losses. The same requests in the same order give the same bits.
Owns what a request does to a model; knows no request, file layout or client.

K = tokens of a micro-batch.
"""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.config import LoraConfig
from penstock.durable import sync, write_durably
from penstock.errors import BadRequest, ConfigError
from penstock.gateway.tokenizer_files import find_window
from penstock.tinker.losses import Loss, read_loss
from penstock.tinker.memory import MICRO_BATCH_TOKENS, pass_limit
from penstock.tinker.protocol import Adam, Datum, Floats, Ints, Lora
from penstock.trainer.actor import Actor
from penstock.trainer.attention import make_attention_layout, vocab_size
from penstock.trainer.compute import use_recomputation
from penstock.trainer.inputs import Inputs
from penstock.trainer.lora import adapter_tensors, attach_adapter, head_name, init_adapter
from penstock.trainer.model_folders import link_or_copy, load_model, static_files, weight_files
from penstock.trainer.ranks.sharding import clip
from penstock.weights.manifest import ADAPTER_CONFIG, ADAPTER_WEIGHTS

ALPHA = 32
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
_ATTENTION, _MLP = (".self_attn.", ".attention."), (".mlp.", ".feed_forward.")


def _token_bytes(config: Any) -> int:
    shape = config.get_text_config()
    num_heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    head = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    return 2 * shape.num_hidden_layers * num_heads * head * torch.float32.itemsize


class BaseModel:
    """The frozen model that all adapters share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = load_model(folder, torch.float32).requires_grad_(False)
        self.vocab_size = vocab_size(self.model)
        self.window = find_window(self.model.config.to_dict()) or 4096
        self.token_bytes = _token_bytes(self.model.config)
        """Of the keys and values of one token while it is sampled."""
        config = self.model.config.get_text_config().to_dict()
        self.limit = pass_limit(config, self.model.num_parameters(), self.window)

    def adapted(self, folder: Path, config: LoraConfig) -> PreTrainedModel:
        """The model with the adapter of this folder; the base's tensors are shared."""
        tensors = (*self.model.parameters(), *self.model.buffers())
        model = copy.deepcopy(self.model, {id(tensor): tensor for tensor in tensors})
        attach_adapter(model, folder, config, has_head=True)
        return model

    def lora_config(self, lora: Lora) -> LoraConfig:
        """Raises BadRequest if no layer of the model is meant."""
        parts = (*_ATTENTION * lora.train_attn, *_MLP * lora.train_mlp)
        names = {name for name, found in self._paths().items() if found & {*parts}}
        head = head_name(self.model)
        if lora.train_unembed and head is not None:
            names.add(head)
        if not names:
            raise BadRequest(
                "no layer to adapt: set train_attn or train_mlp, or train_unembed if the model's "
                "head is not its embedding"
            )
        return LoraConfig(rank=lora.rank, alpha=ALPHA, targets=tuple(sorted(names)))

    def linear_names(self) -> list[str]:
        """The last parts of the names of layers that can be adapted."""
        return sorted(self._paths())

    def _paths(self) -> dict[str, set[str]]:
        """Which parts of the model hold the layers of a name."""
        found: dict[str, set[str]] = {}
        for name, module in self.model.named_modules():
            if type(module) is nn.Linear:
                parts = {part for part in _ATTENTION + _MLP if part in f".{name}"}
                if parts:
                    found.setdefault(name.rpartition(".")[2], set()).update(parts)
        return found

    def write_adapter(self, folder: Path, config: LoraConfig, seed: int) -> None:
        """A folder with a new adapter and, by links, the base. Complete or not there."""
        self._write(folder, lambda new: init_adapter(new, config, seed, has_head=True))

    def copy_adapter(self, folder: Path, source: Path, weights: Mapping[str, Tensor]) -> None:
        """The same with these weights, and the config of another adapter's folder."""

        def fill(new: Path) -> None:
            shutil.copyfile(source / ADAPTER_CONFIG, new / ADAPTER_CONFIG)
            content = {name: tensor.detach().contiguous() for name, tensor in weights.items()}
            write_durably(new / ADAPTER_WEIGHTS, save(content, metadata={"format": "pt"}))

        self._write(folder, fill)

    def _write(self, folder: Path, fill: Callable[[Path], None]) -> None:
        new = folder.with_name(f".new-{folder.name}")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        for path in {*static_files(self.folder), *weight_files(self.folder)}:
            link_or_copy(path, new / path.name)
        fill(new)
        for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
            sync(new / name)
        sync(new)
        shutil.rmtree(folder, ignore_errors=True)
        new.rename(folder)
        sync(folder.parent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """The result of a pass."""

    logprobs: list[Floats]
    """Of each target token, by datum."""
    metrics: Mapping[str, float]


class AdaptedModel:
    """A model with an adapter, to compute with."""

    def __init__(self, base: BaseModel, folder: Path, config: LoraConfig) -> None:
        self._base = base
        self.folder = folder
        self._actor = Actor(base.adapted(folder, config))
        use_recomputation(self._actor.model, base.limit.recompute)
        self.adapter = adapter_tensors(self._actor.model)

    def prompt_logprobs(self, ids: Sequence[int]) -> Floats:
        """Of every token of a prompt; NaN for the first, which nothing predicts."""
        if len(ids) < 2:
            return np.full(len(ids), np.nan, np.float32)
        line = np.asarray(ids, np.int64)
        datum = Datum(tokens=line[:-1], inputs={"target_tokens": line[1:]})
        found = self.run([datum], read_loss("cross_entropy", {}), is_trained=False)
        return np.concatenate([np.full(1, np.nan, np.float32), *found.logprobs])

    def run(self, data: Sequence[Datum], loss: Loss, *, is_trained: bool) -> Passed:
        """A forward pass, and a backward pass that adds to the gradient; after an error, the
        gradient is as it was."""
        self._check(data, loss, is_trained=is_trained)
        parameters = [*self.adapter.values()]
        before = [parameter.grad for parameter in parameters]
        logprobs: list[Floats] = []
        total = 0.0
        try:
            for parameter in parameters:
                parameter.grad = None
            for part in _micro_batches(data, self._base.limit.max_tokens):
                inputs = _make_inputs(part, loss)
                with torch.set_grad_enabled(is_trained):
                    tokens = self._actor(inputs)
                    loss_K = loss.objective(tokens).loss_K
                    if is_trained:
                        loss_K.sum().backward()
                total += float(loss_K.detach().double().sum())
                own = tokens.logprobs_K.detach().float().numpy()
                logprobs += np.split(own, np.cumsum([one.tokens.size for one in part])[:-1])
            for parameter, earlier in zip(parameters, before, strict=True):
                if earlier is not None:
                    added = parameter.grad
                    parameter.grad = earlier if added is None else earlier + added
        except BaseException:
            for parameter, earlier in zip(parameters, before, strict=True):
                parameter.grad = earlier
            raise
        return Passed(logprobs=logprobs, metrics={"loss:sum": total})

    def _check(self, data: Sequence[Datum], loss: Loss, *, is_trained: bool) -> None:
        size, window = self._base.vocab_size, self._base.window
        longest = max(datum.tokens.size for datum in data)
        if is_trained and longest > self._base.limit.max_tokens:
            raise BadRequest(
                f"a datum of {longest} tokens; this server has memory to train on "
                f"{self._base.limit.max_tokens} of this model at a time. Cut the datum, or serve "
                "the model on a machine with more memory"
            )
        for datum in data:
            loss.check(datum)
            if datum.tokens.size >= window:
                raise BadRequest(
                    f"a datum of {datum.tokens.size} tokens; the model's window is {window}"
                )
            for ids in (datum.tokens, datum.inputs["target_tokens"]):
                if ids.min() < 0 or ids.max() >= size:
                    raise BadRequest(f"token ids must be 0 to {size - 1}, the model's vocabulary")


class TrainedModel(AdaptedModel):
    """A client's model: an adapter, its gradient and its optimizer."""

    def __init__(self, base: BaseModel, folder: Path, config: LoraConfig) -> None:
        super().__init__(base, folder, config)
        self._optimizer = torch.optim.AdamW([*self.adapter.values()], lr=0.0, fused=True)

    def optim_step(self, params: Adam) -> dict[str, float]:
        """One update with the gradient added up so far, which is then forgotten. A gradient that is
        not finite changes nothing."""
        (group,) = self._optimizer.param_groups
        group["lr"], group["betas"] = params.learning_rate, (params.beta1, params.beta2)
        group["eps"], group["weight_decay"] = params.eps, params.weight_decay
        parameters = [p for p in self.adapter.values() if p.grad is not None]
        norm = clip(parameters, params.grad_clip_norm or math.inf) if parameters else 0.0
        if math.isfinite(norm):
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return {
            "grad_norm": norm if math.isfinite(norm) else -1.0,
            "is_applied": float(math.isfinite(norm)),
        }

    def state(self, *, with_optimizer: bool = True) -> bytes:
        """Everything that later requests depend on."""
        tensors: dict[str, Tensor] = {n: p.detach() for n, p in self.adapter.items()}
        for name, parameter in self.adapter.items() if with_optimizer else ():
            if parameter.grad is not None:
                tensors[f"grad/{name}"] = parameter.grad
            for moment, value in self._optimizer.state.get(parameter, {}).items():
                tensors[f"{moment}/{name}"] = value
        return save({name: tensor.contiguous() for name, tensor in tensors.items()})

    @torch.no_grad()
    def restore(self, state: bytes, *, with_optimizer: bool = True) -> None:
        """Continue from a state, bit for bit; without the optimizer's part, with a new one."""
        tensors = load(state)
        if {n: p.shape for n, p in self.adapter.items()} != {
            n: t.shape for n, t in tensors.items() if n in self.adapter
        }:
            raise BadRequest("these weights are of an adapter with another rank or other layers")
        self._optimizer.state.clear()
        for name, parameter in self.adapter.items():
            parameter.copy_(tensors[name])
            parameter.grad = tensors.get(f"grad/{name}") if with_optimizer else None
            moments = {m: tensors[f"{m}/{name}"] for m in MOMENTS if f"{m}/{name}" in tensors}
            if with_optimizer and moments:
                self._optimizer.state[parameter] = moments


def _micro_batches(data: Sequence[Datum], max_tokens: int) -> Iterator[Sequence[Datum]]:
    """In their order, so that the same request is always cut in the same way."""
    part: list[Datum] = []
    num_tokens, most = 0, min(max_tokens, MICRO_BATCH_TOKENS)
    for datum in data:
        if part and num_tokens + datum.tokens.size > most:
            yield part
            part, num_tokens = [], 0
        part.append(datum)
        num_tokens += datum.tokens.size
    yield part


def _make_inputs(data: Sequence[Datum], loss: Loss) -> Inputs:
    lengths: Ints = np.array([one.tokens.size for one in data], np.int64)
    num_tokens = int(lengths.sum())
    every_K = torch.arange(num_tokens)

    def column(values: Sequence[Any]) -> Tensor:
        return torch.from_numpy(np.concatenate(values))

    return Inputs(
        ids_P=column([one.tokens for one in data]),
        positions_P=column([np.arange(length) for length in lengths]),
        rows=make_attention_layout(lengths),
        token_K=every_K,
        predictor_K=every_K,
        targets_K=column([one.inputs["target_tokens"].astype(np.int64) for one in data]),
        sampling_K=column([loss.sampling(one) for one in data]),
        advantages_K=column([loss.advantages(one) for one in data]),
        sequences_K=torch.from_numpy(np.repeat(np.arange(len(data)), lengths)),
        weights_K=torch.ones(num_tokens),
        staleness_K=torch.zeros(num_tokens, dtype=torch.int64),
        temperature_K=None,
        kept=None,
        extra_columns={},
    )


def open_base(folder: Path) -> BaseModel:
    """Raises ConfigError."""
    if (folder / ADAPTER_CONFIG).exists():
        raise ConfigError(f"{folder} holds an adapter; serve a model without one")
    return BaseModel(folder)
