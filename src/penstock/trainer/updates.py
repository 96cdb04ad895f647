# SPDX-License-Identifier: Apache-2.0
"""Cuts a batch into optimizer updates: the samples of each, and the weight of each token.

Owns the order of training (groups kept together, in manifest order) and the denominators: of the
complete update on all ranks, known before its first backward pass.

S = samples, T = tokens of all samples, K = trained tokens of an update.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass, field

import numpy as np
import torch

from penstock.trainer.arrays import Bools, Floats, Ints
from penstock.trainer.batches import Batch
from penstock.trainer.inputs import PROXIMAL, advantages_of, tokens_of, trained_tokens
from penstock.trainer.losses.aggregation import Counts, LossWeights, count
from penstock.trainer.losses.mismatch import Correction
from penstock.trainer.ranks.group import RankReductions


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One optimizer call."""

    samples: Ints
    weights_T: Floats
    """The factor of each token's loss."""
    counts: Counts
    """What the weights were computed with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSpec:
    """How a batch becomes updates."""

    minibatches: int = 1
    """Parts of a batch, one update each."""
    weights: LossWeights = field(default_factory=LossWeights)
    correction: Correction | None = None
    """Which data is rejected."""
    needs_advantage: bool = True
    """Whether an update without any advantage has no learning signal; false for a critic or a
    student."""


def plan_updates(batch: Batch, update_spec: UpdateSpec, ranks: RankReductions) -> list[Update]:
    """One pass over the batch; an update without a learning signal on any rank is left out."""
    is_kept_T = _survivors(batch, update_spec.correction)
    shares = list(_shares(batch, update_spec.minibatches))
    local = [_count(batch, samples, is_kept_T) for samples in shares]
    totals = ranks.sum_over_ranks(np.array(local, np.float64)).astype(np.int64)
    return [
        _update(batch, samples, counts, update_spec.weights, is_kept_T)
        for samples, (*sums, num_credited) in zip(shares, totals.tolist(), strict=True)
        for counts in (Counts(*sums),)
        if not counts.is_empty and (num_credited > 0 or not update_spec.needs_advantage)
    ]


def plan_groups(part: Batch, update_spec: UpdateSpec, num_sequences: int) -> list[Update]:
    """The shares of an update that these groups have, one share each, in order, if the complete
    update will have `num_sequences`. Together they are the update, whatever parts it comes in."""
    is_kept_T = _survivors(part, update_spec.correction)
    counts = update_spec.weights.expected_counts(num_sequences)
    return [
        _update(part, samples, counts, update_spec.weights, is_kept_T)
        for samples in _shares(part, part.num_groups)
        if samples.size
    ]


def updates_of(num_groups: int, minibatches: int) -> Ints:
    """The update each group is trained in: runs of equal numbers of groups, in manifest order."""
    runs = np.array_split(np.arange(num_groups), minibatches)
    return np.repeat(np.arange(minibatches), [run.size for run in runs])


def _shares(batch: Batch, num_parts: int) -> Iterator[Ints]:
    """Samples with a token, by part. Counts this rank's rows only: a part may be empty here and not
    on another rank."""
    updates_S = updates_of(batch.num_groups, num_parts)[batch.groups_R[batch.samples.rows_S]]
    has_tokens_S = trained_tokens(batch.samples) > 0
    for update in range(num_parts):
        yield np.flatnonzero((updates_S == update) & has_tokens_S)


def _count(batch: Batch, samples: Ints, is_kept_T: Bools | None) -> tuple[int, ...]:
    token_K = tokens_of(batch.samples, samples)
    kept_K = None if is_kept_T is None else is_kept_T[token_K]
    counts = count(trained_tokens(batch.samples)[samples], kept_K)
    return (*astuple(counts), int(np.count_nonzero(advantages_of(batch)[token_K])))


def _update(
    batch: Batch, samples: Ints, counts: Counts, weights: LossWeights, is_kept_T: Bools | None
) -> Update:
    token_K = tokens_of(batch.samples, samples)
    kept_K = None if is_kept_T is None else is_kept_T[token_K]
    weights_T = np.zeros(batch.samples.ids_T.shape)
    weights_T[token_K] = weights.by_token(trained_tokens(batch.samples)[samples], counts, kept_K)
    return Update(samples=samples, weights_T=weights_T, counts=counts)


def _survivors(batch: Batch, correction: Correction | None) -> Bools | None:
    """Which tokens the correction keeps; None if there is no correction."""
    if correction is None:
        return None
    samples = batch.samples
    token_K = tokens_of(samples, np.arange(samples.starts_S.size))
    sequences_K = np.repeat(np.arange(samples.starts_S.size), trained_tokens(samples))
    is_kept_K = correction.survivors(
        torch.from_numpy(batch.token_columns[PROXIMAL][token_K]),
        torch.from_numpy(samples.logprobs_T[token_K].astype(np.float64)),
        torch.from_numpy(np.unique(sequences_K, return_inverse=True)[1]),
    )
    is_kept_T = np.zeros(samples.ids_T.shape, np.bool_)
    is_kept_T[token_K] = is_kept_K.numpy()
    return is_kept_T
