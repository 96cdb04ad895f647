# SPDX-License-Identifier: Apache-2.0
"""The contract between the learner and its objectives: what a loss reads and returns.

An objective is a pure function of the trained tokens of one micro-batch. Sequences are never cut
between micro-batches, so it may reduce over one. What must be known of an update before its first
backward pass (denominators, a trust-region budget) is settled before it is called.

K = trained tokens of a micro-batch, S = its sequences. A sequence is a sample: one path of turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Trained tokens of a micro-batch, sequence after sequence."""

    logprobs_K: Tensor
    """Under the weights now; carries the gradient."""
    entropy_K: Tensor
    """Of the distribution each token was drawn from, now; carries the gradient."""
    sampling_K: Tensor
    """Log-probs that the engine recorded when it sampled: the behaviour policy's."""
    advantages_K: Tensor
    """Credit of each token."""
    sequences_K: Tensor
    """Which sequence a token belongs to: 0 … S-1, never falling, none left out."""
    staleness_K: Tensor
    """Versions between the one that sampled the token and the one the batch trains from."""
    proximal_K: Tensor | None = None
    """Log-probs under the weights at the start of the step, when a stage has written them."""
    reference_K: Tensor | None = None
    """Log-probs under the frozen reference, when a stage has written them."""
    extra_columns: Mapping[str, Tensor] | None = None
    """Further token columns that the training stage reads, by name: teacher log-probs, old values,
    returns, whatever a user's own stage has written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """One number per token to minimise, and the metrics to report."""

    loss_K: Tensor
    """The learner multiplies each by its weight (1 / denominator) and sums."""
    metrics: Mapping[str, Tensor]
    """By metric name, one detached number per token; the learner reports their mean over the
    trained tokens of the step, over all ranks."""


class Objective(Protocol):
    """A loss by token."""

    def __call__(self, tokens: Tokens) -> TokenLoss: ...


@runtime_checkable
class BudgetedObjective(Protocol):
    """An objective with a budget over a complete update, all ranks included (M2PO)."""

    def budget_terms(self, tokens: Tokens) -> Tensor:
        """What this micro-batch puts on the budget: any number of values, without gradient."""
        ...

    def with_budget(self, terms: Tensor) -> Objective:
        """The objective of this update, given the pressures of all its micro-batches on all ranks,
        in any order."""
        ...
