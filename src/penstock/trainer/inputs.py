# SPDX-License-Identifier: Apache-2.0
"""From a batch to what one forward pass takes: updates, micro-batches, padded tensors.

Owns the order of training: groups whole and in manifest order, each update's denominator known
before its first backward pass. All reshaping is vectorised NumPy; tensors appear only at the end.

S = samples, T = tokens of all samples, B = samples of a micro-batch, U = distinct inputs among
these, L = padded length, C = positions whose logits are needed, K = trained tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.trainer.batches import Batch
from penstock.trainer.losses import Truncation
from penstock.trainer.samples import Samples

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The samples of one optimizer call."""

    samples: Ints
    num_trained: int
    """Denominator of the loss: trained tokens of the whole update, over all micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """One micro-batch; a stream that every token leaves at its default is None."""

    ids_UL: Tensor
    """Padded on the right, without each sample's last token: nothing is predicted from it."""
    positions_C: Tensor
    picked_K: Tensor
    """Index of each trained token's logits in the flat U×C."""
    targets_K: Tensor
    logprobs_K: Tensor
    """Recorded at sampling."""
    advantages_K: Tensor
    is_fresh_K: Tensor
    """Sampled by the very version the batch trains from."""
    temperature_K: Tensor | None
    kept: Truncation | None

    def to(self, device: torch.device) -> Inputs:
        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        kept = self.kept
        return Inputs(
            ids_UL=move(self.ids_UL),
            positions_C=move(self.positions_C),
            picked_K=move(self.picked_K),
            targets_K=move(self.targets_K),
            logprobs_K=move(self.logprobs_K),
            advantages_K=move(self.advantages_K),
            is_fresh_K=move(self.is_fresh_K),
            temperature_K=None if self.temperature_K is None else move(self.temperature_K),
            kept=None
            if kept is None
            else Truncation(
                top_k_K=move(kept.top_k_K),
                top_p_K=move(kept.top_p_K),
                min_p_K=move(kept.min_p_K),
            ),
        )


def plan_updates(batch: Batch, minibatches: int) -> list[Update]:
    """One pass over the batch; an update without a token or an advantage is left out."""
    samples = batch.samples
    groups_S = batch.groups_R[samples.rows_S]
    trained_S = _trained_by_sample(samples)
    has_credit_S = (batch.advantages_R[samples.rows_S] != 0) & (trained_S > 0)
    updates: list[Update] = []
    for groups in np.array_split(np.arange(batch.num_groups), minibatches):
        if groups.size == 0:
            continue
        first, end = np.searchsorted(groups_S, [groups[0], groups[-1] + 1])
        if has_credit_S[first:end].any():
            chosen = np.arange(first, end)[trained_S[first:end] > 0]
            updates.append(Update(samples=chosen, num_trained=int(trained_S[chosen].sum())))
    return updates


def micro_batches(update: Update, batch: Batch, max_tokens: int) -> Iterator[Inputs]:
    """The update in parts of at most `max_tokens` padded tokens, a longer sample alone.

    Samples of like length stand together, so little is padded; the sum over an update does not
    depend on their order.
    """
    samples = batch.samples
    lengths = (samples.ends_S - samples.starts_S)[update.samples] - 1
    order = np.argsort(lengths, kind="stable")
    first = 0
    while first < order.size:
        end = first + 1
        while end < order.size and (end - first + 1) * int(lengths[order[end]]) <= max_tokens:
            end += 1
        yield make_inputs(batch, update.samples[order[first:end]])
        first = end


def make_inputs(batch: Batch, chosen: Ints) -> Inputs:
    """Tensors of the chosen samples."""
    samples = batch.samples
    starts_B = samples.starts_S[chosen]
    lengths_B = samples.ends_S[chosen] - starts_B - 1
    column_L = np.arange(int(lengths_B.max()))
    is_token_BL = column_L < lengths_B[:, None]
    token_BL = np.where(is_token_BL, starts_B[:, None] + column_L, 0)
    ids_BL = np.where(is_token_BL, samples.ids_T[token_BL], 0)
    is_trained_BL = is_token_BL & samples.mask_T[np.where(is_token_BL, token_BL + 1, 0)]
    sample_K, column_K = np.nonzero(is_trained_BL)
    positions_C = np.flatnonzero(is_trained_BL.any(axis=0))
    token_K = starts_B[sample_K] + column_K + 1
    # Members of a group that agree on all but their last token are one input, and computed once.
    ids_UL, input_B = np.unique(ids_BL, axis=0, return_inverse=True)
    picked_K = input_B[sample_K] * positions_C.size + np.searchsorted(positions_C, column_K)
    advantages_K = batch.advantages_R[samples.rows_S[chosen]][sample_K]
    return Inputs(
        ids_UL=torch.from_numpy(ids_UL.astype(np.int64)),
        positions_C=torch.from_numpy(positions_C),
        picked_K=torch.from_numpy(picked_K),
        targets_K=torch.from_numpy(samples.ids_T[token_K].astype(np.int64)),
        logprobs_K=torch.from_numpy(samples.logprobs_T[token_K]),
        advantages_K=torch.from_numpy(advantages_K),
        is_fresh_K=torch.from_numpy(samples.numbers_T[token_K] == batch.trains_from),
        temperature_K=_temperature(samples, token_K),
        kept=_truncation(samples, token_K),
    )


def _temperature(samples: Samples, token_K: Ints) -> Tensor | None:
    temperature_K = samples.temperature_T[token_K]
    return None if (temperature_K == 1).all() else torch.from_numpy(temperature_K)


def _truncation(samples: Samples, token_K: Ints) -> Truncation | None:
    top_k_K, top_p_K = samples.top_k_T[token_K], samples.top_p_T[token_K]
    min_p_K = samples.min_p_T[token_K]
    if (top_k_K == 0).all() and (top_p_K == 1).all() and (min_p_K == 0).all():
        return None
    return Truncation(
        top_k_K=torch.from_numpy(top_k_K.astype(np.int64)),
        top_p_K=torch.from_numpy(top_p_K),
        min_p_K=torch.from_numpy(min_p_K),
    )


def _trained_by_sample(samples: Samples) -> Ints:
    sums = np.concatenate([[0], np.cumsum(samples.mask_T)])
    return sums[samples.ends_S] - sums[samples.starts_S]
