# SPDX-License-Identifier: Apache-2.0
"""Samples tokens from logits, batched and stateless.

The distribution under a spec, in vLLM's order: softmax of logits / temperature; keep tokens at
least `min_p` times as likely as the likeliest; keep the `top_k` likeliest; renormalize; keep the
fewest tokens whose probability reaches `top_p`; renormalize. The recorded log-prob is the token's
log-prob under this distribution. Temperature 0 takes the likeliest token (the lowest id on a tie)
and records its log-prob under the plain softmax at temperature 1, because a greedy choice has no
useful density.

The random number of a token is a hash of (seed, index in the answer). So a draw depends neither on
other rows of the batch nor on the order of requests, and an answer resumed at token n continues the
same random stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from penstock.errors import EngineError
from penstock.seeds import GAMMA, MASK_64
from penstock.types import SamplingSpec

# B = rows of the batch, V = vocabulary
MAX_CELLS = 1 << 21
"""Rows are processed in blocks of about this many logits, so that temporaries fit in the cache."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SpecColumns:
    """The sampling specs of a batch, one array per field."""

    temperature_B: Floats
    top_p_B: Floats
    top_k_B: Ints
    min_p_B: Floats
    seed_B: NDArray[np.uint64]

    @classmethod
    def of(cls, specs: Sequence[SamplingSpec]) -> SpecColumns:
        return cls(
            np.array([spec.temperature for spec in specs], np.float64),
            np.array([spec.top_p for spec in specs], np.float64),
            np.array([spec.top_k for spec in specs], np.int64),
            np.array([spec.min_p for spec in specs], np.float64),
            np.array([spec.seed & MASK_64 for spec in specs], np.uint64),
        )

    def take(self, rows: Ints | slice) -> SpecColumns:
        return SpecColumns(*(getattr(self, column.name)[rows] for column in fields(self)))

    def join(self, other: SpecColumns) -> SpecColumns:
        pairs = ((getattr(self, c.name), getattr(other, c.name)) for c in fields(self))
        return SpecColumns(*(np.concatenate(pair) for pair in pairs))


def uniform(seed_B: NDArray[np.uint64], position_B: Ints) -> Floats:
    """Numbers in [0, 1) from splitmix64 over (seed, position)."""
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is intended
        counter = _mix(seed_B) + (position_B.astype(np.uint64) + np.uint64(1)) * np.uint64(GAMMA)
        bits = _mix(counter) >> np.uint64(12)
    return bits.astype(np.float64) * 2.0**-52


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return value ^ (value >> np.uint64(31))


def sample(
    logits_BV: NDArray[np.float32], specs: SpecColumns, position_B: Ints
) -> tuple[Ints, NDArray[np.float32]]:
    """Sample one token per row, with its log-prob; `position_B` is its index in the answer."""
    num_rows, vocab_size = logits_BV.shape
    block = max(1, MAX_CELLS // vocab_size)
    token_B = np.empty(num_rows, np.int64)
    logprob_B = np.empty(num_rows, np.float32)
    uniform_B = uniform(specs.seed_B, position_B)
    with np.errstate(invalid="ignore"):  # NaN is checked below
        for start in range(0, num_rows, block):
            rows = slice(start, start + block)
            token_B[rows], logprob_B[rows] = _sample_block(
                logits_BV[rows].astype(np.float64), specs.take(rows), uniform_B[rows]
            )
    if not np.isfinite(logprob_B).all():
        raise EngineError(
            "the model's logits are NaN or infinite, so the snapshot is broken; "
            "check the trainer's loss before this version"
        )
    return token_B, logprob_B


def _sample_block(logits_BV: Floats, specs: SpecColumns, uniform_B: Floats) -> tuple[Ints, Floats]:
    is_greedy_B = specs.temperature_B == 0.0
    divisor_B = np.where(is_greedy_B, 1.0, specs.temperature_B)
    logprob_BV = _log_softmax(logits_BV / divisor_B[:, None])
    is_cut_B = (specs.top_k_B > 0) | (specs.top_p_B < 1.0) | (specs.min_p_B > 0.0)
    is_cut_B &= ~is_greedy_B
    if is_cut_B.any():
        logprob_BV[is_cut_B] = _truncate(logprob_BV[is_cut_B], specs.take(np.flatnonzero(is_cut_B)))
    cdf_BV = np.exp(logprob_BV).cumsum(axis=1)
    token_B: Ints = (cdf_BV <= (uniform_B * cdf_BV[:, -1])[:, None]).sum(axis=1)
    if is_greedy_B.any():
        token_B = np.where(is_greedy_B, logprob_BV.argmax(axis=1), token_B)
    token_B = np.minimum(token_B, logits_BV.shape[1] - 1)  # only NaN rows; the caller raises
    logprob_B = logprob_BV[np.arange(len(token_B)), token_B]
    return token_B, np.minimum(logprob_B, 0.0)


def _log_softmax(logits_BV: Floats) -> Floats:
    shifted_BV = logits_BV - logits_BV.max(axis=1, keepdims=True)
    return shifted_BV - np.log(np.exp(shifted_BV).sum(axis=1, keepdims=True))


def _truncate(logprob_BV: Floats, specs: SpecColumns) -> Floats:
    vocab_size = logprob_BV.shape[1]
    top_k_B, top_p_B = specs.top_k_B, specs.top_p_B
    order_BV = np.argsort(-logprob_BV, axis=1, kind="stable")
    sorted_BV = np.take_along_axis(logprob_BV, order_BV, axis=1)
    kept_k_B = np.where(top_k_B > 0, np.minimum(top_k_B, vocab_size), vocab_size)
    rank_V = np.arange(vocab_size, dtype=np.int64)
    with np.errstate(divide="ignore"):  # log(0) = -inf: a min_p of 0 keeps all tokens
        floor_B = sorted_BV[:, 0] + np.log(specs.min_p_B)
    is_kept_BV = np.less(rank_V, kept_k_B[:, None]) & np.greater_equal(sorted_BV, floor_B[:, None])
    sorted_BV = _log_softmax(np.where(is_kept_BV, sorted_BV, -np.inf))
    mass_BV = np.exp(sorted_BV).cumsum(axis=1)
    before_BV = mass_BV - np.exp(sorted_BV)
    is_kept_BV = np.less(before_BV, top_p_B[:, None]) | np.greater_equal(top_p_B, 1.0)[:, None]
    sorted_BV = _log_softmax(np.where(is_kept_BV, sorted_BV, -np.inf))
    result_BV = np.empty_like(sorted_BV)
    np.put_along_axis(result_BV, order_BV, sorted_BV, axis=1)
    return result_BV
