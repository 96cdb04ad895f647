# SPDX-License-Identifier: Apache-2.0
"""admit: outcome. Admits groups whose members all have one of the allowed outcomes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from penstock.dataflow.rules.rule import Rule
from penstock.options import non_empty
from penstock.types import DropReason, Hook, JudgedGroup

Outcome = Literal["completed", "truncated"]


class Outcomes(Rule):
    """Admit groups by the outcomes of their members."""

    hook = Hook.ADMIT
    name = "outcome"

    allow: Annotated[tuple[Outcome, ...], Field(strict=False), non_empty()] = ("completed",)
    """Allowed outcomes."""

    def judge(self, group: JudgedGroup) -> DropReason | None:
        is_allowed = all(row.outcome in self.allow for row in group.rows)
        return None if is_allowed else DropReason.OUTCOME


RULE = Outcomes
