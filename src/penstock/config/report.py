# SPDX-License-Identifier: Apache-2.0
"""Settings of the balance report: the thresholds of its three zones, and the size of the pool.

Owns numbers only. Does not know how windows and waits are measured."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field, PositiveInt

from penstock.config.base import Contradiction, Section

Share = Annotated[float, Field(gt=0, lt=1)]


class ReportConfig(Section):
    """When the balance report recommends another size of the rollout pool."""

    tau_low: Share = 0.05
    """Trainers that wait less than this share of their time need fewer GPUs."""
    tau_high: Share = 0.10
    """Trainers that wait more than this share of their time need more GPUs."""
    rho: float = Field(default=1.10, ge=1, le=10)
    """Margin when the pool shrinks: the new size is at least this multiple of the usage."""
    window: PositiveInt = 10
    """Versions that some policy trains between two decisions."""
    min_gpus: PositiveInt = 1
    """Never recommend fewer GPUs."""
    max_gpus: PositiveInt | None = None
    """Never recommend more GPUs; null for no limit."""
    node_start_s: float = Field(default=0.0, ge=0)
    """Seconds from requesting a node to its first lease, if longer than measured from its join; the
    cool-down after a decision lasts at least 1.5 times as long."""

    def _contradictions(self) -> Iterator[Contradiction]:
        if self.tau_low >= self.tau_high:
            yield Contradiction(
                text=f"tau_low {self.tau_low} leaves no zone below tau_high {self.tau_high}; "
                "set tau_low < tau_high",
                keys=(("tau_low",), ("tau_high",)),
            )
        if self.max_gpus is not None and self.max_gpus < self.min_gpus:
            yield Contradiction(
                text=f"max_gpus {self.max_gpus} is below min_gpus {self.min_gpus}; "
                "set max_gpus >= min_gpus",
                keys=(("max_gpus",), ("min_gpus",)),
            )
