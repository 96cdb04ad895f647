# SPDX-License-Identifier: Apache-2.0
"""A transformers causal language model as a decoder: float32, CPU, in process.

Owns the live model, the key-value cache of the rows and their left padding. Equal contexts (members
of one group, until their answers differ) are computed once. Rejects a snapshot whose tensors do not
match the model's by name and shape. Decoders from `share` use one base model in memory, each with
its own adapter. Importing this module loads torch and transformers, which takes seconds; the
decoding thread does it.
"""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, pad
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from penstock.errors import EngineError
from penstock.rollout.adapter_info import (
    AdapterInfo,
    BaseDigests,
    check_same_layers,
    tensor_difference,
    tensor_files,
)
from penstock.rollout.decoding.batch import Logits, Staged
from penstock.rollout.decoding.hf_patch import LoadedTensors, read_patch
from penstock.rollout.decoding.router_log import RouterLog
from penstock.rollout.snapshot import Snapshot, read_snapshot
from penstock.types import ExpertChoices
from penstock.weights.lora import A, B
from penstock.weights.manifest import ADAPTER_PREFIX, ADAPTER_WEIGHTS

# B = rows, T = padded length, V = vocabulary, H = key-value heads, D = head size
MAX_PREFILL_TOKENS = 16_384
"""Most padded tokens per prefill; more contexts need several prefills."""


@dataclass(slots=True)
class _Rows:
    """Key-value cache and mask of the rows. Cache tensors are BHTD; the mask is 0 for padding."""

    cache: Any
    """A DynamicCache; untyped, because some of its layer types have no keys."""
    mask_BT: Tensor
    experts_BTW: Tensor | None = None
    """The experts that every layer chose for each token, if they are recorded."""

    def select(self, rows: Tensor) -> None:
        for layer in self.cache.layers:
            layer.keys = layer.keys.index_select(0, rows)
            layer.values = layer.values.index_select(0, rows)
        self.mask_BT = self.mask_BT.index_select(0, rows)
        if self.experts_BTW is not None:
            self.experts_BTW = self.experts_BTW.index_select(0, rows)

    def trim(self) -> None:
        """Drop columns that are padding in every row."""
        num_padding = int(self.mask_BT.any(dim=0).to(torch.uint8).argmax())
        if num_padding:
            for layer in self.cache.layers:
                layer.keys = layer.keys[:, :, num_padding:]
                layer.values = layer.values[:, :, num_padding:]
            self.mask_BT = self.mask_BT[:, num_padding:]
            if self.experts_BTW is not None:
                self.experts_BTW = self.experts_BTW[:, num_padding:]


Layers = dict[str, tuple[Tensor, Tensor]]
"""A and B of each linear layer, by its path."""


@dataclass(frozen=True, slots=True)
class _Adapter:
    info: AdapterInfo
    layers: Layers


