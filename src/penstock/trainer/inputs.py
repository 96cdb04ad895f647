# SPDX-License-Identifier: Apache-2.0
"""From samples to the inputs of a forward pass: micro-batches and their packed tensors.

All reshaping is vectorised NumPy; tensors appear only at the end.

S = samples, T = tokens of all samples, B = samples of a micro-batch, P = tokens of its line (no
padding), K = trained tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from penstock.trainer.arrays import Floats, Ints
from penstock.trainer.attention import Rows, make_attention_layout
from penstock.trainer.batches import Batch
from penstock.trainer.losses.logprobs import Truncation
from penstock.trainer.losses.tokens import Tokens
from penstock.trainer.ranks.context import WHOLE_LINE, Context, LineCut, gather_slices
from penstock.trainer.samples import Samples, ranges
from penstock.types import NO_CHOICE

PROXIMAL, REFERENCE = "proximal_logprobs", "reference_logprobs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """One micro-batch; a stream that every token leaves at its default is None."""

    ids_P: Tensor
    """Sample after sample, each without its last token: nothing is predicted from it."""
    positions_P: Tensor
    """Of each token in its own sample."""
    rows: Rows
    experts_PW: Tensor | None = None
    """The experts that the engine chose for each token, in bytes; None if they are not replayed."""
    token_K: Tensor
    """Which token of the batch each trained one is."""
    predictor_K: Tensor
    """The token of the line from which each trained token is predicted."""
    targets_K: Tensor
    sampling_K: Tensor
    """Log-probs recorded at sampling."""
    advantages_K: Tensor
    sequences_K: Tensor
    weights_K: Tensor
    """The factor of each token's loss."""
    staleness_K: Tensor
    temperature_K: Tensor | None
    kept: Truncation | None
    extra_columns: Mapping[str, Tensor]
    """The batch's further token columns."""
    share: SharedLine | None = None
    """What of this the rank computes, if the ranks of its part share the line."""

    @property
    def own(self) -> Inputs:
        """What this rank computes."""
        return self if self.share is None else self.share.own

    def gather(self, values_K: Tensor) -> Tensor:
        """Results of all trained tokens, given the results that this rank computes."""
        return values_K if self.share is None else self.share.gather(values_K)

    def to(self, device: torch.device) -> Inputs:
        if device.type == "cpu":
            return self
        return _moved_fields(self, device)

    def specs(self, part: slice | Tensor) -> tuple[Tensor | None, Truncation | None]:
        """Temperature and truncation of some of the trained tokens."""
        temperature_K = None if self.temperature_K is None else self.temperature_K[part]
        kept = self.kept
        if kept is not None:
            kept = Truncation(
                top_k_K=kept.top_k_K[part], top_p_K=kept.top_p_K[part], min_p_K=kept.min_p_K[part]
            )
        return temperature_K, kept

    def tokens(self, logprobs_K: Tensor, entropy_K: Tensor, **now: Tensor) -> Tokens:
        """What the objective sees after the forward pass."""
        dtype = logprobs_K.dtype
        extra_columns = {name: values.to(dtype) for name, values in self.extra_columns.items()}
        return Tokens(
            logprobs_K=logprobs_K,
            entropy_K=entropy_K,
            sampling_K=self.sampling_K.to(dtype),
            advantages_K=self.advantages_K.to(dtype),
            sequences_K=self.sequences_K,
            staleness_K=self.staleness_K,
            proximal_K=extra_columns.pop(PROXIMAL, None),
            reference_K=extra_columns.pop(REFERENCE, None),
            extra_columns={**extra_columns, **now},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLine:
    """What one rank computes of a line that the ranks of its part share."""

    own: Inputs
    """Its slice of the line, and the trained tokens that are predicted from it."""
    order_K: Tensor
    """Where each trained token of the line is in what the ranks gather."""
    num_gathered: int
    """From each rank, padded."""
    context: Context

    def gather(self, values_K: Tensor) -> Tensor:
        padded = pad(values_K, (0, self.num_gathered - values_K.numel()))
        return gather_slices(padded, self.context).index_select(0, self.order_K)

    def to(self, device: torch.device) -> SharedLine:
        return replace(self, own=self.own.to(device), order_K=self.order_K.to(device))


def _moved_fields(record: Any, device: torch.device) -> Any:
    names = [one.name for one in fields(record)]
    return replace(record, **{name: _moved(getattr(record, name), device) for name in names})


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Truncation):
        return _moved_fields(value, device)
    if isinstance(value, Mapping):
        return {name: _moved(one, device) for name, one in value.items()}
    return value if value is None else value.to(device)


def split(chosen: Ints, samples: Samples, max_tokens: int) -> list[Ints]:
    """Split samples into parts of at most `max_tokens` tokens; a longer sample is a part by itself.

    Samples of similar length are grouped, so little is padded in attention; the sum over an update
    does not depend on their order."""
    lengths = (samples.ends_S - samples.starts_S)[chosen] - 1
    order = np.argsort(-lengths, kind="stable")
    parts: list[Ints] = []
    while order.size:
        ends = np.cumsum(lengths[order])
        num = max(1, int(np.searchsorted(ends, max_tokens, side="right")))
        parts.append(chosen[order[:num]])
        order = order[num:]
    return parts


