# SPDX-License-Identifier: Apache-2.0
"""What a sub-agent may use: sampled tokens, model calls, and sub-agents below it.

Owns the count. A call counts for the sub-agent that makes it and for all above it. Knows nothing of
time: `ctx.spawn` has a deadline for that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from penstock.errors import BudgetExceeded


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of a sub-agent, its own sub-agents included; None: no limit."""

    max_tokens: int | None = None
    """Most sampled tokens. A call gets at most what is left; calls that run at the same time may
    exceed it together."""
    max_calls: int | None = None
    """Most model calls."""
    max_depth: int | None = None
    """Most levels of sub-agents below it; 0 if it may spawn none."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_calls", "max_depth"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} of a budget is {value}; give 0 or more, or None")


class BudgetMeter:
    """What one sub-agent has used of its budget."""

    def __init__(self, budget: Budget, agent: str, above: BudgetMeter | None = None) -> None:
        self._budget = budget
        self._agent = agent
        self._above = above
        self._num_tokens = 0
        self._num_calls = 0

    def start_call(self, max_tokens: int) -> int:
        """Count a call and return how many tokens it may sample, at most `max_tokens`. Raises
        BudgetExceeded, and then counts nothing."""
        for meter in self._chain():
            max_tokens = min(max_tokens, meter._tokens_left(max_tokens))
        for meter in self._chain():
            meter._num_calls += 1
        return max_tokens

    def end_call(self, num_tokens: int) -> None:
        """Count the tokens that a call sampled."""
        for meter in self._chain():
            meter._num_tokens += num_tokens

    def check_spawn(self) -> None:
        """Raise BudgetExceeded if the agent may have no sub-agent."""
        for height, meter in enumerate(self._chain()):
            most = meter._budget.max_depth
            if most is not None and height >= most:
                meter._refuse("depth", f"max_depth={most}", "answer without a further sub-agent")

    def _tokens_left(self, max_tokens: int) -> int:
        budget = self._budget
        if budget.max_calls is not None and self._num_calls >= budget.max_calls:
            self._refuse("calls", f"max_calls={budget.max_calls}", "answer from what it has")
        if budget.max_tokens is None:
            return max_tokens
        if self._num_tokens >= budget.max_tokens:
            self._refuse("tokens", f"max_tokens={budget.max_tokens}", "answer from what it has")
        return budget.max_tokens - self._num_tokens

    def _refuse(self, limit: str, value: str, fix: str) -> NoReturn:
        raise BudgetExceeded(
            f"sub-agent {self._agent} has used its budget of {limit} ({value}); {fix}, or give "
            "ctx.spawn a larger budget",
            limit=limit,
        )

    def _chain(self) -> Iterator[BudgetMeter]:
        meter: BudgetMeter | None = self
        while meter is not None:
            yield meter
            meter = meter._above
