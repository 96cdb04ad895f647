# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities and entropy under a sampling spec. Pure functions of tensors.

K = trained tokens, V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MASKED_LOGIT = -1e30
"""Logit of a token outside the kept set; finite, so that 0 · log 0 is 0 and no gradient is NaN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """The kept part of the vocabulary, by token."""

    top_k_K: Tensor
    """0 keeps all."""
    top_p_K: Tensor
    min_p_K: Tensor
    """0 keeps all."""


def sampling_log_softmax(
    logits_KV: Tensor, targets_K: Tensor, temperature_K: Tensor | None, kept: Truncation | None
) -> Tensor:
    """Log-probabilities over the vocabulary under each token's sampling spec.

    Temperature, then min-p, then top-k, then top-p. The token that was sampled is always kept:
    weights that moved since may have pushed it out, and its ratio must stay a number.
    """
    if temperature_K is not None:
        logits_KV = logits_KV / temperature_K[:, None]
    if kept is not None:
        outside_KV = _truncated_mask(logits_KV.detach(), kept)
        outside_KV.scatter_(1, targets_K[:, None], False)
        logits_KV = logits_KV.masked_fill(outside_KV, _MASKED_LOGIT)
    return torch.log_softmax(logits_KV, dim=-1)


def _truncated_mask(logits_KV: Tensor, kept: Truncation) -> Tensor:
    """True for the tokens that min-p and top-k, then top-p over the rest, remove."""
    num_tokens = logits_KV.shape[1]
    sorted_KV, order_KV = logits_KV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(num_tokens, device=logits_KV.device)
    top_k_K = torch.where(kept.top_k_K > 0, kept.top_k_K, num_tokens)
    beyond_KV = rank_V[None, :] >= top_k_K[:, None]
    beyond_KV |= sorted_KV < sorted_KV[:, :1] + kept.min_p_K.log()[:, None]
    probs_KV = sorted_KV.masked_fill(beyond_KV, _MASKED_LOGIT).softmax(dim=-1)
    before_KV = probs_KV.cumsum(dim=-1) - probs_KV
    is_cut_K = kept.top_p_K < 1
    beyond_KV |= is_cut_K[:, None] & (before_KV >= kept.top_p_K[:, None])
    return torch.zeros_like(beyond_KV).scatter_(1, order_KV, beyond_KV)


def entropy(logprobs_KV: Tensor) -> Tensor:
    """Of each token's distribution, in nats."""
    return -(logprobs_KV.exp() * logprobs_KV).sum(dim=-1)
