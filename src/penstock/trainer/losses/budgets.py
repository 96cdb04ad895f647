# SPDX-License-Identifier: Apache-2.0
"""Wraps losses that settle a budget before every update (M2PO)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.trainer.losses.tokens import BudgetedObjective, Objective, Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class WrappedBudget:
    """An objective around one that has a budget: settled first, then wrapped."""

    budget: BudgetedObjective
    wrap: Callable[[Objective], Objective]

    def __post_init__(self) -> None:
        self.with_budget(torch.zeros(0))  # refuses an invalid combination before any training

    def budget_terms(self, tokens: Tokens) -> Tensor:
        return self.budget.budget_terms(tokens)

    def with_budget(self, terms: Tensor) -> Objective:
        return self.wrap(self.budget.with_budget(terms))
