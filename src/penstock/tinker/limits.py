# SPDX-License-Identifier: Apache-2.0
"""What one credential may use at a time, and the refusals of more."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import Busy, Forbidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one credential's subject."""

    max_models: int = 8
    """Models in memory; one that was idle for `idle_s` is not."""
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

    def check_models(self, num_models: int) -> None:
        """Raises Forbidden if one more would be too many."""
        if num_models >= self.max_models:
            raise Forbidden(
                f"this credential has {self.max_models} models in use, its limit; one that is idle "
                f"for {self.idle_s:.0f} s counts no longer"
            )
