# SPDX-License-Identifier: Apache-2.0
"""Settings of the balance report: the thresholds of its three-zone rule, and the size of the pool.

Owns numbers only. Does not know what a window or a wait is measured from."""

from collections.abc import Iterator
from typing import Annotated, Self

from pydantic import Field, PositiveInt, model_validator

from penstock.config.base import Contradiction, Section, raise_contradictions

Share = Annotated[float, Field(gt=0, lt=1)]


class ReportConfig(Section):
    """When the balance report recommends another size of the rollout pool."""

    tau_low: Share = 0.05
    """Trainers that wait for less than this share of their time may do with fewer GPUs."""
    tau_high: Share = 0.10
    """Trainers that wait for more than this share of their time need more GPUs."""
    rho: float = Field(default=1.10, ge=1, le=10)
    """Margin kept when the pool shrinks: so many times what was used."""
    window: PositiveInt = 10
    """Versions that some policy trains between two decisions."""
    min_gpus: PositiveInt = 1
    """Never recommend fewer GPUs."""
    max_gpus: PositiveInt | None = None
    """Never recommend more GPUs; null for no limit."""
    node_start_s: float = Field(default=0.0, ge=0)
    """Seconds from ordering a node to its first lease, where that takes longer than what is seen
    from its joining on; the cool-down after a decision lasts at least 1.5 times as long."""

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        raise_contradictions(self._contradictions())
        return self

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
