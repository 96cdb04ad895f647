# SPDX-License-Identifier: Apache-2.0
"""Runs a model over a batch in micro-batches: shared by training and inference.

Owns how a batch is cut into forward passes, and that every rank runs the same number of them: the
ranks meet in each one.

K = trained tokens, T = tokens of all samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from penstock.trainer.actor import Actor
from penstock.trainer.arrays import Floats, Ints
from penstock.trainer.batches import Batch
from penstock.trainer.critic import Critic
from penstock.trainer.inputs import Inputs, make_inputs, split
from penstock.trainer.losses.tokens import Tokens
from penstock.trainer.ranks.group import RankReductions
from penstock.trainer.ranks.sharding import free_gathered

Scorer = Actor | Critic
"""A model with an output per trained token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPass:
    """How forward passes are made."""

    ranks: RankReductions
    micro_batch_tokens: int = 4096
    """Most tokens in one; a longer sample is a micro-batch by itself."""
    on_micro_batch: Callable[[], None] = lambda: None
    """Called after each."""

    def run(
        self, scorer: Scorer, batch: Batch, samples: Ints, weights_T: Floats | None = None
    ) -> Iterator[tuple[Inputs, Tokens]]:
        """Each micro-batch of these samples, with the model's output."""
        device = scorer.model.device
        parts = split(samples, batch.samples, self.micro_batch_tokens)
        for index in range(self.ranks.max_over_ranks(len(parts))):
            chosen = parts[index] if index < len(parts) else samples[:0]
            inputs = make_inputs(batch, chosen, weights_T, scorer.context).to(device)
            yield inputs, scorer(inputs)
            self.on_micro_batch()

    @torch.no_grad()
    def infer(self, scorer: Scorer, batch: Batch) -> Floats:
        """The model's current output for each trained token; 0 elsewhere."""
        scores_T = np.zeros(batch.samples.ids_T.shape)
        for inputs, tokens in self.run(scorer, batch, np.arange(batch.samples.starts_S.size)):
            scores_T[inputs.token_K.cpu()] = scorer.scores(tokens).double().cpu()
        free_gathered(scorer)  # only a backward pass would
        return scores_T