@dataclass(slots=True)
class _Weights:
    """One model in memory, shared by its decoders. `module` changes only between forward passes."""

    module: Any = None
    base: str | None = None
    """Digest of the base model's files, if adapters are used."""
    num_decoders: int = 0
    _files: BaseDigests = field(default_factory=BaseDigests)
    _hooked: set[str] = field(default_factory=set[str])
    _active: _Adapter | None = None

    def prepare(self, folder: Path) -> None:
        """Load the base model, if it is not yet in memory."""
        digest = self._files.digest(folder)
        if self.module is None:
            module = _build(folder)
            _copy(module, _read_tensors(module, folder))
            self.module, self.base = module, digest
        elif self.base != digest:
            raise EngineError(
                f"the adapter in {folder} has a different base model than this engine; "
                "policies that share an engine must use the same `init`"
            )

    def check_linear(self, info: AdapterInfo, folder: Path) -> None:
        kinds = {name: type(self.module.get_submodule(name)) for name in info.modules}
        others = sorted(name for name, kind in kinds.items() if kind is not torch.nn.Linear)
        if others:
            raise EngineError(
                f"the adapter in {folder} targets {others[:3]}, which are not linear layers; "
                "remove them from lora.targets"
            )

    def register_hooks(self, adapter: _Adapter) -> None:
        """Hook the adapted layers, so that they apply the active adapter; called between passes."""
        for name in adapter.info.modules:
            if name not in self._hooked:
                self._hooked.add(name)
                self.module.get_submodule(name).register_forward_hook(partial(self._add, name))

    @contextmanager
    def using(self, adapter: _Adapter | None) -> Generator[Any]:
        self._active = adapter
        try:
            yield self.module
        finally:
            self._active = None

    def _add(self, name: str, layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if self._active is None or name not in self._active.layers:
            return output
        a, b = self._active.layers[name]
        return output + self._active.info.scale * linear(linear(inputs[0], a), b)


class HfDecoder:
    def __init__(
        self,
        *,
        torch_threads: int,
        weights: _Weights | None = None,
        records_experts: bool = False,
    ) -> None:
        """`weights`: the model of another decoder, to share it. records_experts: keep the experts
        that a mixture chose."""
        torch.set_num_threads(torch_threads)
        self._torch_threads = torch_threads
        self.weights = weights or _Weights()
        self.weights.num_decoders += 1
        self.adapter: _Adapter | None = None
        self._rows: _Rows | None = None
        self._row_B = np.zeros(0, np.int64)
        """Which of `_rows` has the context of each row: one for equal ones that came together."""
        self._records_experts = records_experts
        self._routers: RouterLog | None = None

    def share(self) -> HfDecoder:
        return HfDecoder(
            torch_threads=self._torch_threads,
            weights=self.weights,
            records_experts=self._records_experts,
        )

    def stage(self, folder: Path, patch: Path | None = None) -> Staged:
        torch.set_num_threads(self._torch_threads)  # OpenMP's setting is per calling thread
        snapshot = read_snapshot(folder)
        weights = self.weights
        if snapshot.adapter is not None:
            return self._stage_adapter(folder, snapshot, snapshot.adapter)
        if weights.num_decoders > 1:
            raise EngineError(
                f"{folder} has no adapter, but {weights.num_decoders} policies share this "
                "engine's weights; a policy that trains all weights needs a separate engine"
            )
        if weights.base is not None:
            check_same_layers(self.adapter and self.adapter.info, None, folder)
        if patch is not None and weights.module is not None:
            loaded = LoadedTensors(_targets(weights.module), _canonical_names(weights.module))
            staged = read_patch(patch, loaded)
            return Staged(snapshot, staged.apply, staged.verify)
        model = _build(folder) if weights.module is None else weights.module
        tensors = _read_tensors(model, folder)

        def apply() -> None:
            _copy(model, tensors)
            weights.module = model

        return Staged(snapshot, apply)

    def _stage_adapter(self, folder: Path, snapshot: Snapshot, info: AdapterInfo) -> Staged:
        has_full_model = self.weights.module is not None and self.weights.base is None
        if self.adapter is not None or has_full_model:
            check_same_layers(self.adapter and self.adapter.info, info, folder)
        self.weights.prepare(folder)
        self.weights.check_linear(info, folder)
        tensors = load_file(folder / ADAPTER_WEIGHTS)
        layers: Layers = {}
        for name in info.modules:
            a, b = (tensors[f"{ADAPTER_PREFIX}{name}{part}"] for part in (A, B))
            layers[name] = (a.to(torch.float32, copy=True), b.to(torch.float32, copy=True))
        adapter = _Adapter(info, layers)

        def apply() -> None:
            self.weights.register_hooks(adapter)
            self.adapter = adapter

        return Staged(snapshot, apply)

    def join(self, contexts: Sequence[Sequence[int]]) -> Logits:
        distinct: dict[tuple[int, ...], int] = {}
        row_of = [distinct.setdefault(tuple(ids), len(distinct)) for ids in contexts]
        ordered = list(distinct)
        by_length = sorted(range(len(ordered)), key=lambda index: len(ordered[index]))
        with torch.inference_mode():
            prefilled = [
                self._prefill([ordered[index] for index in block])
                for block in _blocks(by_length, ordered)
            ]
            position = {index: at for at, index in enumerate(by_length)}
            place_B = np.array([position[row] for row in row_of], np.int64)
            joined = _stack([rows for rows, _ in prefilled])
            num_before = 0 if self._rows is None else len(self._rows.mask_BT)
            self._rows = joined if self._rows is None else _stack([self._rows, joined])
            self._row_B = np.concatenate([self._row_B, num_before + place_B])
            return torch.cat([logits for _, logits in prefilled]).numpy()[place_B]

    def advance(self, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> Logits:
        assert self._rows is not None
        contexts = np.stack([self._row_B[rows], tokens])
        (parents, tokens), self._row_B = np.unique(contexts, axis=1, return_inverse=True)
        with torch.inference_mode():
            if not np.array_equal(parents, np.arange(len(self._rows.mask_BT))):
                self._rows.select(torch.from_numpy(parents))
                self._rows.trim()
            position_B1 = self._rows.mask_BT.sum(dim=1, keepdim=True)
            self._rows.mask_BT = pad(self._rows.mask_BT, (0, 1), value=1)
            return self._compute(tokens, position_B1)

    def repeat_last(self, tokens: NDArray[np.int64]) -> Logits:
        assert self._rows is not None
        with torch.inference_mode():
            for layer in self._rows.cache.layers:
                layer.keys, layer.values = layer.keys[:, :, :-1], layer.values[:, :, :-1]
            if self._rows.experts_BTW is not None:
                self._rows.experts_BTW = self._rows.experts_BTW[:, :-1]
            position_B1 = self._rows.mask_BT.sum(dim=1, keepdim=True) - 1
            _, first = np.unique(self._row_B, return_index=True)
            return self._compute(tokens[first], position_B1)

    def clear(self) -> None:
        self._rows, self._row_B = None, self._row_B[:0]

    def experts(self, row: int) -> ExpertChoices | None:
        if self._routers is None or self._rows is None or self._rows.experts_BTW is None:
            return None
        at = int(self._row_B[row])
        is_token_T = self._rows.mask_BT[at].bool()
        return self._routers.choices(self._rows.experts_BTW[at][is_token_T])

    def _prefill(self, contexts: Sequence[Sequence[int]]) -> tuple[_Rows, Tensor]:
        length = max(len(ids) for ids in contexts)
        ids_BT = np.zeros((len(contexts), length), np.int64)
        mask_BT = np.zeros((len(contexts), length), np.int64)
        for row, ids in enumerate(contexts):
            ids_BT[row, length - len(ids) :] = ids
            mask_BT[row, length - len(ids) :] = 1
        # Without a config every layer keeps all keys; the mask implements a sliding window.
        rows = _Rows(DynamicCache(), torch.from_numpy(mask_BT))
        position_BT = (rows.mask_BT.cumsum(dim=1) - 1).clamp_(min=0)
        return rows, self._forward(torch.from_numpy(ids_BT), rows, position_BT)

    def _compute(self, tokens: NDArray[np.int64], position_B1: Tensor) -> Logits:
        """The logits of each row, given the last token of each context."""
        assert self._rows is not None
        logits_BV = self._forward(torch.from_numpy(tokens)[:, None], self._rows, position_B1)
        return logits_BV.numpy()[self._row_B]

    def _forward(self, ids_BT: Tensor, rows: _Rows, position_BT: Tensor) -> Tensor:
        with self.weights.using(self.adapter) as model:
            routers = self._router_log(model)
            with nullcontext() if routers is None else routers.noting():
                output = model(
                    input_ids=ids_BT,
                    attention_mask=rows.mask_BT,
                    position_ids=position_BT,
                    past_key_values=rows.cache,
                    use_cache=True,
                    logits_to_keep=1,
                )
        if routers is not None:
            found = routers.take(*ids_BT.shape)
            known = rows.experts_BTW
            rows.experts_BTW = found if known is None else torch.cat([known, found], dim=1)
        return output.logits[:, -1]

    def _router_log(self, model: Any) -> RouterLog | None:
        """None if choices are not recorded."""
        if self._records_experts and self._routers is None:
            self._routers = RouterLog(model)
        return self._routers


def _blocks(order: list[int], contexts: list[tuple[int, ...]]) -> Iterator[list[int]]:
    """Group contexts of similar length into prefills; `order` sorts them by length."""
    block: list[int] = []
    for index in order:
        if block and (len(block) + 1) * len(contexts[index]) > MAX_PREFILL_TOKENS:
            yield block
            block = []
        block.append(index)
    yield block


def _stack(parts: Sequence[_Rows]) -> _Rows:
    """Merge rows into one batch, left-padded to the longest."""
    if len(parts) == 1:
        return parts[0]
    length = max(part.mask_BT.shape[1] for part in parts)
    gaps = [length - part.mask_BT.shape[1] for part in parts]
    cache = parts[0].cache
    for at, layer in enumerate(cache.layers):
        others = [part.cache.layers[at] for part in parts]
        layer.keys, layer.values = (
            torch.cat([pad(tensor, (0, 0, gap, 0)) for tensor, gap in zip(kind, gaps, strict=True)])
            for kind in ([other.keys for other in others], [other.values for other in others])
        )
    masks = [pad(part.mask_BT, (gap, 0)) for part, gap in zip(parts, gaps, strict=True)]
    experts = [
        pad(part.experts_BTW, (0, 0, gap, 0))
        for part, gap in zip(parts, gaps, strict=True)
        if part.experts_BTW is not None
    ]
    return _Rows(cache, torch.cat(masks), torch.cat(experts) if experts else None)


# --- weights ------------------------------------------------------------------------------------


def _build(folder: Path) -> Any:
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    model: Any = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
    )
    # The imported libraries are millions of permanent objects. Without freezing them, each full
    # garbage collection would stop decoding for 200 ms.
    gc.collect()
    gc.freeze()
    return model.eval().requires_grad_(False)


def _read_tensors(model: Any, folder: Path) -> dict[str, Tensor]:
    """Read the folder's tensors; raises EngineError if they do not match `model`."""
    tensors: dict[str, Tensor] = {}
    for path in tensor_files(folder):
        tensors.update(load_file(path))
    tensors = _with_canonical_names(model, tensors)
    if tensors and _has_fused_experts(model) and not _targets(model).keys() <= tensors.keys():
        tensors = _converted(folder) or tensors
    _check_fit(model, tensors, folder)
    return tensors


def _has_fused_experts(model: Any) -> bool:
    """As transformers marks them; files usually hold a matrix per expert."""
    return any(hasattr(module, "_is_expert_parallel") for module in model.modules())


def _converted(folder: Path) -> dict[str, Tensor] | None:
    """The model's tensors, fused from the files' ones; None if some are missing or left over."""
    loader: Any = AutoModelForCausalLM
    model, report = loader.from_pretrained(
        folder,
        dtype=torch.float32,
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    if any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        return None
    return _targets(model)


def _copy(model: Any, tensors: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, target in _targets(model).items():
            target.copy_(tensors[name])


def _targets(model: Any) -> dict[str, Tensor]:
    """The tensors a snapshot contains; tied ones once, under their first name."""
    names: set[str] = set(model.state_dict())
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor for name, tensor in tensors if name in names}


def _with_canonical_names(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename tied tensors to their first name; a snapshot may use any of their names."""
    same = _canonical_names(model)
    given = {same.get(name, name): tensor for name, tensor in tensors.items()}
    return given | {name: tensor for name, tensor in tensors.items() if name in given}


def _canonical_names(model: Any) -> dict[str, str]:
    """The first name of each tensor, by each of its names."""
    first = {tensor.data_ptr(): name for name, tensor in _targets(model).items()}
    known: dict[str, Tensor] = model.state_dict()
    return {name: first.get(tensor.data_ptr(), name) for name, tensor in known.items()}


def _check_fit(model: Any, tensors: dict[str, Tensor], folder: Path) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in _targets(model).items()}
    aliases: set[str] = set(model.state_dict()) - set(expected)
    found = {name: tuple(t.shape) for name, t in tensors.items() if name not in aliases}
    if difference := tensor_difference(expected, found):
        raise EngineError(
            f"{folder} has a different model: {difference}; "
            "a policy cannot change its architecture during a run"
        )
