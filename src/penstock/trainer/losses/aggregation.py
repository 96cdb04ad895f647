# SPDX-License-Identifier: Apache-2.0
"""How token losses become one number: the weight of each token, known before any backward pass.

One rule for denominators:

- A token that is not trained (prompt, tool output, another policy's, overlong and filtered) is in
  neither numerator nor denominator: it never gets here.
- A token that a trust region suppresses (PPO's clip, M2PO) is out of the numerator only.
- A token rejected as data (engine mismatch) is out of both, but the denominator stays at least half
  of its size: few survivors are not scaled up without bound.

Counts are of a complete update: added over micro-batches and ranks first. A sequence counts if it
has a token. Pure NumPy.

S = sequences, K = trained tokens, sequence after sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from penstock.trainer.arrays import Bools, Floats, Ints

_MIN_SURVIVING = 0.5


class Aggregation(StrEnum):
    """What is averaged over what."""

    TOKEN_MEAN = "token-mean"
    """Every token has the same weight: PPO, DAPO."""
    SEQ_MEAN_TOKEN_MEAN = "seq-mean-token-mean"
    """Every sequence has the same weight: GRPO as published, GSPO."""
    SEQ_MEAN_TOKEN_SUM = "seq-mean-token-sum"
    FIXED_CONSTANT = "fixed-constant"
    """Sum over tokens / (sequences × a constant length): Dr.GRPO."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Of an update, or of the part of it that one rank or micro-batch holds."""

    num_tokens: int
    num_sequences: int
    num_surviving_tokens: int
    num_surviving_sequences: int
    """With at least one surviving token."""

    @property
    def is_empty(self) -> bool:
        """Nothing to train on: the step is skipped."""
        return self.num_surviving_tokens == 0


def count(lengths_S: Ints, is_kept_K: Bools | None) -> Counts:
    """Of these sequences, given by their trained tokens; a sequence may have none."""
    surviving_S = _surviving(lengths_S, is_kept_K)
    return Counts(
        num_tokens=int(lengths_S.sum()),
        num_sequences=int(np.count_nonzero(lengths_S)),
        num_surviving_tokens=int(surviving_S.sum()),
        num_surviving_sequences=int(np.count_nonzero(surviving_S)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossWeights:
    """The rule a run has chosen."""

    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    constant_length: int = 0
    """The longest answer allowed; read for a fixed constant only."""

    def expected_counts(self, num_sequences: int) -> Counts:
        """Counts of an update that is not complete yet, if it will have so many sequences. Its
        weights are right but for one factor, `rescale`."""
        if self.aggregation is Aggregation.TOKEN_MEAN:
            raise ValueError("token-mean divides by the tokens of the complete update")
        return Counts(num_sequences, num_sequences, num_sequences, num_sequences)

    def rescale(self, expected: Counts, actual: Counts) -> float:
        """Factor from weights under the expected counts to those under the actual ones; exactly 1
        if as many sequences came as expected."""
        return expected.num_sequences / float(
            _counted(actual.num_sequences, actual.num_surviving_sequences)
        )

    def by_token(self, lengths_S: Ints, of_update: Counts, is_kept_K: Bools | None) -> Floats:
        """The factor of each token's loss, given the counts of the complete update."""
        if of_update.is_empty:
            return np.zeros(int(lengths_S.sum()))
        weights_S = 1 / self._denominators(lengths_S, of_update, is_kept_K)
        weights_K = np.repeat(weights_S, lengths_S)
        return weights_K if is_kept_K is None else np.where(is_kept_K, weights_K, 0.0)

    def _denominators(self, lengths_S: Ints, of_update: Counts, is_kept_K: Bools | None) -> Floats:
        num_tokens = _counted(of_update.num_tokens, of_update.num_surviving_tokens)
        num_sequences = _counted(of_update.num_sequences, of_update.num_surviving_sequences)
        match self.aggregation:
            case Aggregation.TOKEN_MEAN:
                denominator = num_tokens
            case Aggregation.SEQ_MEAN_TOKEN_MEAN:
                counted_S = _counted(lengths_S, _surviving(lengths_S, is_kept_K))
                denominator = num_sequences * np.where(lengths_S > 0, counted_S, 1.0)
            case Aggregation.SEQ_MEAN_TOKEN_SUM:
                denominator = num_sequences
            case Aggregation.FIXED_CONSTANT:
                denominator = num_sequences * self.constant_length
        return np.broadcast_to(denominator, lengths_S.shape)


def _counted(original: int | Ints, surviving: int | Ints) -> Floats:
    return np.maximum(surviving, _MIN_SURVIVING * np.asarray(original, np.float64))


def _surviving(lengths_S: Ints, is_kept_K: Bools | None) -> Ints:
    if is_kept_K is None:
        return lengths_S
    sums = np.concatenate([[0], np.cumsum(is_kept_K)])
    ends_S = np.cumsum(lengths_S)
    return sums[ends_S] - sums[ends_S - lengths_S]