def make_inputs(
    batch: Batch, chosen: Ints, weights_T: Floats | None = None, context: Context = WHOLE_LINE
) -> Inputs:
    """Tensors of the chosen samples; context: the ranks that share their line."""
    samples = batch.samples
    lines, line_B = _distinct(samples, chosen)
    lengths = (samples.ends_S - samples.starts_S)[lines] - 1
    offsets = np.cumsum(lengths) - lengths
    ids_P = samples.ids_T[ranges(samples.starts_S[lines], lengths)].astype(np.int64)
    experts_PW = samples.experts_T[ranges(samples.starts_S[lines], lengths)]
    if not ids_P.size:  # models cannot compute an empty input: one token, whose output is not used
        lengths, ids_P = np.ones(1, np.int64), np.zeros(1, np.int64)
        experts_PW = np.full((1, experts_PW.shape[1]), NO_CHOICE[0], np.uint8)
    sample_K, token_K = _trained(samples, chosen)
    column_K = token_K - samples.starts_S[chosen][sample_K]
    columns = {
        name: torch.from_numpy(values[token_K])
        for name, values in batch.token_columns.items()
        if name != "advantage"
    }
    _, sequences_K = np.unique(sample_K, return_inverse=True)
    weights_K = np.ones(token_K.size) if weights_T is None else weights_T[token_K]
    temperature_K = samples.temperature_T[token_K]
    staleness_K = batch.trains_from - samples.versions_T[token_K].astype(np.int64)
    predictor_K = offsets[line_B][sample_K] + column_K - 1
    inputs = Inputs(
        ids_P=torch.from_numpy(ids_P),
        positions_P=torch.from_numpy(ranges(np.zeros_like(lengths), lengths)),
        rows=make_attention_layout(lengths),
        experts_PW=torch.from_numpy(experts_PW) if experts_PW.shape[1] else None,
        token_K=torch.from_numpy(token_K),
        predictor_K=torch.from_numpy(predictor_K),
        targets_K=torch.from_numpy(samples.ids_T[token_K].astype(np.int64)),
        sampling_K=torch.from_numpy(samples.logprobs_T[token_K]),
        advantages_K=torch.from_numpy(advantages_of(batch)[token_K]),
        sequences_K=torch.from_numpy(sequences_K),
        weights_K=torch.from_numpy(weights_K),
        staleness_K=torch.from_numpy(staleness_K),
        temperature_K=None if (temperature_K == 1).all() else torch.from_numpy(temperature_K),
        kept=_truncation(samples, token_K),
        extra_columns=columns,
    )
    if context.is_whole:
        return inputs
    return replace(inputs, share=_share(inputs, LineCut.of(lengths, context), predictor_K))


def _share(inputs: Inputs, cut: LineCut, predictor_K: Ints) -> SharedLine:
    slice_K, place_K = cut.places(predictor_K)
    chosen = np.flatnonzero(slice_K == cut.context.index)
    own_P, own_K = torch.from_numpy(cut.own_P), torch.from_numpy(chosen)
    num_more = cut.order_P.size - inputs.ids_P.numel()
    ids_P, positions_P = (pad(line, (0, num_more)) for line in (inputs.ids_P, inputs.positions_P))
    temperature_K, kept = inputs.specs(own_K)
    own = replace(
        inputs,
        ids_P=ids_P[own_P],
        positions_P=positions_P[own_P],
        rows=cut.rows(),
        predictor_K=torch.from_numpy(place_K[chosen]),
        targets_K=inputs.targets_K[own_K],
        temperature_K=temperature_K,
        kept=kept,
    )
    counts = np.bincount(slice_K, minlength=cut.context.size)
    order_K = np.empty_like(slice_K)
    for index, count in enumerate(counts.tolist()):
        order_K[slice_K == index] = index * counts.max() + np.arange(count)
    return SharedLine(
        own=own,
        order_K=torch.from_numpy(order_K),
        num_gathered=int(counts.max()),
        context=cut.context,
    )


def advantages_of(batch: Batch) -> Floats:
    """Advantages by token; zeros until a stage has written any: an infer stage may run, and a
    critic learn, before there is credit."""
    found = batch.token_columns.get("advantage")
    return np.zeros(batch.samples.ids_T.shape) if found is None else found


def _distinct(samples: Samples, chosen: Ints) -> tuple[Ints, Ints]:
    """(one sample per distinct input, which of them each sample uses).

    Members of a group that agree on all but their last token are one input, and computed once. The
    same tokens through other experts are another input."""
    seen: dict[bytes, int] = {}
    line_B = np.array(
        [
            seen.setdefault(_key(samples, slice(start, end - 1)), len(seen))
            for start, end in zip(samples.starts_S[chosen], samples.ends_S[chosen], strict=True)
        ],
        np.int64,
    )
    _, first = np.unique(line_B, return_index=True)
    return chosen[first], line_B


def _key(samples: Samples, part: slice) -> bytes:
    return samples.ids_T[part].tobytes() + samples.experts_T[part].tobytes()


def _trained(samples: Samples, chosen: Ints) -> tuple[Ints, Ints]:
    """(which of the chosen, which token of the batch) for each trained token, in order."""
    lengths = (samples.ends_S - samples.starts_S)[chosen]
    token = ranges(samples.starts_S[chosen], lengths)
    sample = np.repeat(np.arange(chosen.size), lengths)
    is_trained = samples.mask_T[token]
    return sample[is_trained], token[is_trained]


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


def trained_tokens(samples: Samples) -> Ints:
    """Number of trained tokens of each sample."""
    sums = np.concatenate([[0], np.cumsum(samples.mask_T)])
    return sums[samples.ends_S] - sums[samples.starts_S]


def tokens_of(samples: Samples, chosen: Ints) -> Ints:
    """The trained tokens of these samples, sample after sample."""
    return _trained(samples, chosen)[1]
