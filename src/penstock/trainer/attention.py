# SPDX-License-Identifier: Apache-2.0
"""Attention over packed samples: each token attends only to earlier tokens of the same sample.

Samples are packed one after another in one line, so that all other layers compute no padding. Only
for attention they are laid out again as rows, grouped by similar length, and then packed again. A
row is one sample and the mask is causal, so nothing can leak from one sample to another.

P = tokens of the line, N = rows of a run, L = their length, H = heads, D = size of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from penstock.errors import ConfigError
from penstock.trainer.arrays import Ints

PACKED = "penstock_packed"
SHORT = 16
"""Rows up to this length are grouped whatever they are: a call costs more than their padding."""
MIN_FILL = 0.75
"""Rows of a run are at least this long, relative to its longest."""
_WITHOUT_EFFECT = {"dropout", "position_ids", "use_cache", "cache_position", "is_causal"}
"""Further arguments that models pass to attention and that do not change it: dropout is off."""


class Rows(Protocol):
    """How the tokens that a model is given attend to each other."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """The result for each query, P×H×D; keys and values may have fewer heads."""
        ...

    def to(self, device: torch.device) -> Rows: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayout:
    """How the line of one micro-batch is laid out for attention."""

    buckets: tuple[Tensor, ...]
    """Each N×L: the index of the token of the line at that place; padding, on the right, repeats
    any."""
    unbucket_P: Tensor
    """Index of each token of the line in the runs, flat and one run after another."""

    def to(self, device: torch.device) -> AttentionLayout:
        return AttentionLayout(
            buckets=tuple(run_NL.to(device, non_blocking=True) for run_NL in self.buckets),
            unbucket_P=self.unbucket_P.to(device, non_blocking=True),
        )

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        if not self.buckets:
            return query
        attended: list[Tensor] = []
        for run_NL in self.buckets:
            q, k, v = (
                line.index_select(0, run_NL.flatten()).unflatten(0, run_NL.shape).transpose(1, 2)
                for line in (query, key, value)
            )
            out = causal_attention(q, k, v, scale, window)
            attended.append(out.transpose(1, 2).flatten(0, 1))
        rows_out = attended[0] if len(attended) == 1 else torch.cat(attended)
        return rows_out.index_select(0, self.unbucket_P)


def make_attention_layout(lengths: Ints) -> AttentionLayout:
    """Rows for samples of these lengths, in the order in which they are packed."""
    starts = np.cumsum(lengths) - lengths
    order = np.argsort(-lengths, kind="stable")
    unbucket_P = np.empty(int(lengths.sum()), np.int64)
    buckets: list[Tensor] = []
    first, num_cells = 0, 0
    while first < order.size:
        longest = int(lengths[order[first]])
        least = 0 if longest <= SHORT else longest * MIN_FILL
        end = first + int(np.searchsorted(-lengths[order[first:]], -least, side="right"))
        chosen = order[first:end]
        column_L = np.arange(longest)
        is_token_NL = column_L < lengths[chosen][:, None]
        token_NL = np.where(is_token_NL, starts[chosen][:, None] + column_L, 0)
        unbucket_P[token_NL[is_token_NL]] = num_cells + np.flatnonzero(is_token_NL)
        buckets.append(torch.from_numpy(token_NL))
        num_cells += token_NL.size
        first = end
    return AttentionLayout(buckets=tuple(buckets), unbucket_P=torch.from_numpy(unbucket_P))


def vocab_size(model: PreTrainedModel) -> int:
    return cast(nn.Embedding, model.get_input_embeddings()).num_embeddings


def use_packed_attention(model: PreTrainedModel) -> None:
    """Make the model's forward pass take `rows` in addition to a single line of tokens."""
    AttentionInterface.register(PACKED, _attend)
    model.set_attn_implementation(PACKED)


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    rows: Rows,
    scaling: float,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query, key and value are 1×H×P×D; the result is 1×P×H×D."""
    assert attention_mask is None and query.shape[0] == 1, "samples come packed, in one line"
    given = {name for name, value in others.items() if value is not None}
    if unknown := sorted(given - _WITHOUT_EFFECT):
        raise ConfigError(
            f"{type(module).__name__} needs attention with {', '.join(unknown)}, which packed "
            "samples do not have: its log-probs would be wrong. Use a model with standard attention"
        )
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return rows.attend(q, k, v, scaling, sliding_window)[None], None


def repeats_heads(q: Tensor, *, has_mask: bool) -> bool:
    """Whether keys and values are repeated for every head of a query that shares them. On GPUs only
    flash attention shares them itself, in half precision and without a mask; else torch would
    multiply everything out, with a number for every pair of tokens."""
    return q.is_cuda and (q.dtype is torch.float32 or has_mask)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """Each token over itself and those before it, N×H×L×D; with a window, over at most that many.

    With a window, blocks of queries as long as the window meet only the keys they may see, so the
    cost grows with the length and not with its square."""
    length = q.shape[2]
    is_windowed = window is not None and length > window
    is_repeated = repeats_heads(q, has_mask=is_windowed)
    if is_repeated:
        k, v = (heads.repeat_interleave(q.shape[1] // heads.shape[1], dim=1) for heads in (k, v))
    attend = partial(scaled_dot_product_attention, scale=scale, enable_gqa=not is_repeated)
    if window is None or not is_windowed:
        return attend(q, k, v, is_causal=True)
    parts: list[Tensor] = []
    at_L = torch.arange(length, device=q.device)
    for first in range(0, length, window):
        end = first + window
        asking, seen = slice(first, end), slice(max(0, first - window + 1), end)
        back = at_L[asking, None] - at_L[seen]
        is_seen = (back >= 0) & (back < window)
        parts.append(attend(q[:, :, asking], k[:, :, seen], v[:, :, seen], attn_mask=is_seen))
    return torch.cat(parts, dim=2)
