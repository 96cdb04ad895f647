# SPDX-License-Identifier: Apache-2.0
"""What a forward pass of a model costs: of its tokens, their pairs, and the tokens it trains.

Owns the formula, from the figures of a config.json: products of matrices, in which a backward pass
costs the same multiple of everything. Ranks divide rows by it. Imports no torch.

R = rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from penstock.trainer.arrays import Floats
from penstock.trainer.pipeline.pass_memory import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCost:
    """Costs relative to one token's way through the matrices of all layers."""

    per_square: float
    """Of attention, for the square of a sample's length."""
    per_trained: float = 0.0
    """Of the logits of a trained token."""

    @classmethod
    def of(cls, shape: ModelShape) -> Self:
        """Two operations for each number of a matrix; in causal attention two products, of half of
        all pairs of tokens."""
        attention = 2 * shape.hidden * (shape.attention + shape.key_value)
        mlp = shape.hidden * (3 * shape.mlp + shape.num_experts)
        token = 2 * shape.num_layers * (attention + mlp)
        return cls(
            per_square=shape.num_layers * 2 * shape.attention / token,
            per_trained=2 * shape.hidden * shape.vocab / token,
        )

    def rows(self, tokens_R: Floats, squares_R: Floats, trained_R: Floats) -> Floats:
        """Of rows with this many tokens in their samples, this sum of squared lengths, and this
        many trained tokens."""
        # A row without computation has a cost too: it is fetched and read.
        return 1 + tokens_R + self.per_square * squares_R + self.per_trained * trained_R


TYPICAL = PassCost(per_square=1 / 16384)
"""Of a model whose shape is unknown: as if its width were 1,365, some billion parameters."""
