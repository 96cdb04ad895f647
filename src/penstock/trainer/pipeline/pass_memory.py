# SPDX-License-Identifier: Apache-2.0
"""What a training pass takes on one rank: gathered weights, activations and logits at the peak.

Owns the formulas. Their coefficients count the tensors that the trainer's passes keep, as measured
on fake ranks (`benchmarks.size`; a test compares the two). Counts what torch allocates: neither
what kernels take for themselves nor what an allocator wastes. Imports no torch.

Sizes are of one rank and one micro-batch, in bytes; e = bytes of a number in the pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from penstock.config.stages import ParallelConfig
from penstock.config.trainer import Recompute

MAX_LOGITS = 1 << 27
"""As `actor.MAX_LOGITS`, whose module imports torch; a test compares them."""
FLOAT32 = 4
PRECISION_BYTES = {"float32": 4, "bfloat16": 2}
_LOGITS_COPIES = 4
"""In float32: logits, log-probs, probabilities and their product, of one chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The figures of a decoder's config.json that decide what a pass takes."""

    num_layers: int
    hidden: int
    attention: int
    """Width of all query heads together."""
    key_value: int
    """Width of all key heads together."""
    num_heads: int
    num_key_value_heads: int
    mlp: int
    """Width of the MLP; in a mixture of experts, of all experts that one token visits."""
    vocab: int
    experts_per_token: int = 0
    num_experts: int = 0
    expert: int = 0
    """Width of one expert."""
    has_head_norms: bool = False
    """Whether queries and keys are normalised."""
    is_tied: bool = False
    """Whether the head is the embedding."""
    has_window: bool = False
    """Whether some layers attend to the last tokens only."""

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self | None:
        """Of a config.json; None if it is not a decoder of the usual kind."""
        try:
            heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
            shared = int(config.get("num_key_value_heads") or heads)
            width = int(config.get("head_dim") or hidden // heads)
            visited = int(config.get("num_experts_per_tok") or 0)
            expert = int(config.get("moe_intermediate_size") or config["intermediate_size"])
            return cls(
                num_layers=int(config["num_hidden_layers"]),
                hidden=hidden,
                attention=heads * width,
                key_value=shared * width,
                num_heads=heads,
                num_key_value_heads=shared,
                mlp=visited * expert if visited else int(config["intermediate_size"]),
                vocab=int(config["vocab_size"]),
                experts_per_token=visited,
                num_experts=int(config.get("num_experts") or config.get("num_local_experts") or 0),
                expert=expert if visited else 0,
                has_head_norms=str(config.get("model_type", "")).startswith("qwen3"),
                is_tied=bool(config.get("tie_word_embeddings", False)),
                has_window=bool(config.get("sliding_window"))
                and config.get("use_sliding_window") is not False,
            )
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            return None

    @property
    def visits(self) -> int:
        """Numbers of the states that one token brings to its experts, a copy for each."""
        return self.experts_per_token * self.hidden

    @property
    def num_expert_parameters(self) -> int:
        """Of all experts of a layer: gate, up and down."""
        return 3 * self.num_experts * self.expert * self.hidden

    @property
    def mlp_output(self) -> int:
        """Numbers that the last products of an MLP return for one token."""
        return self.visits or self.hidden

    @property
    def num_root_parameters(self) -> int:
        """Embedding and head: what FSDP gathers with the root, for the complete pass."""
        return self.vocab * self.hidden * (1 if self.is_tied else 2) + self.hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSpec:
    """How a model's passes are made."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    num_tokens: int = 4096
    """Of the largest micro-batch."""
    precision: Literal["float32", "bfloat16"] = "float32"
    recompute: Recompute = "none"
    is_on_gpu: bool = False
    """Then the next layer is gathered while one computes."""
    is_offloaded: bool = False
    """Whether AdamW's moments are in host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassMemory:
    """At the peak of a pass, in addition to this rank's shards."""

    gathered_bytes: int
    """Weights of the root and of layers, and their gradients until they are reduced."""
    activation_bytes: int
    logits_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.gathered_bytes + self.activation_bytes + self.logits_bytes


def pass_memory(shape: ModelShape, num_parameters: int, spec: PassSpec) -> PassMemory:
    """The worst moment of a training pass: in the last layers' backward pass, when the gradients of
    a layer are reduced, in the head, or when the gradients of embedding and head are reduced."""
    moments = _Moments(shape, num_parameters, spec)
    found = (moments.in_layers(), moments.in_reduce(), moments.in_head(), moments.in_root())
    return max(found, key=lambda moment: moment.total_bytes)


class _Moments:
    def __init__(self, shape: ModelShape, num_parameters: int, spec: PassSpec) -> None:
        e = PRECISION_BYTES[spec.precision]
        self._shape, self._spec, self._e = shape, spec, e
        self._is_sharded = spec.parallel.num_ranks > 1
        has_copies = self._is_sharded or e != FLOAT32
        root = shape.num_root_parameters
        tp = spec.parallel.tp
        layer = max(0, num_parameters - root) / shape.num_layers / tp
        layer -= shape.num_expert_parameters * (1 - 1 / spec.parallel.ep)
        self._root_parameters = root / tp
        self._layer_parameters = layer
        self._root = e * self._root_parameters if has_copies else 0.0
        self._layer = e * layer if has_copies else 0.0
        self._head_gradient = e * shape.vocab * shape.hidden / tp
        self._num_tokens = -(-spec.num_tokens // spec.parallel.cp)
        self._kept = self._num_tokens * shape.num_layers * kept_per_token(shape, spec)
        self._num_copies = 0 if not self._is_sharded else 1 if spec.is_on_gpu else 2
        """Of what is reduced: gloo takes one for itself."""
        self._ends = self._num_tokens * e * 2 * shape.hidden
        """What the last norm keeps, and the states from which logits are computed."""

    def in_layers(self) -> PassMemory:
        """One layer's backward pass, its weights and the next one gathered; the gradients
        of the layer before are being reduced."""
        reduced = FLOAT32 * self._layer_parameters if self._is_sharded else 0.0
        num_gathered = 2 + self._spec.is_on_gpu if self._is_sharded else 1
        gathered = self._root + self._head_gradient + num_gathered * self._layer + reduced
        work = self._num_tokens * work_per_token(self._shape, self._spec)
        return _pass_memory(gathered, self._kept + work, 0.0)

    def in_reduce(self) -> PassMemory:
        """A layer's gradients and their copy in float32, next to its weights and the next ones."""
        if not self._is_sharded:
            return _pass_memory(0.0, 0.0, 0.0)
        reduced = self._num_copies * FLOAT32 * self._layer_parameters
        layer = (3 + self._spec.is_on_gpu) * self._layer + reduced
        gathered = self._root + self._head_gradient + layer
        return _pass_memory(gathered, self._kept + self._ends, 0.0)

    def in_head(self) -> PassMemory:
        """One chunk of logits, or the sum of two chunks' gradients of the head."""
        size = max(1, MAX_LOGITS // self._shape.vocab)
        chunk = min(self._num_tokens, size) * self._shape.vocab * FLOAT32
        is_chunked = self._num_tokens > size
        sums = 2 * self._head_gradient if is_chunked else 0.0
        logits = max(_LOGITS_COPIES * chunk, sums)
        gathered = self._root + self._layer * (1 + self._spec.is_on_gpu)
        return _pass_memory(gathered + self._head_gradient, self._kept + self._ends, logits)

    def in_root(self) -> PassMemory:
        """The gradients of embedding and head, and their copy in float32 that is reduced."""
        gradients = self._e * self._root_parameters
        reduced = self._num_copies * FLOAT32 * self._root_parameters
        prefetched = self._layer * self._spec.is_on_gpu
        return _pass_memory(gradients + reduced + prefetched, 0.0, 0.0)


def _pass_memory(gathered: float, activations: float, logits: float) -> PassMemory:
    return PassMemory(
        gathered_bytes=round(gathered),
        activation_bytes=round(activations),
        logits_bytes=round(logits),
    )


def kept_per_token(shape: ModelShape, spec: PassSpec) -> float:
    """What one layer keeps of each token until its backward pass."""
    e, tp = PRECISION_BYTES[spec.precision], spec.parallel.tp
    match spec.recompute:
        case "layer":
            return e * shape.hidden / tp
        case "selective":  # its input, and what matrix products and attention return
            heads = e * (2 * shape.attention + 2 * shape.key_value) + FLOAT32 * shape.num_heads
            mlp = e * (2 * shape.mlp + shape.num_experts)
            ends = shape.hidden / tp + shape.hidden + shape.mlp_output
            return e * ends + (heads + mlp) / tp
        case "none":
            return _all_of_a_layer(shape, e, tp)


def work_per_token(shape: ModelShape, spec: PassSpec) -> float:
    """What the backward pass of one layer takes besides: what it computes again, and gradients."""
    e, tp = PRECISION_BYTES[spec.precision], spec.parallel.tp
    gradients = e * (max(2 * shape.mlp / tp, 3 * shape.visits) + shape.hidden)
    match spec.recompute:
        case "none":
            return gradients
        case "layer":
            return gradients + _all_of_a_layer(shape, e, tp)
        case "selective":
            kept = e * (shape.attention + 2 * shape.mlp) / tp + e * shape.visits
            return gradients + _all_of_a_layer(shape, e, tp) - kept


def _all_of_a_layer(shape: ModelShape, e: int, tp: int) -> float:
    """Norms keep their input in float32 and before it is scaled, for a rank's share of the tokens;
    the products after them their result, for all tokens. The layout of rows and attention keep
    queries, keys, values and results; the MLP keeps both of its factors, one of them twice."""
    heads = 3 * e * shape.attention + 2 * e * shape.key_value + FLOAT32 * shape.num_heads
    if shape.has_head_norms:
        heads += (e + FLOAT32) * (shape.attention + shape.key_value)
    experts = 2 * e * shape.visits + FLOAT32 * shape.num_experts
    norms = (2 * e + 2 * FLOAT32) * shape.hidden / tp + 2 * e * shape.hidden
    return norms + (heads + 4 * e * shape.mlp) / tp + experts
