# SPDX-License-Identifier: Apache-2.0
"""Attention over some of the keys, and how such results become attention over all of them.

Owns which of torch's kernels computes it on which device, and the merging by their log-sum-exps.
Does not know ranks, samples or lines.

L = queries, M = keys, H = heads, D = size of a head.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

Partial = tuple[Tensor, Tensor]
"""Result (L×H×D) and log-sum-exp of the scores (L×H)."""
_aten: Any = torch.ops.aten


def merge(one: Partial, other: Partial) -> Partial:
    """Over the keys of both, in float32."""
    lse = torch.logaddexp(one[1], other[1])
    shares = ((one_lse - lse).exp()[..., None] for one_lse in (one[1], other[1]))
    first, second = shares
    return one[0] * first + other[0] * second, lse


def attend_partly(
    query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool
) -> Partial:
    """Queries over these keys; keys and values may have fewer heads."""
    q, k, v = _rows(query, key, value)
    if q.is_cuda and q.dtype is torch.float32:
        found = _aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, is_causal, scale=scale
        )
        lse = found[1][..., : q.shape[2]]  # this kernel pads it
    elif q.is_cuda:
        found = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)
        lse = found[1]
    else:
        found = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, scale=scale
        )
        lse = found[1]
    return _line(found[0]), lse[0].transpose(0, 1)


def backward_partly(
    grad: Tensor, saved: tuple[Tensor, ...], scale: float, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values by these keys alone. saved: queries, keys, values, and
    the result and log-sum-exp over *all* keys."""
    query, key, value, out, lse = saved
    q, k, v = _rows(query, key, value)
    grad_rows, out_rows = _row(grad), _row(out)
    lse_rows = lse.transpose(0, 1)[None].contiguous()
    if q.is_cuda and q.dtype is torch.float32:
        short = -lse_rows.shape[-1] % 32
        padded = torch.nn.functional.pad(lse_rows, (0, short), value=float("inf"))
        none = torch.zeros((), dtype=torch.int64, device=q.device)
        found = _aten._scaled_dot_product_efficient_attention_backward(
            grad_rows, q, k, v, None, out_rows, padded, none, none, 0.0,
            [True, True, True, False], is_causal, scale=scale,
        )  # fmt: skip
    elif q.is_cuda:
        none = torch.zeros(2, dtype=torch.uint64, device=q.device)
        found = _aten._scaled_dot_product_flash_attention_backward(
            grad_rows, q, k, v, out_rows, lse_rows, None, None, q.shape[2], k.shape[2], 0.0,
            is_causal, none, none[:0], scale=scale,
        )  # fmt: skip
    else:
        found = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_rows, q, k, v, out_rows, lse_rows, 0.0, is_causal, scale=scale
        )
    grad_q, grad_k, grad_v = (_line(cast(Tensor, one)).float() for one in found[:3])
    shared = key.shape[1]
    return grad_q, _shared(grad_k, shared), _shared(grad_v, shared)


def _rows(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As the kernels take them, 1×H×L×D, keys and values repeated for the heads that share them."""
    each = query.shape[1] // key.shape[1]
    k, v = (line.repeat_interleave(each, dim=1) if each > 1 else line for line in (key, value))
    return _row(query), _row(k), _row(v)


def _row(line: Tensor) -> Tensor:
    return line.transpose(0, 1)[None].contiguous()


def _line(row: Tensor) -> Tensor:
    return row[0].transpose(0, 1)


def _shared(grad: Tensor, num_heads: int) -> Tensor:
    """Summed over the heads that share a key."""
    return grad.unflatten(1, (num_heads, -1)).sum(dim=2)
