# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: the ranks of a part share the tokens of each line of samples.

Each rank computes a slice of the line, in all layers and in the head. For attention, ranks exchange
heads for tokens, so that each has all tokens of some heads. If there are more ranks than key-value
heads, as many groups as needed have a block of the line each, and keys and values go from group to
group (a ring). Blocks are two chunks of the line, an early one and a late one, so that all ranks
have the same work.

Owns who computes which tokens, and both exchanges. Slices are equal: the end of the line is padded
by a sample whose results are not read.

P = tokens of the line, padded; n = tokens of a slice; H = heads, D = size of a head; K = trained
tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from penstock.errors import ConfigError
from penstock.trainer.arrays import Ints
from penstock.trainer.attention import Rows, make_attention_layout
from penstock.trainer.ranks.group import RankGroup
from penstock.trainer.ranks.partial_attention import attend_partly, backward_partly, merge


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """This rank among those that share lines."""

    size: int = 1
    index: int = 0
    num_exchanging: int = 1
    """Ranks that exchange heads; `size` is this times the number of blocks."""
    multiple: int = 1
    """The tokens of a slice are a multiple of this: tensor parallelism deals them out again."""
    group: dist.ProcessGroup | None = None
    """None if this rank has all tokens."""

    @property
    def is_whole(self) -> bool:
        """Lines are computed as they are."""
        return self.size == self.multiple == 1

    @property
    def num_blocks(self) -> int:
        return self.size // self.num_exchanging

    @property
    def block(self) -> int:
        return self.index // self.num_exchanging

    def padded(self, num_tokens: int) -> int:
        num_halves = 2 if self.num_blocks > 1 else 1
        unit = self.size * math.lcm(self.multiple, num_halves)
        return -(-num_tokens // unit) * unit

    def order(self, num_tokens: int) -> Ints:
        """The tokens of a padded line in the order of slices."""
        line_P = np.arange(num_tokens)
        if self.num_blocks == 1:
            return line_P
        chunks = np.split(line_P, 2 * self.num_blocks)
        return np.concatenate(
            [chunks[chunk] for b in range(self.num_blocks) for chunk in self.chunks(b)]
        )

    def chunks(self, block: int) -> tuple[int, int]:
        """An early chunk of the line and a late one: later tokens attend to more."""
        return block, 2 * self.num_blocks - 1 - block


WHOLE_LINE = Context()


class SharesLines(Protocol):
    """A model as a learner uses it."""

    context: Context


def make_context(model: PreTrainedModel, ranks: RankGroup) -> Context:
    """How the ranks of a part share the lines of this model."""
    parallel, position = ranks.position.parallel, ranks.position
    config: Any = model.config
    heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    return Context(
        size=parallel.cp,
        index=position.rank % parallel.ranks_per_part // parallel.tp,
        num_exchanging=math.gcd(parallel.cp, heads // parallel.tp),
        multiple=parallel.tp,
        group=ranks.in_context,
    )


# --- who computes which tokens --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LineCut:
    """How the ranks share one line. Slices are of the padded line."""

    context: Context
    lengths: Ints
    """Of its samples, padding included."""
    order_P: Ints
    """The tokens of the line, slice after slice."""

    @classmethod
    def of(cls, lengths: Ints, context: Context) -> LineCut:
        num_tokens = int(lengths.sum())
        num_more = context.padded(num_tokens) - num_tokens
        if num_more:
            lengths = np.append(lengths, num_more)
        return cls(context=context, lengths=lengths, order_P=context.order(num_tokens + num_more))

    @property
    def size(self) -> int:
        """Tokens of each slice."""
        return self.order_P.size // self.context.size

    @property
    def own_P(self) -> Ints:
        """The tokens of this rank's slice."""
        return self.order_P[self.context.index * self.size :][: self.size]

    def places(self, tokens_K: Ints) -> tuple[Ints, Ints]:
        """(slice, place in it) of each of these tokens of the line."""
        place_P = np.empty_like(self.order_P)
        place_P[self.order_P] = np.arange(self.order_P.size)
        return place_P[tokens_K] // self.size, place_P[tokens_K] % self.size

    def rows(self) -> Rows:
        """How this rank's slice attends to the line."""
        if self.context.size == 1:
            return make_attention_layout(self.lengths)
        if self.context.num_blocks == 1:
            return ExchangedRows(context=self.context, rows=make_attention_layout(self.lengths))
        return ExchangedRows(context=self.context, rows=RingRows.of(self.lengths, self.context))


def gather_slices(values: Tensor, context: Context) -> Tensor:
    """As many values from each rank, slice after slice."""
    return values if context.group is None else cast(Any, _Gathered).apply(values, context.group)


class _Gathered(torch.autograd.Function):
    """What all ranks have. All of them compute the same from it, so each takes its own gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.index, ctx.num = dist.get_rank(group), values.numel()
        gathered = values.new_empty(dist.get_world_size(group) * values.numel())
        dist.all_gather_single(gathered, values.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0][ctx.index * ctx.num : (ctx.index + 1) * ctx.num], None


# --- all-to-all: heads for tokens -----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangedRows:
    """Attention over all tokens of a block, with some of the heads."""

    context: Context
    rows: Rows

    def to(self, device: torch.device) -> ExchangedRows:
        return replace(self, rows=self.rows.to(device))

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        lines = [
            line.unflatten(1, (self.context.num_exchanging, -1)) for line in (query, key, value)
        ]
        sizes = [line.shape[2] for line in lines]
        block: Tensor = cast(Any, _HeadsForTokens).apply(torch.cat(lines, dim=2), self.context)
        q, k, v = block.split(sizes, dim=1)
        out = self.rows.attend(q, k, v, scale, window)
        tokens: Tensor = cast(Any, _TokensForHeads).apply(out, self.context)
        return tokens.flatten(1, 2)


class _HeadsForTokens(torch.autograd.Function):
    """From n×E×H×D, heads in E parts, to (E·n)×H×D: the own part of the heads of all slices."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, context: Context) -> Tensor:
        ctx.context = context
        return _exchange(tokens.transpose(0, 1), context).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _to_slice(grads[0], ctx.context), None


class _TokensForHeads(torch.autograd.Function):
    """The way back."""

    @staticmethod
    def forward(ctx: Any, block: Tensor, context: Context) -> Tensor:
        ctx.context = context
        return _to_slice(block, context)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _exchange(grads[0].transpose(0, 1), ctx.context).flatten(0, 1), None


def _to_slice(block: Tensor, context: Context) -> Tensor:
    return _exchange(block.unflatten(0, (context.num_exchanging, -1)), context).transpose(0, 1)


def _exchange(parts: Tensor, context: Context) -> Tensor:
    """One part for each rank that exchanges heads with this one; returns what they had for it."""
    first = context.block * context.num_exchanging
    return _send(parts, context, [int(0 <= to - first < len(parts)) for to in range(context.size)])


def _send(
    parts: Tensor, context: Context, to: Sequence[int], of: Sequence[int] | None = None
) -> Tensor:
    sent = parts.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, list(of or to), list(to), group=context.group)
    return received


# --- ring: keys and values go round ---------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """Queries and keys of one sample, as ranges of the tokens of a block each."""

    queries: slice
    keys: slice
    is_causal: bool
    """They are the same tokens; else all keys are earlier than all queries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingRows:
    """Attention of the queries of one block; keys and values of all blocks come by."""

    context: Context
    pairs: tuple[tuple[_Pair, ...], ...]
    """What the queries meet in each block."""

    @classmethod
    def of(cls, lengths: Ints, context: Context) -> RingRows:
        ends = np.cumsum(lengths)
        size = int(ends[-1]) // (2 * context.num_blocks)
        samples = list(zip((ends - lengths).tolist(), ends.tolist(), strict=True))
        own = context.chunks(context.block)
        pairs = (
            tuple(
                pair
                for place, chunk in enumerate(own)
                for other_place, other in enumerate(context.chunks(block))
                for pair in _pairs(samples, chunk, other, size, place * size, other_place * size)
            )
            for block in range(context.num_blocks)
        )
        return cls(context=context, pairs=tuple(pairs))

    def to(self, device: torch.device) -> RingRows:
        return self

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        if window is not None:
            raise ConfigError(
                f"cp {self.context.size} needs a ring over {self.context.num_blocks} blocks, which "
                "layers with a sliding window do not have; set cp to a divisor of the key-value "
                "heads of a rank"
            )
        return cast(Any, _Ring).apply(query, key, value, self, scale)


def _pairs(
    samples: Sequence[tuple[int, int]], chunk: int, other: int, size: int, at: int, other_at: int
) -> list[_Pair]:
    """What the queries of one chunk of the line meet in another: all pieces of samples in the same
    one, or the one sample that reaches from an earlier one."""
    start, end = chunk * size, (chunk + 1) * size
    other_start, other_end = other * size, (other + 1) * size
    found: list[_Pair] = []
    for first, last in samples:
        q = slice(at + max(first, start) - start, at + min(last, end) - start)
        k = slice(
            other_at + max(first, other_start) - other_start,
            other_at + min(last, other_end) - other_start,
        )
        if q.start < q.stop and k.start < k.stop and other <= chunk:
            found.append(_Pair(queries=q, keys=k, is_causal=chunk == other))
    return found


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, rows: RingRows, scale: float
    ) -> Tensor:
        out = torch.zeros_like(query, dtype=torch.float32)
        lse = out.new_full(query.shape[:2], -math.inf)
        keys, values = key, value
        for step in range(rows.context.num_blocks):
            if step:
                keys, values = _pass_on([keys, values], rows.context)
            for pair in rows.pairs[(rows.context.block - step) % rows.context.num_blocks]:
                q, k = pair.queries, pair.keys
                found = attend_partly(query[q], keys[k], values[k], scale, pair.is_causal)
                out[q], lse[q] = merge((out[q], lse[q]), found)
        result = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, lse)
        ctx.rows, ctx.scale = rows, scale
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, keys, values, out, lse = cast(tuple[Tensor, ...], ctx.saved_tensors)
        rows: RingRows = ctx.rows
        grad_q, grad_k, grad_v = (
            torch.zeros_like(one, dtype=torch.float32) for one in (query, keys, values)
        )
        for step in range(rows.context.num_blocks):
            for pair in rows.pairs[(rows.context.block - step) % rows.context.num_blocks]:
                q, k = pair.queries, pair.keys
                found = backward_partly(
                    grads[0][q],
                    (query[q], keys[k], values[k], out[q], lse[q]),
                    ctx.scale,
                    pair.is_causal,
                )
                grad_q[q] += found[0]
                grad_k[k] += found[1]
                grad_v[k] += found[2]
            keys, values = _pass_on([keys, values], rows.context)
            grad_k, grad_v = _pass_on([grad_k, grad_v], rows.context)  # home after the last step
        dtype = query.dtype
        return grad_q.to(dtype), grad_k.to(dtype), grad_v.to(dtype), None, None


def _pass_on(tensors: Sequence[Tensor], context: Context) -> tuple[Tensor, Tensor]:
    """To the next block; returns what the one before had."""
    hop, size = context.num_exchanging, context.size
    to, of = ((context.index + step) % size for step in (hop, -hop))
    one, two = _send(
        torch.stack(list(tensors))[None],
        context,
        [int(rank == to) for rank in range(size)],
        [int(rank == of) for rank in range(size)],
    )[0]
    return one, two
