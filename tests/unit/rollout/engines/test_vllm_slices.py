# SPDX-License-Identifier: Apache-2.0
"""The map from Hugging Face tensors to vLLM's fused and sharded parameters, on doubles of its
layers: patched parameters of every rank are those that a full load would have made."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.rollout.engines.vllm.server import PLUGIN_DIR

HIDDEN, HEADS, KV_HEADS, WIDTH, INNER, VOCAB = 12, 4, 2, 3, 8, 14
SHAPES = {
    "model.embed_tokens.weight": (VOCAB, HIDDEN),
    "model.layers.0.self_attn.q_proj.weight": (HEADS * WIDTH, HIDDEN),
    "model.layers.0.self_attn.k_proj.weight": (KV_HEADS * WIDTH, HIDDEN),
    "model.layers.0.self_attn.v_proj.weight": (KV_HEADS * WIDTH, HIDDEN),
    "model.layers.0.self_attn.k_proj.bias": (KV_HEADS * WIDTH,),
    "model.layers.0.self_attn.o_proj.weight": (HIDDEN, HEADS * WIDTH),
    "model.layers.0.mlp.gate_proj.weight": (INNER, HIDDEN),
    "model.layers.0.mlp.up_proj.weight": (INNER, HIDDEN),
    "model.layers.0.mlp.down_proj.weight": (HIDDEN, INNER),
    "model.norm.weight": (HIDDEN,),
}
Arrays = dict[str, NDArray[Any]]


class Layer:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def named_parameters(self, *, recurse: bool) -> Iterator[tuple[str, Any]]:
        assert not recurse
        kept = self.__dict__.items()
        return ((name, value) for name, value in kept if isinstance(value, np.ndarray))


class QKVParallelLinear(Layer): ...


class MergedColumnParallelLinear(Layer): ...


class RowParallelLinear(Layer): ...


class VocabParallelEmbedding(Layer): ...


class RMSNorm(Layer): ...


def split(array: NDArray[Any], rank: int, size: int, axis: int = 0) -> NDArray[Any]:
    return np.split(array, size, axis)[rank]


def load(tensors: Arrays, rank: int, size: int) -> dict[str, Layer]:
    """The layers as vLLM would have loaded them, written the long way."""
    attention, mlp = "model.layers.0.self_attn.", "model.layers.0.mlp."
    replicas = max(1, size // KV_HEADS)
    kv = (rank // replicas, size // replicas)
    q, k, v = (tensors[f"{attention}{name}_proj.weight"] for name in "qkv")
    bias = np.zeros(HEADS * WIDTH // size)
    kv_bias = split(tensors[f"{attention}k_proj.bias"], *kv)
    heads = max(1, KV_HEADS // size)
    embedding = np.zeros((16 // size, HIDDEN))  # padded
    here = range(rank * 16 // size, min((rank + 1) * 16 // size, VOCAB))
    embedding[: len(here)] = tensors["model.embed_tokens.weight"][here.start : here.stop]
    shard = SimpleNamespace(org_vocab_start_index=here.start, org_vocab_end_index=here.stop)
    rank_of = {"tp_rank": rank, "tp_size": size}
    return {
        "model.embed_tokens": VocabParallelEmbedding(weight=embedding, shard_indices=shard),
        f"{attention}qkv_proj": QKVParallelLinear(
            weight=np.concatenate([split(q, rank, size), split(k, *kv), split(v, *kv)]),
            bias=np.concatenate([bias, kv_bias, 0 * kv_bias]),
            num_heads=HEADS // size,
            num_kv_heads=heads,
            num_kv_head_replicas=replicas,
            head_size=WIDTH,
            v_head_size=WIDTH,
            **rank_of,
        ),
        f"{attention}o_proj": RowParallelLinear(
            weight=split(tensors[f"{attention}o_proj.weight"], rank, size, 1).copy(), **rank_of
        ),
        f"{mlp}gate_up_proj": MergedColumnParallelLinear(
            weight=np.concatenate(
                [split(tensors[f"{mlp}{name}_proj.weight"], rank, size) for name in ("gate", "up")]
            ),
            output_sizes=[INNER, INNER],
            **rank_of,
        ),
        f"{mlp}down_proj": RowParallelLinear(
            weight=split(tensors[f"{mlp}down_proj.weight"], rank, size, 1).copy(), **rank_of
        ),
        "model.norm": RMSNorm(weight=tensors["model.norm.weight"].copy()),
    }


def model(layers: dict[str, Layer]) -> Any:
    return SimpleNamespace(named_modules=lambda: iter(layers.items()))


@pytest.fixture
def slices(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(PLUGIN_DIR)
    monkeypatch.delitem(sys.modules, "penstock_slices", raising=False)
    return importlib.import_module("penstock_slices")


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2), (1, 4), (2, 4)])
def test_patched_parameters_are_those_of_a_full_load(slices: Any, rank: int, size: int) -> None:
    draw = np.random.default_rng(3)
    before: Arrays = {name: draw.normal(size=shape) for name, shape in SHAPES.items()}
    after = {name: array.copy() for name, array in before.items()}
    layers = load(before, rank, size)
    places = slices.find_places(model(layers), SHAPES)
    for name, place in places.items():
        positions = draw.choice(after[name].size, 5, replace=False)
        after[name].reshape(-1)[positions] += 1
        target = getattr(place.module, place.parameter)
        values = after[name].reshape(-1)[positions]
        width = slices.matrix(target.shape)[1]
        is_here, where = slices.local_positions(place.slice, SHAPES[name], width, positions)
        target.reshape(-1)[where] = values[is_here]
    expected = load(after, rank, size)
    for path, layer in layers.items():
        for parameter, found in layer.named_parameters(recurse=False):
            np.testing.assert_array_equal(found, getattr(expected[path], parameter), path)


def test_a_tensor_without_a_place_is_named(slices: Any) -> None:
    layers = load({name: np.zeros(shape) for name, shape in SHAPES.items()}, 0, 1)
    experts = {**SHAPES, "model.layers.0.mlp.experts.0.gate_proj.weight": (4, 4)}
    with pytest.raises(ValueError, match="experts"):
        slices.find_places(model(layers), experts)
    quantized = {**SHAPES, "model.norm.weight": (HIDDEN + 1,)}
    with pytest.raises(ValueError, match="does not fit"):
        slices.find_places(model(layers), quantized)
