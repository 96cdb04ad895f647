# SPDX-License-Identifier: Apache-2.0
"""What a run has used, and whether its budget is spent. Pure.

Owns the sums and the verdict. The caller persists the sums and ends the run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

S_PER_HOUR = 3600.0
MAX_GAP_S = 60.0
"""A longer gap between two observations is not counted in full: its nodes are not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a run has used, over all its starts."""

    tokens: int = 0
    """Sampled tokens of delivered trajectories, without evaluations."""
    node_s: float = 0.0
    """Seconds of live rollout nodes, added up."""

    @property
    def node_hours(self) -> float:
        return self.node_s / S_PER_HOUR


@dataclass(slots=True)
class UsageMeter:
    """Adds up usage from what is observed at intervals."""

    usage: Usage
    _tokens: int | None = None
    """The service's own count at the last observation."""
    _at: float | None = None

    def observe(self, now: float, *, tokens: int, num_nodes: int) -> None:
        """tokens: the count of the run, which the ledger restores when the service restarts."""
        gap_s = 0.0 if self._at is None else min(now - self._at, MAX_GAP_S)
        last = self.usage.tokens if self._tokens is None else self._tokens
        new = max(0, tokens - last)  # a partition that restarts counts from 0 again
        self._tokens, self._at = tokens, now
        self.usage = replace(
            self.usage,
            tokens=self.usage.tokens + new,
            node_s=self.usage.node_s + gap_s * num_nodes,
        )


def spent(usage: Usage, *, tokens: int | None, node_hours: float | None) -> str:
    """Which budget is spent, and how to get more; empty while there is some left."""
    if tokens is not None and usage.tokens >= tokens:
        return (
            f"its budget of {tokens:,} tokens is spent ({usage.tokens:,} sampled); raise "
            "budget.tokens to go on"
        )
    if node_hours is not None and usage.node_hours >= node_hours:
        return (
            f"its budget of {node_hours:g} node-hours is spent ({usage.node_hours:.2f} used); "
            "raise budget.node_hours to go on"
        )
    return ""
