# SPDX-License-Identifier: Apache-2.0
"""A transformers causal language model as a decoder: float32, CPU, in process.

Owns the live model, the key-value cache of the rows and their left padding. Equal contexts
(members of one group) are prefilled once. Refuses a snapshot whose tensors are not exactly the
model's, by name and shape. Importing this module loads torch and transformers, which takes
seconds: the decoding thread does it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from penstock.errors import EngineError
from penstock.rollout.engines.snapshot import Snapshot, read_snapshot, tensor_files

# B = rows, T = padded length, V = vocabulary, H = key-value heads, D = head size
MAX_PREFILL_TOKENS = 16_384
"""Padded tokens of one prefill; more contexts are worked off in several."""
Logits = NDArray[np.float32]


@dataclass(slots=True)
class _Rows:
    """Cache tensors are BHTD; the mask is 0 where a row is padded on the left."""

    cache: Any
    """A DynamicCache; typed loosely, because its layers may be of kinds without keys."""
    mask_BT: Tensor

    def select(self, rows: Tensor) -> None:
        for layer in self.cache.layers:
            layer.keys = layer.keys.index_select(0, rows)
            layer.values = layer.values.index_select(0, rows)
        self.mask_BT = self.mask_BT.index_select(0, rows)

    def trim(self) -> None:
        """Drop the columns that are padding in every row."""
        num_padding = int(self.mask_BT.any(dim=0).to(torch.uint8).argmax())
        if num_padding:
            for layer in self.cache.layers:
                layer.keys = layer.keys[:, :, num_padding:]
                layer.values = layer.values[:, :, num_padding:]
            self.mask_BT = self.mask_BT[:, num_padding:]


@dataclass(frozen=True, slots=True)
class HfStaged:
    decoder: HfDecoder
    model: Any
    tensors: dict[str, Tensor]
    snapshot: Snapshot

    def apply(self) -> None:
        with torch.no_grad():
            for name, target in _targets(self.model).items():
                target.copy_(self.tensors[name])
        self.decoder.model = self.model


class HfDecoder:
    def __init__(self, *, torch_threads: int) -> None:
        torch.set_num_threads(torch_threads)
        self._torch_threads = torch_threads
        self.model: Any = None
        self._rows: _Rows | None = None

    def stage(self, folder: Path) -> HfStaged:
        torch.set_num_threads(self._torch_threads)  # OpenMP counts per calling thread
        snapshot = read_snapshot(folder)
        tensors: dict[str, Tensor] = {}
        for path in tensor_files(folder):
            tensors.update(load_file(path))
        model = _build(folder) if self.model is None else self.model
        tensors = _under_first_names(model, tensors)
        _check_fit(model, tensors, folder)
        return HfStaged(self, model, tensors, snapshot)

    def join(self, contexts: Sequence[Sequence[int]]) -> Logits:
        distinct: dict[tuple[int, ...], int] = {}
        row_of = [distinct.setdefault(tuple(ids), len(distinct)) for ids in contexts]
        ordered = list(distinct)
        by_length = sorted(range(len(ordered)), key=lambda index: len(ordered[index]))
        parts: list[_Rows] = []
        logits: list[Tensor] = []
        with torch.inference_mode():
            for block in _blocks(by_length, ordered):
                rows, logits_BV = self._prefill([ordered[index] for index in block])
                parts.append(rows)
                logits.append(logits_BV)
            place = {index: at for at, index in enumerate(by_length)}
            selection = torch.tensor([place[row] for row in row_of])
            joined = _stack(parts)
            joined.select(selection)
            self._rows = joined if self._rows is None else _stack([self._rows, joined])
            return torch.cat(logits).index_select(0, selection).numpy()

    def advance(self, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> Logits:
        assert self._rows is not None
        with torch.inference_mode():
            if len(rows) < len(self._rows.mask_BT):
                self._rows.select(torch.from_numpy(rows))
                self._rows.trim()
            position_B1 = self._rows.mask_BT.sum(dim=1, keepdim=True)
            self._rows.mask_BT = pad(self._rows.mask_BT, (0, 1), value=1)
            return self._forward(torch.from_numpy(tokens)[:, None], self._rows, position_B1).numpy()

    def clear(self) -> None:
        self._rows = None

    def _prefill(self, contexts: Sequence[Sequence[int]]) -> tuple[_Rows, Tensor]:
        length = max(len(ids) for ids in contexts)
        ids_BT = np.zeros((len(contexts), length), np.int64)
        mask_BT = np.zeros((len(contexts), length), np.int64)
        for row, ids in enumerate(contexts):
            ids_BT[row, length - len(ids) :] = ids
            mask_BT[row, length - len(ids) :] = 1
        # Without a config every layer keeps all keys, and a sliding window is the mask's business.
        rows = _Rows(DynamicCache(), torch.from_numpy(mask_BT))
        position_BT = (rows.mask_BT.cumsum(dim=1) - 1).clamp_(min=0)
        return rows, self._forward(torch.from_numpy(ids_BT), rows, position_BT)

    def _forward(self, ids_BT: Tensor, rows: _Rows, position_BT: Tensor) -> Tensor:
        output = self.model(
            input_ids=ids_BT,
            attention_mask=rows.mask_BT,
            position_ids=position_BT,
            past_key_values=rows.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]


def _blocks(order: list[int], contexts: list[tuple[int, ...]]) -> Iterator[list[int]]:
    """Runs of similar length whose padded size stays within one prefill; `order` ascends in
    length."""
    block: list[int] = []
    for index in order:
        if block and (len(block) + 1) * len(contexts[index]) > MAX_PREFILL_TOKENS:
            yield block
            block = []
        block.append(index)
    yield block


def _stack(parts: Sequence[_Rows]) -> _Rows:
    """One batch of all rows, padded on the left to the longest."""
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
    return _Rows(cache, torch.cat(masks))


# --- weights ------------------------------------------------------------------------------------


def _build(folder: Path) -> Any:
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="sdpa"
    )
    # The imported libraries are millions of objects for ever: a full collection over them would
    # stop all answers for 200 ms, again and again.
    gc.collect()
    gc.freeze()
    return model.eval().requires_grad_(False)


def _targets(model: Any) -> dict[str, Tensor]:
    """Every tensor a snapshot carries; tied ones once, under their first name."""
    names: set[str] = set(model.state_dict())
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor for name, tensor in tensors if name in names}


def _under_first_names(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A snapshot may carry a tied tensor under any of its names."""
    first = {tensor.data_ptr(): name for name, tensor in _targets(model).items()}
    known: dict[str, Tensor] = model.state_dict()
    same = {name: first.get(tensor.data_ptr(), name) for name, tensor in known.items()}
    given = {same.get(name, name): tensor for name, tensor in tensors.items()}
    return given | {name: tensor for name, tensor in tensors.items() if name in given}


def _check_fit(model: Any, tensors: dict[str, Tensor], folder: Path) -> None:
    wanted = {name: tuple(tensor.shape) for name, tensor in _targets(model).items()}
    aliases: set[str] = set(model.state_dict()) - set(wanted)
    missing = sorted(set(wanted) - set(tensors))
    unknown = sorted(set(tensors) - set(wanted) - aliases)
    wrong = sorted(
        f"{name} {tuple(tensors[name].shape)} for {shape}"
        for name, shape in wanted.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    )
    if missing or unknown or wrong:
        raise EngineError(
            f"{folder} holds another model: {len(missing)} tensors missing {missing[:3]}, "
            f"{len(unknown)} unknown {unknown[:3]}, {len(wrong)} of other shape {wrong[:3]}; "
            "a policy keeps its architecture for the whole run"
        )
