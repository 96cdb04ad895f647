# SPDX-License-Identifier: Apache-2.0
"""What one credential may use at a time, and the refusals of more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import Busy, Forbidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one credential's subject."""

    max_models: int = 8
    """Models in memory; one that was idle for `idle_s` is not."""
    max_rank: int = 1024
    """Of the models in memory, all together: adapters, gradients and optimizers grow with it."""
    max_waiting: int = 4096
    """Requests without a result."""
    max_stored_bytes: int = 64 << 30
    """Of saved weights, models, requests and results."""
    idle_s: float = 1800.0
    keep_s: float = 7 * 86_400.0
    """How long results, and weights of sampling clients, are kept."""

    def check_waiting(self, num_waiting: int) -> None:
        """Raises Busy if one more would be too many."""
        if num_waiting >= self.max_waiting:
            raise Busy(
                f"{self.max_waiting} requests of this credential wait; retrieve their results "
                "first",
                retry_after_s=1.0,
            )

    def check_models(self, ranks: Sequence[int], rank: int) -> None:
        """Raises Forbidden if a model of this rank, beside those in use, would be too many."""
        if len(ranks) >= self.max_models or sum(ranks) + rank > self.max_rank:
            raise Forbidden(
                f"this credential has {len(ranks)} models in use with rank {sum(ranks)} together; "
                f"its limits are {self.max_models} and {self.max_rank}. One that is idle for "
                f"{self.idle_s:.0f} s counts no longer"
            )
